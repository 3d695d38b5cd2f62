"""The outer step: input gates, seams between parts, and the order of writes."""

import pytest
import torch

from tests.laws.cases import MODEL, make_episode, make_learner, make_memory, make_params
from torchemo.core.errors import CheckpointError, ConfigError, DataError, ShapeError, TorchemoError
from torchemo.core.losses import task_loss
from torchemo.core.types import Batch, Episode
from torchemo.learners.gradient.anil import ANIL
from torchemo.learners.gradient.inner import SGD
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.maml import MAML
from torchemo.memory.store import EpisodicMemory
from torchemo.models import MLP, Conv4, lift
from torchemo.training import predict as predicting
from torchemo.training import step
from torchemo.training.predict import predict, runs_together
from torchemo.training.step import outer_step

GOOD = make_episode()


def spoiled(part, *, x=None, y=None):
    batch = getattr(GOOD, part)
    new = Batch(batch.x if x is None else x, batch.y if y is None else y)
    return Episode(new, GOOD.query) if part == "support" else Episode(GOOD.support, new)


def with_nan(x):
    x = x.clone()
    x[1, 0] = torch.nan
    return x


@pytest.mark.parametrize("run", [outer_step, predict])
@pytest.mark.parametrize(
    ("episode", "error", "words"),
    [
        (spoiled("support", x=with_nan(GOOD.support.x)), DataError, "support inputs of task 1"),
        (spoiled("query", x=with_nan(GOOD.query.x)), DataError, "query inputs of task 1"),
        (spoiled("support", y=GOOD.support.y + 1), DataError, r"should lie in 0..2, got 1..3"),
        (spoiled("query", y=GOOD.query.y - 1), DataError, r"should lie in 0..2, got -1..1"),
        (spoiled("support", x=GOOD.support.x[0]), ShapeError, "leading task axis"),
        (spoiled("query", y=GOOD.query.y[:, :2]), ShapeError, "query set"),
        (spoiled("query", x=GOOD.query.x[:1], y=GOOD.query.y[:1]), ShapeError, r"expected x \[2"),
    ],
)
def test_bad_tasks_are_refused_by_name_before_anything_changes(run, episode, error, words):
    learner = make_learner("maml")
    params = make_params(learner)
    memory = make_memory("sum", learner)
    before = {n: t.clone() for n, t in memory.state_dict().items()}
    with pytest.raises(error, match=words):
        run(learner, params, episode, memory=memory)
    assert all(torch.equal(t, before[n]) for n, t in memory.state_dict().items())


def test_a_model_without_the_named_head_is_refused():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3))
    with pytest.raises(ConfigError, match="fc"):
        lift(module, head="fc")
    learner = ANIL(InnerLoop(MODEL, adapts="head"))
    params = make_params(learner)
    del params["head.weight"]
    with pytest.raises(TorchemoError, match="head"):
        outer_step(learner, params, GOOD)


def test_a_memory_of_another_architecture_is_refused_and_left_alone():
    learner = make_learner("maml")
    memory = make_memory("sum", learner)
    wider = MAML(InnerLoop(MLP(3, n_in=2, hidden=(7,), activation="tanh"), rule=SGD(0.1)))
    step = outer_step(wider, make_params(wider), GOOD)
    keys = memory.encode(GOOD.support)
    values = {n: row for n, row in step.rows.items() if n in memory.store.values}
    before = {n: t.clone() for n, t in memory.state_dict().items()}
    with pytest.raises(ShapeError, match=r"layer1.weight.*\[4, 2\].*\[7, 2\]"):
        memory.remember(memory.recall(keys), values)
    with pytest.raises(ShapeError, match=r"layer1.weight.*\[7, 2\].*\[4, 2\]"):
        outer_step(wider, make_params(wider), GOOD, memory=memory)
    other = EpisodicMemory(9, memory.store.key_dim, key_dtype=torch.float64)
    with pytest.raises(CheckpointError, match="capacity"):
        memory.store.load_state_dict(other.state_dict())
    assert all(torch.equal(t, before[n]) for n, t in memory.state_dict().items())


def test_all_reads_of_a_batch_come_before_its_writes():
    """Two equal tasks in one batch do not see each other; the next batch sees both."""
    learner = make_learner("maml")
    params, memory = make_params(learner), make_memory("sum", learner, filled=False)
    twice = Episode(*(Batch(b.x[[0, 0]], b.y[[0, 0]]) for b in (GOOD.support, GOOD.query)))
    step = outer_step(learner, params, twice, memory=memory)
    assert step.recall.m == 0
    memory.remember(step.recall, step.values)
    again = outer_step(learner, params, twice, memory=memory)
    assert again.recall.m == 2
    assert again.recall.distances.max() == 0


