"""Dense classification against its definition, and its stage before the episodes."""

import math
from dataclasses import replace

import pytest
import torch

from torchemo.config.registry import Part
from torchemo.config.run import DenseConfig, TrainConfig
from torchemo.core.errors import CheckpointError, ConfigError, Diverged
from torchemo.core.types import BaseClasses, Batch, Episode, TaskShape
from torchemo.learners.build import build_learner
from torchemo.models import MLP, Conv4
from torchemo.training.dense.classify import DenseTraining
from torchemo.training.dense.work import dense_beside, work_of
from torchemo.training.phases import Phases
from torchemo.training.trainer import Trainer

WAY, BASE, N = 3, 7, 6
MODEL = MLP(WAY, n_in=2, hidden=(5,), activation="tanh", initializer="kaiming")
SHAPE = TaskShape("classification", (2,), WAY, base_classes=BASE)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(i=0, n=N):
    return Batch(drawn(1, n, 2, seed=i), torch.arange(n).add(i).remainder(BASE)[None])


def episode(i=0):
    y = torch.arange(WAY).expand(2, -1)
    return Episode(Batch(drawn(2, WAY, 2, seed=i), y), Batch(drawn(2, WAY, 2, seed=i + 50), y))


def trainer(dense, *, learner="protonet", steps=(4, 3), **options):
    phases = Phases(steps[1], dense=steps[0])
    made = Trainer(
        build_learner(Part(learner), MODEL, SHAPE),
        phases=phases,
        dense=dense,
        base_classes=BASE,
        **options,
    )
    for p in (*made.params.values(), *made.dense.classifier.values()):
        p.data = p.data.double()
    return made


def features(params, x):
    """Write the network of this test by hand."""
    return [(params["layer1.weight"] @ row + params["layer1.bias"]).tanh() for row in x[0]]


def own_loss(params, classifier, images, smoothing):
    total = 0.0
    for z, y in zip(features(params, images.x), images.y[0].tolist(), strict=True):
        if "scale" in classifier:
            cosines = [torch.dot(z, w) / z.norm() / w.norm() for w in classifier["weight"]]
            scores = classifier["scale"] * torch.stack(cosines)
        else:
            scores = classifier["weight"] @ z + classifier["bias"]
        target = torch.full((BASE,), smoothing / (BASE - 1)).double()
        target[y] = 1 - smoothing
        total = total - (target * (scores - scores.exp().sum().log())).sum()
    return total / images.y.numel()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_a_step_goes_down_the_cross_entropy_over_all_base_classes(kind, smoothing):
    how = {"lr": 0.1, "optimizer": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}
    config = DenseConfig(steps=4, classifier=kind, smoothing=smoothing, clip=None, **how)
    ours = trainer(config)
    theirs = {n: p.detach().clone().requires_grad_() for n, p in ours.params.items()}
    named = {n: p.detach().clone().requires_grad_() for n, p in ours.dense.classifier.items()}
    every = [*theirs.values(), *named.values()]
    speed = [torch.zeros_like(p) for p in every]
    for i in range(3):
        loss = own_loss(theirs, named, batch(i), smoothing)
        pulls = torch.autograd.grad(loss, every)
        with torch.no_grad():
            for p, v, g in zip(every, speed, pulls, strict=True):
                g = g + 0.05 * p
                v.mul_(0.9).add_(g)
                p.sub_(0.1 * (g + 0.9 * v))
        report = ours.step(None, images=batch(i))
        assert float(report.losses) == pytest.approx(float(loss.detach()))
    assert ours.iteration == 3
    for name, p in theirs.items():
        torch.testing.assert_close(ours.params[name], p)
    for name, p in named.items():
        torch.testing.assert_close(ours.dense.classifier[name], p)


def test_the_episodes_begin_where_the_dense_stage_ends_and_have_an_optimizer_of_their_own():
    ours = trainer(DenseConfig(steps=4, schedule="cosine"))
    for i in range(4):
        ours.step(None, images=batch(i))
    assert not ours.optimizer.state
    alone = Trainer(ours.learner, phases=Phases(3))
    for p in alone.params.values():
        p.data = p.data.double()
    alone.begin_with(ours.state_dict(), where="there")
    for i in range(3):
        assert ours.rate_factor == alone.rate_factor
        one, other = ours.step(episode(i)), alone.step(episode(i))
        assert torch.equal(one.losses, other.losses)
        assert one.iteration == other.iteration + 4
    for name, p in alone.params.items():
        assert torch.equal(p, ours.params[name])


def test_a_saved_state_goes_on_bit_for_bit():
    config = DenseConfig(steps=4, share=0.5)
    work = [(None, batch(i)) for i in range(4)]
    work += [(episode(0), batch(4)), (episode(1), None), (episode(2), batch(5))]
    for cut in (2, 4, 5):
        whole, first, second = (trainer(config) for _ in range(3))
        for tasks, images in work:
            whole.step(tasks, images=images)
        for tasks, images in work[:cut]:
            first.step(tasks, images=images)
        second.load_state_dict(first.state_dict())
        for tasks, images in work[cut:]:
            second.step(tasks, images=images)
        ends = [made.state_dict() for made in (whole, second)]
        assert ends[0].keys() == ends[1].keys() >= {"dense", "optimizer", "params"}
        for group, tensors in ends[0].items():
            for name, tensor in tensors.items():
                assert torch.equal(tensor, ends[1][group][name]), (cut, group, name)


