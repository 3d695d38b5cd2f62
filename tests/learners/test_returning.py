"""Training with visits: the outer loss is that of deployment, and its gradient is exact."""

import pytest
import torch

from tests.laws.cases import LEARNER_CASES, MODEL, N_WAY, TASKS, make_episode, make_params
from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError, ShapeError
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch, Episode, Params, TaskShape
from torchemo.learners.build import build_learner
from torchemo.learners.learner import Learner
from torchemo.learners.returning import parted
from torchemo.memory.lifelong.memory import LifelongMemory
from torchemo.memory.lifelong.recognise import ByName
from torchemo.training.lifelong import revisit
from torchemo.training.step import outer_step

LEARNERS = ("maml", "fomaml", "anil", "boil", "meta-sgd", "proto-maml")
OTHERS = ("arml", "hsml", "tsa-maml", "musml", "maml++", "reptile")
SHAPE = TaskShape("classification", (2,), N_WAY, n_shot=2)
NAMES = [tuple(f"{b}-{c}" for c in range(N_WAY)) for b in range(TASKS)]


def make(name: str, visits: int) -> Learner:
    part = LEARNER_CASES[name].set(visits=visits, steps=2, inner_lr=0.4)
    return build_learner(part, MODEL, SHAPE)


def episode(shots: int = 2) -> Episode:
    parts = [make_episode(seed).support for seed in range(shots)]
    x, y = (torch.cat([getattr(p, n) for p in parts], 1) for n in ("x", "y"))
    order = torch.randperm(y.shape[1], generator=generator_for(3))
    return Episode(Batch(x[:, order], y[:, order]), make_episode(9).query)


def loss(learner: Learner, params: Params, shots: int = 2) -> float:
    return float(outer_step(learner, params, episode(shots)).losses.mean())


@pytest.mark.parametrize("name", LEARNERS)
def test_the_outer_loss_is_that_of_visits_in_use(name: str) -> None:
    learner, visitor = make(name, 3), make(name, 1)
    params, tasks = make_params(learner), episode(3)
    memory = LifelongMemory(ByName(), head=MODEL.head)
    losses = []
    for part in parted(tasks.support, 3):
        visit = revisit(visitor, params, part, memory, names=NAMES)
        losses.append(visitor.loss(visit.fitted, tasks.query))
        visit.remember()
    expected = torch.stack(losses).mean(0)
    found = outer_step(learner, params, tasks).losses
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in LEARNERS if n != "fomaml"])
def test_the_outer_gradient_is_exact(name: str) -> None:
    learner = make(name, 2)
    params = make_params(learner)
    step = outer_step(learner, params, episode())
    way = {
        n: torch.randn(g.shape, generator=generator_for(5)).to(g) for n, g in step.gradients.items()
    }
    h = 1e-5
    ends = [
        loss(learner, {n: p + s * h * way.get(n, 0.0) for n, p in params.items()}) for s in (1, -1)
    ]
    slope = sum(float((step.gradients[n] * way[n]).sum()) for n in way)
    assert slope == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-6)


def test_recalled_gradients_are_part_of_the_graph() -> None:
    learner = make("maml", 2)
    params = make_params(learner)
    exact = outer_step(learner, params, episode()).gradients["head.weight"]
    first = outer_step(make("fomaml", 2), params, episode()).gradients["head.weight"]
    assert not torch.allclose(exact, first, rtol=1e-3)


@pytest.mark.parametrize("name", ["maml", "anil"])
def test_tasks_together_have_the_losses_of_tasks_alone(name: str) -> None:
    learner = make(name, 2)
    params = make_params(learner)
    together, alone = (outer_step(learner, params, episode(), batched=b) for b in (True, False))
    torch.testing.assert_close(together.losses, alone.losses)
    for n, gradient in together.gradients.items():
        torch.testing.assert_close(gradient, alone.gradients[n])


def test_at_use_a_support_set_is_one_visit() -> None:
    learner, plain = make("maml", 2), make("maml", 1)
    params, tasks = make_params(learner), episode()
    memory = LifelongMemory(ByName(), head=MODEL.head)
    found = [
        revisit(one, params, tasks.support, memory, names=NAMES).outputs(tasks.query.x)
        for one in (learner, plain)
    ]
    assert torch.equal(*found)


def test_visits_have_as_many_examples_of_every_class() -> None:
    support = episode(4).support
    for part in parted(support, 2):
        assert part.y.sort(1).values.tolist() == [[0, 0, 1, 1, 2, 2]] * TASKS
    points = torch.arange(6.0).view(1, 6, 1)
    first, second = parted(Batch(points, points), 2)
    assert torch.equal(torch.cat([first.x, second.x], 1), points)


def test_examples_that_do_not_make_visits_are_refused() -> None:
    learner = make("maml", 2)
    with pytest.raises(ShapeError, match="9 support examples of 3 classes do not make 2 visits"):
        loss(learner, make_params(learner), 3)
    with pytest.raises(ConfigError, match=r"learner\.visits should be 1 or more, got 0"):
        build_learner(Part("maml", {"visits": 0}), MODEL, SHAPE)


@pytest.mark.parametrize("name", OTHERS)
def test_learners_that_do_not_train_on_visits_say_so(name: str) -> None:
    with pytest.raises(ConfigError, match=r"learner\.visits: .* does not train on visits"):
        build_learner(LEARNER_CASES[name].set(visits=2), MODEL, SHAPE)
