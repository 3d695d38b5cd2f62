"""It learns, and it does not cheat: known curves, and chance level before any label is seen."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.learners.gradient.problems import learner_part
from torchemo.config.registry import Part
from torchemo.config.run import OuterConfig
from torchemo.core.prototypes import class_means
from torchemo.core.stats import mean_interval
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.data.episodes import EpisodeSpec, sample_episodes
from torchemo.data.load import load
from torchemo.data.synthetic.regression import RegressionSpec, sample_regression
from torchemo.learners import LEARNERS
from torchemo.learners.build import build_learner
from torchemo.memory.aggregators import Sum
from torchemo.memory.emo import EMO
from torchemo.memory.offsets import OffsetMemory
from torchemo.memory.recall import Retrieval
from torchemo.memory.store import EpisodicMemory
from torchemo.models import MLP, Conv4
from torchemo.training.evaluate import batches, evaluate
from torchemo.training.phases import Phases
from torchemo.training.trainer import Trainer

N_WAY = 4
OMNIGLOT = Path(os.environ.get("TORCHEMO_DATA") or "") / "omniglot28.npz"


def blobs(split):
    """Tasks whose classes are points in the plane; labels are a random order in every task."""

    def sample(start, count):
        parts = []
        for i in range(start, start + count):
            g = torch.Generator().manual_seed(2 * i + (split == "test"))
            centres = torch.randn(N_WAY, 8, generator=g)
            order = torch.randperm(N_WAY, generator=g)
            draw = lambda n: torch.cat(  # noqa: E731
                [centres + 0.3 * torch.randn(N_WAY, 8, generator=g) for _ in range(n)]  # noqa: B023
            )
            parts.append((draw(1), order, draw(5), order.repeat(5)))
        sx, sy, qx, qy = (torch.stack(p) for p in zip(*parts, strict=True))
        return Episode(Batch(sx, sy), Batch(qx, qy), index=torch.arange(start, start + count))

    return sample


class InputMean(nn.Module):
    """A key that cannot know labels: the mean input of the support set."""

    dim = 8

    def forward(self, support, params=None):
        return support.x.mean(1)

    def embed(self, support, params=None):
        return support.x

    def prototypes(self, support, n_way, *, params=None):
        return class_means(support.x, support.y, n_way=n_way)


def make_learner(name):
    shape = TaskShape("classification", (8,), N_WAY, base_classes=2 * N_WAY)
    options = {"inner_lr": 0.5, "steps": 2, "rate_init": (0.5, 0.5)}
    part = learner_part(name, widths=(8, 16, 16), **options)  # of SNAIL alone, which is large
    return build_learner(part, MLP(N_WAY, n_in=8, hidden=(16,), initializer="kaiming"), shape)


def with_memory(learner):
    """A memory used in every way at once: a recall step before the first, and at every step.

    A learner without inner steps has offsets that learn from the second batch on.
    """
    store, retrieval = EpisodicMemory(20, 8), Retrieval(5)
    if learner.traits.inner_loop:
        uses = {"memory_steps": "all", "recall_step": "always"}
        return EMO(store, retrieval, Sum(), encoder=InputMean(), **uses)
    return OffsetMemory(store, retrieval, encoder=InputMean(), warmup=1)


def trained_on_blobs(learner, memory, steps):
    outer = OuterConfig(lr=1e-2)
    if learner.title == "Reptile":
        outer = OuterConfig(lr=0.1, optimizer="sgd")
    made = Trainer(learner, memory=memory, config=outer, batched=True)
    for i in range(steps):
        made.step(blobs("train")(8 * i, 8))
    return made


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("name", LEARNERS)
def test_accuracy_is_chance_before_any_support_label_is_used(name, memory, trained):
    """A leak anywhere in the pipeline would lift it: labels are a random order in every task."""
    learner = make_learner(name)
    held = with_memory(learner) if memory else None
    made = trained_on_blobs(learner, held, 40 if trained else 3 * memory)
    tasks = batches(blobs("test"), tasks=100 if name == "snail" else 400, size=100)
    scores = evaluate(learner, made.params, tasks, memory=held, batched=True)
    before, after = scores.accuracy[:, 0], scores.accuracy[:, -1]
    interval = mean_interval(before.double().numpy())
    compares = getattr(getattr(learner, "head", None), "learns_to_compare", False)
    compares |= name == "hvm"  # three outer steps at this rate unsettle its inference networks
    if compares:  # at chance until it is trained, and SNAIL for long after
        assert before.mean() > (0.5 if trained and name != "snail" else 1 / N_WAY - 0.05)
        return
    if name in ("proto-maml", "musml") or not learner.traits.inner_loop:
        assert before.mean() > 0.5  # their start is a classifier
    elif learner.traits.reads_labels_at_start:
        assert float(before.mean()) - 1 / N_WAY > -4 * interval.half_width
    else:  # four half-widths: about one false alarm in ten thousand
        assert abs(float(before.mean()) - 1 / N_WAY) < 4 * interval.half_width
    if trained:
        assert after.mean() > 0.5


def unrelated(start, count):
    """Test tasks whose query labels have nothing to do with their inputs."""
    episode = blobs("test")(start, count)
    y = episode.query.y
    g = torch.Generator().manual_seed(start)
    order = torch.stack([torch.randperm(y.shape[1], generator=g) for _ in range(count)])
    return Episode(episode.support, Batch(episode.query.x, y.gather(1, order)))


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("name", LEARNERS)
def test_accuracy_is_chance_where_labels_mean_nothing(name, memory):
    """After every step, also of learners that read support labels: no query label finds its way in."""
    learner = make_learner(name)
    held = with_memory(learner) if memory else None
    made = trained_on_blobs(learner, held, 10)
    tasks = batches(unrelated, tasks=400, size=100)
    scores = evaluate(learner, made.params, tasks, memory=held, batched=True)
    for step in range(scores.accuracy.shape[1]):
        share = scores.accuracy[:, step].double()
        interval = mean_interval(share.numpy())
        assert abs(float(share.mean()) - 1 / N_WAY) < 4 * interval.half_width


@pytest.mark.slow
def test_maml_learns_sinusoids_below_one_after_a_single_step():
    spec = RegressionSpec("sinusoid", n_shot=10, n_query=10)
    shape = TaskShape("regression", (1,), 1, n_shot=10)
    part = Part("maml", {"inner_lr": 0.01, "steps": 1})
    learner = build_learner(part, MLP(1, initializer="kaiming"), shape)
    made = Trainer(learner, batched=True)

    def sample(split):
        return lambda start, count: sample_regression(
            spec, 0, split=split, start=start, count=count
        )

    for i in range(4000):
        made.step(sample("train")(25 * i, 25))
    scores = evaluate(
        learner, made.params, batches(sample("test"), tasks=600, size=100), batched=True
    )
    start, end = scores.loss.mean(0).tolist()
    assert end < 1.0
    assert start > 2.0  # the queries were not answered without adaptation


@pytest.mark.slow
@pytest.mark.skipif(not OMNIGLOT.is_file(), reason="TORCHEMO_DATA has no omniglot28.npz")
def test_maml_learns_omniglot_five_way_one_shot_above_ninety_percent():
    index = load(OMNIGLOT, image_size=28, channels=1)
    shape = TaskShape("classification", (1, 28, 28), 5)
    model = Conv4(5, in_channels=1, image_size=28)
    learner = build_learner(Part("maml", {"inner_lr": 0.4, "steps": 1}), model, shape)
    outer = OuterConfig(lr=0.006, schedule="cosine")
    made = Trainer(learner, config=outer, phases=Phases(600), workers=2)

    def sample(split, n_query):
        spec = EpisodeSpec(n_way=5, n_shot=1, n_query=n_query, rotations=split == "train")
        return lambda start, count: sample_episodes(
            index, spec, seed=0, split=split, start=start, count=count
        )

    train = sample("train", 5)
    for i in range(600):
        made.step(train(16 * i, 16))
    scores = evaluate(
        learner, made.params, batches(sample("test", 5), tasks=300, size=8), steps=3, workers=2
    )
    assert scores.accuracy[:, -1].mean() > 0.9
    assert abs(float(scores.accuracy[:, 0].mean()) - 0.2) < 0.05
