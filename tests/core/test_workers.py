"""Task workers: the same bits whatever their number."""

import threading

import pytest
import torch

from tests.laws.cases import make_episode, make_learner, make_memory, make_params, pairs
from torchemo.core.types import Batch, Episode
from torchemo.core.workers import run_tasks
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.maml import MAML
from torchemo.models import Conv4
from torchemo.training.predict import predict
from torchemo.training.step import outer_step


@pytest.mark.parametrize(("case", "memory_case"), pairs(alone=True))
def test_results_are_bitwise_the_same_for_any_number_of_workers(case, memory_case):
    learner = make_learner(case)
    params, episode = make_params(learner), make_episode(tasks=5)
    memory = None if memory_case is None else make_memory(memory_case, learner)
    one, *others = (
        outer_step(learner, params, episode, memory=memory, workers=n) for n in (1, 2, 4)
    )
    for other in others:
        assert torch.equal(one.losses, other.losses)
        for part in ("gradients", "memory_gradients", "rows", "values"):
            a, b = getattr(one, part), getattr(other, part)
            assert a.keys() == b.keys()
            assert all(torch.equal(a[n], b[n]) for n in a)
    for a, b in zip(
        predict(learner, params, episode, memory=memory).outputs,
        predict(learner, params, episode, memory=memory, workers=4).outputs,
        strict=True,
    ):
        assert torch.equal(a, b)


def test_a_convolutional_step_is_bitwise_the_same_with_two_workers():
    learner = MAML(InnerLoop(Conv4(3, image_size=16, filters=4), steps=2))
    params = learner.init(torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(1)
    y = torch.arange(3).expand(4, 3).contiguous()
    episode = Episode(*(Batch(torch.rand(4, 3, 3, 16, 16, generator=g), y) for _ in range(2)))
    one, two = (outer_step(learner, params, episode, workers=n) for n in (1, 2))
    assert all(torch.equal(one.gradients[n], two.gradients[n]) for n in one.gradients)


def test_results_come_in_task_order_from_several_threads_and_keep_the_callers_grad_mode():
    barrier = threading.Barrier(2, timeout=30)

    def work(i):
        barrier.wait()  # both are in flight at once
        return i, threading.current_thread().name, torch.is_grad_enabled()

    with torch.no_grad():
        results = run_tasks(work, [0, 1], workers=2)
    assert [r[0] for r in results] == [0, 1]
    assert len({r[1] for r in results}) == 2
    assert not any(r[2] for r in results)


def test_an_error_in_a_task_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        run_tasks(lambda i: 1 // i, [1, 0, 2], workers=2)