def test_running_statistics_move_with_every_batch():
    model = Conv4(WAY, in_channels=1, image_size=16, filters=3, bn="running")
    params = model.init(torch.Generator().manual_seed(0))
    for name in params.keys() - set(model.buffers):
        params[name].requires_grad_()
    made = DenseTraining(model, params, DenseConfig(steps=1), classes=BASE, seed=0)
    images = Batch(torch.rand(1, 4, 1, 16, 16), torch.arange(4)[None])
    seen = {}
    body = {n: p.detach()[None] for n, p in params.items()}
    model.at(0, sink=seen).features(body, images.x)
    made.step(images)
    for name in model.buffers:
        start = 0.0 if name.endswith("mean") else 1.0
        torch.testing.assert_close(params[name], 0.9 * start + 0.1 * seen[name][0])


def test_what_is_not_finite_changes_nothing_and_says_so():
    made = trainer(DenseConfig(steps=4))
    before = {n: p.detach().clone() for n, p in made.params.items()}
    wrong = batch()
    wrong.x[0, 0, 0] = math.inf
    wrong.x[0, 1, 0] = math.nan
    with pytest.raises(Diverged, match="dense classification"):
        made.step(None, images=wrong)
    assert all(torch.equal(p, made.params[n]) for n, p in before.items())


def test_a_network_or_classifier_of_another_shape_is_refused():
    made = trainer(DenseConfig(steps=4))
    state = made.state_dict()
    wide = MLP(WAY, n_in=2, hidden=(6,), activation="tanh")
    other = Trainer(build_learner(Part("protonet"), wide, SHAPE))
    with pytest.raises(ConfigError, match=r"'layer1.weight' is \[5, 2\] in there and \[6, 2\]"):
        other.begin_with(state, where="there")
    with pytest.raises(ConfigError, match="no tensor of this one"):
        made.begin_with({"params": {"conv": torch.zeros(1)}}, where="there")
    linear = trainer(DenseConfig(steps=4, classifier="linear"))
    with pytest.raises(CheckpointError, match="saved dense classifier"):
        linear.begin_with(state, where="there")


def test_tasks_without_base_classes_have_nothing_to_classify():
    learner = build_learner(Part("protonet"), MODEL, replace(SHAPE, base_classes=0))
    with pytest.raises(ConfigError, match="these tasks have 0"):
        Trainer(learner, dense=DenseConfig(steps=1), phases=Phases(1, dense=1))
    with pytest.raises(ConfigError, match="nothing classifies these"):
        Trainer(learner).step(episode(), images=batch())


class Source:
    """Tasks and batches that tell what they were asked for."""

    shape, domains, fingerprint = SHAPE, (), ""

    def sample(self, split, *, seed, start, count, n_query=None):
        mine = episode(start)
        return replace(mine, base=BaseClasses(torch.zeros(2, WAY, dtype=torch.int64)))

    def batches(self, *, seed, start, count, size):
        y = torch.full((count, size), start)
        return Batch(drawn(count, size, 2, seed=start), y)


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_work_is_images_first_then_tasks_from_the_first_on(share):
    train = TrainConfig(steps=40, tasks=2, dense=DenseConfig(steps=3, share=share, batch=4))
    learner, phases = build_learner(Part("protonet"), MODEL, SHAPE), Phases(40, dense=3)
    for step in range(43):
        work = work_of(Source(), train, phases, learner, step=step)
        again = work_of(Source(), train, phases, learner, step=step)
        beside = step >= 3 and dense_beside(train, phases, number=step - 3)
        assert (work.images is not None) == (step < 3 or beside)
        assert (work.tasks is None) == (step < 3)
        if work.images is not None:
            assert work.images.y.unique().tolist() == [step]
            assert torch.equal(work.images.x, again.images.x)
        if work.tasks is not None:
            assert torch.equal(work.tasks.support.x, episode(2 * (step - 3)).support.x)
            assert work.tasks.base.examples is None
    if not share:
        assert not any(dense_beside(train, phases, number=t) for t in range(40))


def test_dense_steps_beside_episodes_get_rare():
    config = TrainConfig(steps=40, dense=DenseConfig(share=0.9))
    counts = torch.zeros(40)
    for seed in range(300):
        train, phases = replace(config, seed=seed), Phases(40)
        counts += torch.tensor([float(dense_beside(train, phases, number=t)) for t in range(40)])
    expected = torch.tensor([0.9 ** (1 + t // 2) for t in range(40)])
    assert expected[0] == pytest.approx(0.9)
    assert expected[-1] == pytest.approx(0.12, abs=0.005)
    # Four standard errors of a share of 300 draws.
    assert ((counts / 300 - expected).abs() < 4 * 0.5 / 300**0.5).all()


def test_sources_without_images_are_refused():
    class Bare:
        shape, domains, fingerprint, sample = SHAPE, (), "", Source.sample

    train = TrainConfig(dense=DenseConfig(steps=3))
    learner = build_learner(Part("protonet"), MODEL, SHAPE)
    with pytest.raises(ConfigError, match="needs images of base classes"):
        work_of(Bare(), train, Phases(4, dense=3), learner, step=0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"steps": -1}, "steps should be 0 or more, or all, got -1"),
        ({"batch": 1}, "batch should be 2 or more"),
        ({"share": 1.0}, r"share should be in \[0, 1\), got 1.0"),
        ({"smoothing": -0.1}, "smoothing should be in"),
        ({"momentum": 0.9}, "momentum is for optimizer = sgd"),
    ],
)
def test_impossible_options_are_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        DenseConfig(**wrong)
