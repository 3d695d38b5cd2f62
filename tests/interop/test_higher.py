import higher
import pytest
import torch
from torch import nn

from tests.interop.problem import (
    EMOS,
    LR,
    NAMES,
    STEPS,
    TASKS,
    assert_same_meta_gradient,
    collect,
    episode,
    mse,
    network,
    stored,
    sum_emo,
)
from torchemo.core.errors import ShapeError
from torchemo.core.task_axis import join
from torchemo.interop import for_module
from torchemo.interop.higher import callback


def adapt_with_higher(net, emo, *, track=True):
    """The inner loops of both tasks; returns query losses and the callbacks."""
    tasks = episode()
    recall = None if emo is None else emo.recall(emo.encode(tasks.support))
    inner = torch.optim.SGD(net.parameters(), lr=LR)
    losses, callbacks = [], []
    for b in range(TASKS):
        with higher.innerloop_ctx(
            net, inner, copy_initial_weights=False, track_higher_grads=track
        ) as (fast, diffopt):
            hook = None if emo is None else callback(emo, recall, NAMES, task=b)
            for _ in range(STEPS):
                support = mse(fast(tasks.support.x[b]), tasks.support.y[b])
                diffopt.step(support, grad_callback=hook)
            losses.append(mse(fast(tasks.query.x[b]), tasks.query.y[b]))
            callbacks.append(hook)
    return losses, callbacks


@pytest.mark.parametrize("case", EMOS)
def test_meta_gradient_through_higher_equals_the_outer_step(case):
    net, emo = network(), EMOS[case]()
    losses, _ = adapt_with_higher(net, emo)
    assert_same_meta_gradient(case, *collect(losses, dict(net.named_parameters()), emo))


def test_the_callback_keeps_the_own_gradients_to_remember():
    net, emo = network(), sum_emo()
    tasks = episode()
    _, hooks = adapt_with_higher(net, emo)
    values = join([emo.value(tuple(hook.gradients)) for hook in hooks])
    for b in range(TASKS):
        assert len(hooks[b].gradients) == STEPS
        assert not any(g[name].requires_grad for g in hooks[b].gradients for name in NAMES)
        loss = mse(net(tasks.support.x[b]), tasks.support.y[b])
        own = torch.autograd.grad(loss, list(net.parameters()))
        for name, grad in zip(NAMES, own, strict=True):
            torch.testing.assert_close(values[name][b], grad, rtol=1e-14, atol=0)


def test_the_callback_works_without_tracking_higher_gradients():
    tracked, _ = adapt_with_higher(network(), sum_emo())
    untracked, _ = adapt_with_higher(network(), sum_emo(), track=False)
    torch.testing.assert_close(untracked, [loss.detach() for loss in tracked], rtol=1e-14, atol=0)


def test_the_callback_counts_the_inner_steps():
    emo = sum_emo(0.5)
    recall = emo.recall(stored()[0][:1])
    hook = callback(emo, recall, NAMES)
    zeros = [torch.zeros_like(p) for p in network().parameters()]
    added = [hook(zeros)[0] for _ in range(3)]
    first = recall.values[NAMES[0]][0].mean(0)
    torch.testing.assert_close(added, [first, first / 2, first / 4], rtol=1e-14, atol=0)


def test_a_frozen_parameter_stays_where_it_is():
    net, emo = network(), sum_emo()
    net[0].bias.requires_grad_(False)
    tasks = episode()
    recall = emo.recall(emo.encode(tasks.support))
    inner = torch.optim.SGD(net.parameters(), lr=LR)
    with higher.innerloop_ctx(net, inner, copy_initial_weights=False) as (fast, diffopt):
        hook = callback(emo, recall, NAMES, task=0)
        diffopt.step(mse(fast(tasks.support.x[0]), tasks.support.y[0]), grad_callback=hook)
        moved = dict(zip(NAMES, fast.parameters(), strict=True))
    assert torch.equal(moved["0.bias"], net[0].bias)
    assert not torch.equal(moved["2.bias"], net[2].bias)
    assert sorted(hook.gradients[0]) == ["0.weight", "2.bias", "2.weight"]


def test_a_refused_step_is_not_counted():
    emo = sum_emo()
    hook = callback(emo, emo.recall(stored()[0][:1]), NAMES)
    with pytest.raises(ShapeError, match=r"3 gradients .* got 4 names"):
        hook([torch.zeros_like(p) for p in network().parameters()][:3])
    assert hook.gradients == []


def test_a_module_of_one_tensor_adapts_too():
    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.slope = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x):
            return self.slope * x

    net = Line()
    emo = for_module(net, k=1, capacity=2, key_dim=1)
    emo.store.write(torch.zeros(1, 1).double(), {"slope": torch.tensor([0.25]).double()})
    hook = callback(emo, emo.recall(torch.zeros(1, 1).double()), ["slope"])
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    with higher.innerloop_ctx(net, inner, copy_initial_weights=False) as (fast, diffopt):
        diffopt.step(fast(torch.tensor(2.0).double()), grad_callback=hook)
        assert next(iter(fast.parameters())).item() == 1 - (2 + 0.25)