def test_what_is_remembered_is_the_support_gradient_at_the_start():
    learner = make_learner("maml")
    params, memory = make_params(learner), make_memory("sum", learner, filled=False)
    step = outer_step(learner, params, GOOD, memory=memory)
    theta = {n: p[None].expand(2, *p.shape).clone().requires_grad_() for n, p in params.items()}
    losses = task_loss(MODEL(theta, GOOD.support.x), GOOD.support.y)
    expected = torch.autograd.grad(losses.sum(), list(theta.values()))
    for name, gradient in zip(theta, expected, strict=True):
        torch.testing.assert_close(step.values[name], gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("content", ["last", "mean", "per_step", "query", "meta"])
def test_other_contents_are_what_they_say(content):
    learner = make_learner("maml")
    params = make_params(learner)
    memory = make_memory("sum", learner, filled=False, content=content)
    step = outer_step(learner, params, GOOD, memory=memory)
    theta = {n: p[None].expand(2, *p.shape).clone().requires_grad_() for n, p in params.items()}

    def gradient(at, batch):
        losses = task_loss(MODEL(at, batch.x), batch.y)
        return dict(zip(at, torch.autograd.grad(losses.sum(), list(at.values())), strict=True))

    def descend(at, g):
        return {n: (at[n] - 0.5 * g[n]).detach().requires_grad_() for n in at}

    first = gradient(theta, GOOD.support)
    middle = descend(theta, first)
    second = gradient(middle, GOOD.support)
    expected = {
        "last": second,
        "mean": {n: (first[n] + second[n]) / 2 for n in first},
        "per_step": {n: torch.stack([first[n], second[n]], 1) for n in first},
        "query": gradient(descend(middle, second), GOOD.query),
        "meta": step.rows,
    }[content]
    for name, value in step.values.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-15)


def test_a_lifted_module_gives_the_same_outer_step_as_the_task_axis_network():
    ours = Conv4(3, in_channels=1, image_size=16, filters=2)
    params = {n: p.double() for n, p in ours.init(torch.Generator().manual_seed(0)).items()}

    class Block(torch.nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.conv = torch.nn.Conv2d(inside, 2, 3, padding=1)
            self.norm = torch.nn.BatchNorm2d(2, eps=1e-3, track_running_stats=False)

        def forward(self, x):
            return torch.nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.Sequential(Block(1), Block(2), Block(2), Block(2))
            self.fc = torch.nn.Linear(2, 3)

        def forward(self, x):
            return self.fc(self.blocks(x).flatten(1))

    theirs = lift(Net().double(), head="fc")
    names = {
        f"blocks.{i}.{a}.{b}": f"{c}{i + 1}.{d}"
        for i in range(4)
        for a, b, c, d in (
            ("conv", "weight", "conv", "weight"),
            ("conv", "bias", "conv", "bias"),
            ("norm", "weight", "norm", "scale"),
            ("norm", "bias", "norm", "shift"),
        )
    } | {"fc.weight": "head.weight", "fc.bias": "head.bias"}
    g = torch.Generator().manual_seed(1)
    y = torch.arange(3).expand(2, 3).contiguous()
    batch = lambda: Batch(torch.rand(2, 3, 1, 16, 16, generator=g, dtype=torch.float64), y)  # noqa: E731
    episode = Episode(batch(), batch())
    a = outer_step(MAML(InnerLoop(ours, steps=2)), params, episode)
    b = outer_step(
        MAML(InnerLoop(theirs, steps=2)), {m: params[n] for m, n in names.items()}, episode
    )
    for m, n in names.items():
        torch.testing.assert_close(a.gradients[n], b.gradients[m], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("x", "parameters", "together"),
    [
        (torch.zeros(2, 5, 3), 1000, True),
        (torch.zeros(2, 5, 3), 100_000, False),
        (torch.zeros(2, 5, 3, 8, 8), 1000, False),
        (torch.zeros(2, 5, 3, 8, 8, device="meta"), 10**6, True),
    ],
    ids=["small on vectors", "large on vectors", "images", "another device"],
)
def test_tasks_run_together_on_other_devices_and_in_small_networks(x, parameters, together):
    episode = Episode(Batch(x, torch.zeros(2, 5)), Batch(x, torch.zeros(2, 5)))
    assert runs_together({"w": torch.zeros(parameters)}, episode) is together


def test_the_automatic_choice_is_what_is_run(monkeypatch):
    learner = make_learner("maml")
    params, episode = make_params(learner), make_episode()
    seen = []
    real = step.solve
    monkeypatch.setattr(
        step,
        "solve",
        lambda learner, start, episode, **more: (
            seen.append(len(episode.support.x)) or real(learner, start, episode, **more)
        ),
    )
    for together, expected in ((True, [2]), (False, [1, 1])):
        monkeypatch.setattr(predicting, "runs_together", lambda params, episode, t=together: t)
        outer_step(learner, params, episode, batched=None)
        assert seen == expected
        seen.clear()
