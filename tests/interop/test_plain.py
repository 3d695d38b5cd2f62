import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from tests.interop.learn2learn_stand_in import MAML, maml_update
from tests.interop.problem import (
    EMOS,
    LR,
    NAMES,
    STEPS,
    TASKS,
    assert_same_meta_gradient,
    collect,
    episode,
    learned_emo,
    library_step,
    mse,
    nearest_by_hand,
    network,
    stored,
    sum_emo,
)
from torchemo.core.errors import ShapeError
from torchemo.core.tree import expand, tree_map
from torchemo.interop import apply_, as_task, combine_one, for_module, gradients


def recall_of(emo):
    return None if emo is None else emo.recall(emo.encode(episode().support))


def loss_of(net, params, x, y):
    return mse(functional_call(net, params, (x,)), y)


def recalled_mean(emo, b):
    """Mean of the recalled values of task b, from lists."""
    _, values = stored()
    slots = nearest_by_hand(emo.encode(episode().support)[b].detach())
    return {name: sum(values[name][slot] for slot in slots) / len(slots) for name in NAMES}


def backward(net, b):
    net.zero_grad()
    mse(net(episode().support.x[b]), episode().support.y[b]).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


# -- whole steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EMOS)
def test_meta_gradient_of_a_torch_func_loop_over_the_task_axis_equals_the_outer_step(case):
    net, emo, tasks = network(), EMOS[case](), episode()
    task_gradient = vmap(grad(lambda p, x, y: loss_of(net, p, x, y)))
    recall = recall_of(emo)

    def query_losses(theta):
        fast = expand(theta, TASKS)
        for step in range(STEPS):
            g = task_gradient(fast, *tasks.support)
            d = g if emo is None else emo.combine(g, recall, step=step)
            fast = tree_map(lambda p, q: p - LR * q, fast, d)
        return vmap(lambda p, x, y: loss_of(net, p, x, y))(fast, *tasks.query)

    theta = {n: p.detach().clone().requires_grad_() for n, p in net.named_parameters()}
    assert_same_meta_gradient(case, *collect(list(query_losses(theta)), theta, emo))


@pytest.mark.parametrize("case", ["none", "sum", "first"])
def test_torch_func_may_also_take_the_outer_gradient(case):
    net, emo, tasks = network(), EMOS[case](), episode()
    recall = recall_of(emo)

    def mean_query_loss(theta):
        losses = []
        for b in range(TASKS):
            fast = theta
            for step in range(STEPS):
                x, y = tasks.support.x[b], tasks.support.y[b]
                d = grad(lambda p, x=x, y=y: loss_of(net, p, x, y))(fast)
                if emo is not None:
                    d = combine_one(emo, d, recall, step=step, task=b)
                fast = tree_map(lambda p, q: p - LR * q, fast, d)
            losses.append(loss_of(net, fast, tasks.query.x[b], tasks.query.y[b]))
        return torch.stack(losses).mean(), torch.stack(losses)

    theta = {n: p.detach() for n, p in net.named_parameters()}
    found, losses = grad(mean_query_loss, has_aux=True)(theta)
    assert_same_meta_gradient(case, losses, found, {})


@pytest.mark.parametrize("case", EMOS)
def test_meta_gradient_through_learn2learns_update_equals_the_outer_step(case):
    net, emo, tasks = network(), EMOS[case](), episode()
    recall, losses = recall_of(emo), []
    for b in range(TASKS):
        clone = MAML(net, lr=LR).clone()
        for step in range(STEPS):
            loss = mse(clone(tasks.support.x[b]), tasks.support.y[b])
            grads = torch.autograd.grad(loss, list(clone.parameters()), create_graph=True)
            if emo is not None:
                grads = combine_one(emo, grads, recall, step=step, task=b, names=NAMES)
            maml_update(clone.module, LR, grads)
        losses.append(mse(clone(tasks.query.x[b]), tasks.query.y[b]))
    assert_same_meta_gradient(case, *collect(losses, dict(net.named_parameters()), emo))


def test_the_cases_differ_so_that_equality_means_something():
    found = [library_step(make()).gradients["0.weight"] for make in EMOS.values()]
    for i, one in enumerate(found):
        assert all((one - other).abs().max() > 1e-3 for other in found[:i])


# -- .grad fields -----------------------------------------------------------------------------------


def test_apply_adds_the_mean_of_the_recalled_gradients_to_grad():
    emo = sum_emo()
    recall = recall_of(emo)
    for b in range(TASKS):
        net = network()
        own, mean = backward(net, b), recalled_mean(emo, b)
        apply_(emo, net, recall, task=b)
        for name, p in net.named_parameters():
            torch.testing.assert_close(p.grad, own[name] + mean[name], rtol=1e-14, atol=1e-14)
            assert not p.grad.requires_grad


def test_apply_keeps_no_graph_of_a_learned_aggregator():
    emo, net = learned_emo(), network()
    own = backward(net, 0)
    apply_(emo, net, recall_of(emo), task=0)
    for name, p in net.named_parameters():
        assert not p.grad.requires_grad
        assert not torch.equal(p.grad, own[name])


