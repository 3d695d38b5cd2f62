import sys

import pytest
import torch
import torchopt
from jaxtyping import TypeCheckError
from torch.func import functional_call

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
from torchemo.core.errors import ConfigError, ShapeError
from torchemo.interop.torchopt import transform


def optimizer_for(emo, recall, *, b, names=None):
    sgd = torchopt.sgd(LR)
    return sgd if emo is None else torchopt.chain(transform(emo, recall, names, task=b), sgd)


def query_loss(net, params, b):
    tasks = episode()
    named = params if isinstance(params, dict) else dict(zip(NAMES, params, strict=True))
    return mse(functional_call(net, named, (tasks.query.x[b],)), tasks.query.y[b])


def support_loss(net, params, b):
    tasks = episode()
    named = params if isinstance(params, dict) else dict(zip(NAMES, params, strict=True))
    return mse(functional_call(net, named, (tasks.support.x[b],)), tasks.support.y[b])


def start(form):
    params = {n: p.detach().clone().requires_grad_() for n, p in network().named_parameters()}
    return params, (dict(params) if form is dict else form(params.values()))


def recall_of(emo):
    return None if emo is None else emo.recall(emo.encode(episode().support))


def gradients_like(loss, params):
    leaves = list(params.values()) if isinstance(params, dict) else list(params)
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    return (
        dict(zip(params, grads, strict=True)) if isinstance(params, dict) else type(params)(grads)
    )


@pytest.mark.parametrize("form", [dict, tuple, list])
@pytest.mark.parametrize("case", EMOS)
def test_meta_gradient_through_a_chain_equals_the_outer_step(case, form):
    net, emo = network(), EMOS[case]()
    recall, (theta, begin) = recall_of(emo), start(form)
    losses = []
    for b in range(TASKS):
        optimizer = optimizer_for(emo, recall, b=b, names=None if form is dict else NAMES)
        fast, state = begin, optimizer.init(begin)
        for _ in range(STEPS):
            grads = gradients_like(support_loss(net, fast, b), fast)
            updates, state = optimizer.update(grads, state, inplace=False)
            fast = torchopt.apply_updates(fast, updates, inplace=False)
        losses.append(query_loss(net, fast, b))
    assert_same_meta_gradient(case, *collect(losses, theta, emo))


@pytest.mark.parametrize("case", EMOS)
def test_meta_gradient_through_the_functional_wrapper_equals_the_outer_step(case):
    net, emo = network(), EMOS[case]()
    recall, (theta, begin) = recall_of(emo), start(tuple)
    losses = []
    for b in range(TASKS):
        optimizer = torchopt.FuncOptimizer(optimizer_for(emo, recall, b=b, names=NAMES))
        fast = begin
        for _ in range(STEPS):
            fast = optimizer.step(support_loss(net, fast, b), fast)
        losses.append(query_loss(net, fast, b))
    assert_same_meta_gradient(case, *collect(losses, theta, emo))


def test_the_state_counts_the_inner_steps_and_updating_is_pure():
    emo = sum_emo(0.5)
    recall = emo.recall(stored()[0][:1])
    link = transform(emo, recall)
    zeros = {n: torch.zeros_like(p) for n, p in network().named_parameters()}
    first = link.init(zeros)
    direction, second = link.update(zeros, first)
    again, _ = link.update(zeros, first)
    later, third = link.update(zeros, second)
    mean = recall.values[NAMES[0]][0].mean(0)
    torch.testing.assert_close(direction[NAMES[0]], mean, rtol=1e-14, atol=0)
    assert torch.equal(again[NAMES[0]], direction[NAMES[0]])
    torch.testing.assert_close(later[NAMES[0]], mean / 2, rtol=1e-14, atol=0)
    assert [int(state.step) for state in (first, second, third)] == [0, 1, 2]
    assert not any(zero.any() for zero in zeros.values())


def test_the_state_is_a_tree_of_tensors_that_torchopt_can_copy():
    link = transform(sum_emo(), recall_of(sum_emo()), task=0)
    state = link.init({})
    copied = torchopt.pytree.tree_map(torch.clone, state)
    assert copied == state
    assert copied.step is not state.step


def test_nested_or_nameless_parameters_are_refused():
    link = transform(sum_emo(), recall_of(sum_emo()), task=0)
    with pytest.raises(ShapeError, match="need as many different names, got no names"):
        link.update((torch.zeros(8, 2),), link.init(()))
    # Where annotations are enforced, they refuse it first.
    with pytest.raises((ShapeError, TypeCheckError), match=r"'0'"):
        link.update({"0": {"weight": torch.zeros(8, 2)}}, link.init(()))


def test_without_torchopt_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchopt.base", None)
    with pytest.raises(ConfigError, match="pip install torchopt"):
        transform(sum_emo(), recall_of(sum_emo()))
