"""Solving tasks: fresh leaves, one gradient per task, and tasks joined again."""

import pytest
import torch

from tests.laws.cases import OFFSETS, begin, make_episode, make_learner, make_memory, make_params
from torchemo.core.task_axis import take
from torchemo.core.types import Batch, Episode
from torchemo.training.solve import Held, merge, solve

TASKS = 3


def problem(case, memory_case=None):
    """Return a learner, where its tasks begin, the tasks, and a memory with their recall."""
    learner = make_learner(case)
    params, episode = make_params(learner), make_episode(tasks=TASKS)
    memory = None if memory_case is None else make_memory(memory_case, learner)
    start, _, _ = begin(learner, params, episode, memory)
    held = None
    if memory is not None:
        held = Held(memory, memory.recall(memory.encode(episode.support), index=episode.index))
    return learner, start, episode, held


def assert_same(a, b):
    for name, one, other in zip(a._fields, a, b, strict=True):
        if isinstance(one, dict):
            assert one.keys() == other.keys(), name
            flat = [(one[n], other[n]) for n in one if not isinstance(one[n], dict)]
        elif isinstance(one, list):
            flat = list(zip(one, other, strict=True))
        else:
            flat = [] if one is None else [(one, other)]
        for x, y in flat:
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-14, msg=name)


@pytest.mark.parametrize("memory_case", [None, "sum", "gated", OFFSETS])
@pytest.mark.parametrize("case", ["maml", "meta-sgd", "reptile", "arml"])
def test_tasks_solved_apart_and_joined_are_tasks_solved_together(case, memory_case):
    learner, start, episode, held = problem(case, memory_case)
    together = solve(learner, start, episode, held=held)
    parts = [
        solve(learner, *take((start, episode), slice(b, b + 1)), held=take(held, slice(b, b + 1)))
        for b in range(TASKS)
    ]
    joined = merge(parts)
    assert_same(together, joined)
    assert len(joined.losses) == TASKS


def test_metric_learners_are_solved_like_others():
    learner, start, episode, held = problem("protonet", OFFSETS)
    found = solve(learner, start, episode, held=held)
    assert found.support_losses.shape == (TASKS, 0)
    assert found.inner == []
    assert found.theta.keys() == start.theta.keys()


@pytest.mark.parametrize("case", ["maml", "anil", "protonet", "matchingnet"])
def test_gradients_in_inputs_are_those_of_the_outer_loss(case):
    learner, start, episode, _ = problem(case)
    x, q = (batch.x.clone().requires_grad_() for batch in (episode.support, episode.query))
    own = Episode(Batch(x, episode.support.y), Batch(q, episode.query.y))
    found = solve(learner, start, own, inputs=[x, q]).inputs
    losses = learner.loss(learner.fit(start, own.support), own.query)
    for ours, theirs in zip(found, torch.autograd.grad(losses.sum(), [x, q]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def test_gradients_in_what_inner_steps_use_are_summed_in_task_order():
    learner, start, episode, held = problem("maml", "gated")
    parts = [
        solve(learner, *take((start, episode), slice(b, b + 1)), held=take(held, slice(b, b + 1)))
        for b in range(TASKS)
    ]
    (total,) = merge(parts).inner
    (gate,) = held.memory.inner_parameters().values()
    assert total.shape == gate.shape
    assert torch.equal(total, torch.stack([part.inner[0] for part in parts]).sum(0))


def test_solving_leaves_its_inputs_without_gradients():
    learner, start, episode, held = problem("maml", "gated")
    solve(learner, start, episode, held=held)
    assert all(t.grad is None and not t.requires_grad for t in start.theta.values())
    assert all(p.grad is None for p in held.memory.parameters())