def test_apply_serves_any_optimizer_of_torch():
    emo = sum_emo()
    recall, mean = recall_of(emo), recalled_mean(emo, 1)
    one, other = network(), network()
    for net in (one, other):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for step in range(2):
            own = backward(net, 1)
            if net is one:
                apply_(emo, net, recall, step=step, task=1)
            else:
                for name, p in net.named_parameters():
                    p.grad = own[name] + mean[name]
            optimizer.step()
    torch.testing.assert_close(
        dict(one.named_parameters()), dict(other.named_parameters()), rtol=1e-12, atol=1e-14
    )


def test_apply_uses_the_recall_at_the_chosen_steps_only():
    emo = sum_emo("first")
    net = network()
    own = backward(net, 0)
    apply_(emo, net, recall_of(emo), step=1, task=0)
    assert all(torch.equal(p.grad, own[n]) for n, p in net.named_parameters())


def test_a_parameter_without_gradient_is_neither_moved_nor_remembered():
    emo, net = sum_emo(), network()
    net[0].weight.requires_grad_(False)
    backward(net, 0)
    assert sorted(gradients(net)) == ["0.bias", "2.bias", "2.weight"]
    apply_(emo, net, recall_of(emo), task=0)
    assert net[0].weight.grad is None


def test_apply_before_backward_is_refused():
    with pytest.raises(ShapeError, match=r"no tensor has a gradient(.|\n)*backward"):
        apply_(sum_emo(), network(), recall_of(sum_emo()), task=0)


def test_gradients_are_copies_with_a_task_axis():
    net = network()
    own = backward(net, 0)
    kept = gradients(net)
    net.zero_grad(set_to_none=False)
    for name in NAMES:
        assert torch.equal(kept[name], own[name][None])


def test_grad_keeps_the_type_of_its_parameter():
    net = nn.Linear(2, 1).bfloat16()
    emo = for_module(net, k=1, capacity=1, key_dim=1)
    ones = {name: torch.ones(1, *p.shape) for name, p in net.named_parameters()}
    emo.store.write(torch.zeros(1, 1), ones)
    net(torch.ones(3, 2).bfloat16()).sum().backward()
    apply_(emo, net, emo.recall(torch.zeros(1, 1)))
    assert net.weight.grad.dtype == torch.bfloat16
    assert net.weight.grad.tolist() == [[4.0, 4.0]]


def test_a_memory_of_no_slots_leaves_the_gradients_bit_for_bit():
    net = network()
    emo = for_module(net, k=3, capacity=0, key_dim=2)
    own = backward(net, 0)
    recall = emo.recall(torch.zeros(1, 2).double())
    apply_(emo, net, recall)
    emo.remember(recall, gradients(net))
    assert all(torch.equal(p.grad, own[n]) for n, p in net.named_parameters())
    assert len(emo.store) == 0


def test_recall_combine_remember_close_the_circle():
    net = network()
    emo = for_module(net, k=1, capacity=4, key_dim=2)
    key = torch.ones(1, 2).double()
    own = backward(net, 0)
    recall = emo.recall(key)
    apply_(emo, net, recall)
    emo.remember(recall, emo.value((gradients(net),)))
    apply_(emo, net, emo.recall(key))
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad, 2 * own[name], rtol=1e-15, atol=0)


# -- one task ---------------------------------------------------------------------------------------


def test_the_form_of_the_gradients_is_kept_and_so_are_gaps():
    emo = sum_emo()
    recall = recall_of(emo)
    zeros = {n: torch.zeros_like(p) for n, p in network().named_parameters()}
    mean = recalled_mean(emo, 1)
    as_dict = combine_one(emo, zeros, recall, task=1)
    assert list(as_dict) == list(NAMES)
    for form in (tuple, list):
        gap = form([None, *list(zeros.values())[1:]])
        got = combine_one(emo, gap, recall, task=1, names=NAMES)
        assert type(got) is form
        assert got[0] is None
        for name, tensor in list(zip(NAMES, got, strict=True))[1:]:
            torch.testing.assert_close(tensor, mean[name], rtol=1e-14, atol=1e-15)
            assert torch.equal(tensor, as_dict[name])


def test_a_batch_recall_needs_the_number_of_the_task():
    emo = sum_emo()
    grads = dict(network().named_parameters())
    for task in (None, 2, -1):
        with pytest.raises(ShapeError, match=r"recall is of 2 tasks(.|\n)*task=b"):
            combine_one(emo, grads, recall_of(emo), task=task)


def test_names_that_the_memory_does_not_know_are_refused_instead_of_ignored():
    emo = sum_emo()
    wrapped = {f"module.{n}": p for n, p in network().named_parameters()}
    with pytest.raises(ShapeError, match=r"module\.0\.bias(.|\n)*prefix"):
        combine_one(emo, wrapped, recall_of(emo), task=0)


def test_an_empty_memory_refuses_other_names_too():
    emo = for_module(network(), k=3, capacity=5, key_dim=2)
    recall = emo.recall(torch.zeros(1, 2).double())
    with pytest.raises(ShapeError, match="no trainable parameter 'any'"):
        combine_one(emo, {"any": torch.ones(2)}, recall)


@pytest.mark.parametrize("names", [None, NAMES[:3], (NAMES[0],) * 4, (*NAMES, NAMES[0])])
def test_lists_need_one_name_for_each_gradient(names):
    with pytest.raises(ShapeError, match="4 gradients need as many different names"):
        as_task(list(network().parameters()), names=names)
