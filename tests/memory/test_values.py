"""Oracles: quadratic losses, whose gradients are known everywhere; torch.stack; the pooled support set."""

import pytest
import torch

from torchemo.core.errors import ConfigError
from torchemo.memory.aggregators import Mean
from torchemo.memory.emo import EMO
from torchemo.memory.recall import Retrieval
from torchemo.memory.store import EpisodicMemory
from torchemo.memory.values import at_step, numbers_per_entry, pick

TASKS, STEPS, RATE = 3, 4, 0.1


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def bowl(directions, targets):
    """Return the gradient of ``sum_r (<a_r, theta> - t_r)^2 / 2`` per task, over two tensors."""

    def gradient(theta):
        flat = torch.cat((theta["w"].flatten(1), theta["b"]), 1)
        residual = torch.einsum("brp,bp->br", directions, flat) - targets
        g = torch.einsum("brp,br->bp", directions, residual)
        return {"w": g[:, :6].view(-1, 2, 3), "b": g[:, 6:]}

    return gradient


def descent(gradient, theta):
    path, gradients = [theta], []
    for _ in range(STEPS):
        gradients.append(gradient(path[-1]))
        path.append({n: t - RATE * gradients[-1][n] for n, t in path[-1].items()})
    return tuple(path), tuple(gradients)


def draw():
    return {"w": torch.randn(TASKS, 2, 3), "b": torch.randn(TASKS, 2)}


@pytest.fixture
def rank_one():
    return bowl(torch.randn(TASKS, 1, 8), torch.randn(TASKS, 1))


def test_secant_of_a_rank_one_bowl_gives_its_gradient_everywhere(rank_one):
    path, gradients = descent(rank_one, draw())
    values = pick("secant", gradients, path, {})
    elsewhere = draw()
    expected = rank_one(elsewhere)
    for step in range(STEPS):
        found = at_step({n: v[:, None] for n, v in values.items()}, "secant", step, elsewhere)
        for name, g in expected.items():
            torch.testing.assert_close(found[name][:, 0], g, rtol=1e-8, atol=1e-8)


def test_secant_of_any_bowl_is_exact_along_its_own_path():
    bent = bowl(torch.randn(TASKS, 5, 8), torch.randn(TASKS, 5))
    path, gradients = descent(bent, draw())
    values = {n: v[:, None] for n, v in pick("secant", gradients, path, {}).items()}
    for step in range(STEPS - 1):  # the last step borrows its factor
        found = at_step(values, "secant", step, path[step + 1])
        for name, g in bent(path[step + 1]).items():
            torch.testing.assert_close(found[name][:, 0], g, rtol=1e-8, atol=1e-8)


def test_secant_at_its_own_anchor_is_the_stored_gradient(rank_one):
    path, gradients = descent(rank_one, draw())
    values = {n: v[:, None] for n, v in pick("secant", gradients, path, {}).items()}
    for step in range(STEPS):
        found = at_step(values, "secant", step, path[step])
        assert all(torch.equal(found[n][:, 0], g) for n, g in gradients[step].items())


def test_a_hill_and_a_single_step_have_no_curvature(rank_one):
    start = draw()

    def hill(theta):
        return {n: -g for n, g in rank_one(theta).items()}

    for path, gradients in (descent(hill, start), ((start, start), (rank_one(start),))):
        values = pick("secant", gradients, path, {})
        assert all(bool((v[:, :, 2] == 0).all()) for v in values.values())
        found = at_step({n: v[:, None] for n, v in values.items()}, "secant", 0, draw())
        assert all(torch.equal(found[n][:, 0], g) for n, g in gradients[0].items())


@pytest.mark.parametrize(
    ("content", "axes"), [("first", ()), ("per_step", (STEPS,)), ("secant", (STEPS, 3))]
)
def test_values_have_the_promised_size(rank_one, content, axes):
    path, gradients = descent(rank_one, draw())
    extra = {"rate/w": torch.ones(TASKS, 2)}
    values = pick(content, gradients, path, extra)
    assert values["w"].shape == (TASKS, *axes, 2, 3)
    assert values["w"][0].numel() == numbers_per_entry(content, STEPS) * 6
    assert values["rate/w"][0].numel() == numbers_per_entry(content, 1) * 2


def memory(content, **options):
    return EMO(
        EpisodicMemory(4, 2, value_dtype=torch.float64),
        Retrieval(k=1),
        Mean(1),
        content=content,
        memory_steps="all",
        **options,
    )


def test_a_quadratic_task_that_comes_back_equals_its_pooled_support_set():
    """Two visits of one task: with the secant every step follows the pooled loss, not the first alone."""
    a, b = (bowl(torch.randn(TASKS, 1, 8), torch.randn(TASKS, 1)) for _ in range(2))
    start, keys = draw(), torch.eye(TASKS, 2)
    emo = memory("secant")
    path, gradients = descent(a, start)
    emo.remember(emo.recall(keys), emo.value(gradients, path=path))
    recall = emo.recall(keys)
    theta = pooled = start
    for step in range(STEPS):
        move = emo.combine(b(theta), recall, step=step, theta=theta)
        theta = {n: t - RATE * move[n] for n, t in theta.items()}
        both = (a(pooled), b(pooled))
        pooled = {n: t - RATE * (both[0][n] + both[1][n]) / 2 for n, t in pooled.items()}
    for name in start:
        torch.testing.assert_close(theta[name], pooled[name], rtol=1e-8, atol=1e-8)


def test_combine_asks_for_the_parameters(rank_one):
    emo, keys = memory("secant"), torch.eye(TASKS, 2)
    path, gradients = descent(rank_one, draw())
    emo.remember(emo.recall(keys), emo.value(gradients, path=path))
    with pytest.raises(ConfigError, match="needs the parameters at this step"):
        emo.combine(gradients[0], emo.recall(keys))
    with pytest.raises(ConfigError, match="needs the parameters of the inner path"):
        emo.value(gradients)


def test_random_values_keep_norms_and_anchors(rank_one):
    emo, keys = memory("secant", control="random_values"), torch.eye(TASKS, 2)
    path, gradients = descent(rank_one, draw())
    values = emo.value(gradients, path=path)
    emo.remember(emo.recall(keys), values)
    kept = {n: v[:TASKS] for n, v in emo.store.values.items()}
    for name, value in values.items():
        torch.testing.assert_close(
            kept[name][:, :, 1].double(), value[:, :, 1], rtol=1e-6, atol=1e-6
        )
        assert not torch.allclose(kept[name][:, :, 0].double(), value[:, :, 0])
        assert bool((kept[name][:, :, 2] == 0).all())
