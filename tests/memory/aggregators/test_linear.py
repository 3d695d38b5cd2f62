"""Aggr(g, V): the identities of the rules, and the laws that every aggregator obeys."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import nn
from torch.testing import assert_close

from tests.reference.aggregators import (
    HEAD,
    SHAPES,
    each_scalar,
    literal_mean,
    literal_sum,
    one_task,
    permute_slots,
    random_case,
    weighted_mean,
    weighted_sum,
)
from torchemo.core.errors import ConfigError, ShapeError
from torchemo.core.rng import generator_for
from torchemo.memory.aggregators import (
    AGGREGATORS,
    Aggregator,
    CoordinateTransformer,
    Gated,
    GateTransformer,
    Mean,
    Sum,
)
from torchemo.memory.aggregators.parts import check_init

EXACT = {"rtol": 1e-12, "atol": 1e-12}
NAMES = tuple(SHAPES)
REFUSALS = (ConfigError, TypeCheckError)  # the types are checked first where they are enforced


def trained(aggregator, seed=1):
    """Move every parameter away from its initial value, as training would."""
    generator = generator_for(seed, "trained")
    with torch.no_grad():
        for parameter in aggregator.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return aggregator.double()


BUILD = {
    "mean": lambda: Mean(6),
    "mean, own rescaled": lambda: Mean(6, rescale="own"),
    "mean, padded": lambda: Mean(6, pad=True),
    "sum": Sum,
    "gated": lambda: Gated(NAMES),
    "gated per step": lambda: Gated(NAMES, steps=3, learn_own=True),
    "gate": lambda: GateTransformer(
        SHAPES, generator=generator_for(0), head=HEAD, layers=2, use_distances=True
    ),
    "gate from mean": lambda: GateTransformer(
        SHAPES, generator=generator_for(0), init="mean", layers=1
    ),
    "coordinate": lambda: CoordinateTransformer(generator=generator_for(0), chunk=100),
    "coordinate from sum": lambda: CoordinateTransformer(generator=generator_for(0), init="sum"),
}


@pytest.fixture(params=BUILD)
def aggregator(request):
    return trained(BUILD[request.param]())


# The identities of the two rules of the paper.


@pytest.mark.parametrize(("rule", "factor"), [(Mean(5), 1.0), (Sum(), 2.0)])
def test_recalling_the_own_gradient_m_times_gives_g_by_mean_and_2g_by_sum(rule, factor):
    grads, recall = random_case(3, 5)
    values = {n: g[:, None].expand(-1, 5, *g.shape[1:]) for n, g in grads.items()}
    result = rule(grads, recall._replace(values=values))
    assert_close(result, {name: factor * g for name, g in grads.items()}, **EXACT)


@pytest.mark.parametrize(("rule", "factor"), [(Mean(5), 1 / 6), (Sum(), 1.0)])
def test_recalling_zeros_gives_a_share_of_g_by_mean_and_g_by_sum(rule, factor):
    grads, recall = random_case(3, 5)
    values = {name: torch.zeros_like(v) for name, v in recall.values.items()}
    result = rule(grads, recall._replace(values=values))
    assert_close(result, {name: factor * g for name, g in grads.items()}, **EXACT)


@pytest.mark.parametrize("rule", [Mean(4), Mean(4, rescale="own"), Mean(9, pad=True), Sum()])
def test_mean_and_sum_are_linear_in_gradient_and_values_together(rule):
    grads, recall = random_case(2, 4, seed=1)
    more, other = random_case(2, 4, seed=2)
    both = {name: 2 * grads[name] - 3 * more[name] for name in grads}
    values = {name: 2 * v - 3 * other.values[name] for name, v in recall.values.items()}
    first, second = rule(grads, recall), rule(more, other._replace(weights=recall.weights))
    expected = {name: 2 * first[name] - 3 * second[name] for name in grads}
    assert_close(rule(both, recall._replace(values=values)), expected, **EXACT)


def test_sum_minus_the_own_gradient_is_the_recall_alone():
    grads, recall = random_case(3, 4)
    result = Sum()(grads, recall)
    rest = {name: result[name] - g for name, g in grads.items()}
    assert_close(rest, Sum().recall_only(recall), **EXACT)
    assert_close(Mean(4).recall_only(recall), Sum().recall_only(recall), **EXACT)


cases = st.builds(
    random_case,
    st.integers(1, 3),
    st.integers(1, 5),
    seed=st.integers(0, 10**6),
    uniform=st.booleans(),
    spread=st.floats(0, 4),
)


@settings(max_examples=25, deadline=None, database=None)
@given(cases)
def test_mean_and_sum_equal_a_loop_over_slots_and_coordinates(case):
    grads, recall = case
    assert_close(Mean(5)(grads, recall), each_scalar(weighted_mean, grads, recall), **EXACT)
    assert_close(Sum()(grads, recall), each_scalar(weighted_sum, grads, recall), **EXACT)


@pytest.mark.parametrize(("rule", "paper"), [(Mean(5), literal_mean), (Sum(), literal_sum)])
def test_uniform_weights_give_the_equations_of_the_paper(rule, paper):
    grads, recall = random_case(3, 5, uniform=True)
    assert_close(rule(grads, recall), each_scalar(paper, grads, recall), **EXACT)


# The options of Mean.


def test_rescaled_mean_is_the_mean_times_m_plus_one():
    grads, recall = random_case(2, 4)
    expected = {name: 5 * x for name, x in Mean(9)(grads, recall).items()}
    assert_close(Mean(9, rescale="own")(grads, recall), expected, **EXACT)


@pytest.mark.parametrize("m", [0, 1, 4])
def test_padded_mean_keeps_the_own_rate_however_full_the_memory_is(m):
    grads, recall = random_case(2, m)
    zeros = {name: torch.zeros_like(v) for name, v in recall.values.items()}
    padded = Mean(4, pad=True)
    expected = {name: g / 5 for name, g in grads.items()}
    assert_close(padded(grads, recall._replace(values=zeros)), expected, **EXACT)
    assert_close(padded.own_only(grads), expected, **EXACT)


def test_padded_mean_of_a_full_recall_is_the_mean():
    grads, recall = random_case(2, 4)
    assert_close(Mean(4, pad=True)(grads, recall), Mean(4)(grads, recall), **EXACT)


def test_padded_mean_adds_the_recalled_values_over_k_plus_one():
    grads, recall = random_case(2, 2, uniform=True)
    expected = each_scalar(lambda g, v, a: (g + sum(v)) / 8, grads, recall)
    assert_close(Mean(7, pad=True)(grads, recall), expected, **EXACT)


def test_mean_refuses_options_that_cannot_work():
    with pytest.raises(ConfigError, match="contradict"):
        Mean(3, rescale="own", pad=True)
    with pytest.raises(REFUSALS, match=r"'none'.*'own'"):
        Mean(3, rescale="other")
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        Mean(-1)


def test_padded_mean_refuses_a_recall_larger_than_k():
    grads, recall = random_case(1, 4)
    with pytest.raises(ShapeError, match=r"k = 3 .* recall of 4"):
        Mean(3, pad=True)(grads, recall)


# Gates.


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("learn_own", [False, True])
def test_gated_starts_at_the_own_gradient_bit_for_bit(steps, learn_own):
    grads, recall = random_case(3, 4)
    result = Gated(NAMES, steps=steps, learn_own=learn_own)(grads, recall, step=1)
    assert all(torch.equal(result[name], grads[name]) for name in grads)


def test_gated_adds_its_share_of_the_recall_per_tensor():
    grads, recall = random_case(2, 4)
    gated = Gated(NAMES).double()
    with torch.no_grad():
        gated.gate.copy_(torch.tensor([1.0, 0.0, -2.0, 0.5, 1.0]))
    result, summed = gated(grads, recall), Sum()(grads, recall)
    for name, gate in zip(NAMES, gated.gate.tolist(), strict=True):
        assert_close(result[name], grads[name] + gate * (summed[name] - grads[name]), **EXACT)
        assert_close(gated.recall_only(recall)[name], result[name] - grads[name], **EXACT)


def test_gated_has_one_gate_per_step_and_keeps_the_last_one():
    grads, recall = random_case(2, 4)
    gated = Gated(NAMES, steps=2, learn_own=True).double()
    with torch.no_grad():
        gated.gate[:, 0], gated.gate[:, 1] = 0.0, 1.0
        gated.own[:, 0], gated.own[:, 1] = 3.0, 1.0
    assert_close(gated(grads, recall), {name: 3 * g for name, g in grads.items()}, **EXACT)
    for step in (1, 2, 7):
        assert_close(gated(grads, recall, step=step), Sum()(grads, recall), **EXACT)


def test_gated_refuses_names_and_steps_that_cannot_work():
    for names in ((), ("w", "w")):
        with pytest.raises(ConfigError, match="distinct tensor names"):
            Gated(names)
    with pytest.raises(ConfigError, match="got 0"):
        Gated(("w",), steps=0)
    grads, recall = random_case(1, 2)
    with pytest.raises(ShapeError, match=r"got values of \['conv.bias'\]"):
        Gated([name for name in NAMES if name != "conv.bias"])(grads, recall)


# The laws.


def test_the_registry_names_every_aggregator():
    assert list(AGGREGATORS) == ["mean", "sum", "gated", "gate", "coordinate"]
    assert all(issubclass(cls, nn.Module) for cls in AGGREGATORS.values())
    assert {type(build()) for build in BUILD.values()} == set(AGGREGATORS.values())


def test_every_aggregator_obeys_the_protocol_and_keeps_names_order_and_shapes(aggregator):
    grads, recall = random_case(3, 4)
    assert isinstance(aggregator, Aggregator)
    for result in (aggregator(grads, recall, step=2), aggregator.recall_only(recall)):
        assert list(result) == list(grads)
        assert all(result[name].shape == g.shape for name, g in grads.items())


def test_the_order_of_the_slots_makes_no_difference(aggregator):
    grads, recall = random_case(3, 5)
    shuffled = permute_slots(recall, [3, 0, 4, 2, 1])
    assert_close(aggregator(grads, shuffled), aggregator(grads, recall), **EXACT)
    assert_close(aggregator.recall_only(shuffled), aggregator.recall_only(recall), **EXACT)


def test_a_batch_of_tasks_equals_a_loop_over_tasks(aggregator):
    grads, recall = random_case(3, 5)
    together, recalled = aggregator(grads, recall, step=1), aggregator.recall_only(recall, step=1)
    for b in range(3):
        own, alone = one_task(grads, recall, b)
        expected = {name: x[b : b + 1] for name, x in together.items()}
        assert_close(aggregator(own, alone, step=1), expected, **EXACT)
        expected = {name: x[b : b + 1] for name, x in recalled.items()}
        assert_close(aggregator.recall_only(alone, step=1), expected, **EXACT)


def test_an_empty_recall_leaves_the_own_gradient_and_recalls_nothing(aggregator):
    grads, recall = random_case(2, 0)
    result, own = aggregator(grads, recall), aggregator.own_only(grads)
    assert_close(result, own, rtol=0, atol=0)
    if not getattr(aggregator, "pad", False):
        assert all(result[name] is grads[name] and own[name] is grads[name] for name in grads)
    nothing = aggregator.recall_only(recall)
    assert_close(nothing, {name: torch.zeros_like(g) for name, g in grads.items()})


def test_tensors_that_are_not_remembered_go_their_own_way(aggregator):
    grads, recall = random_case(2, 4)
    body = {name: v for name, v in recall.values.items() if name not in HEAD}
    result = aggregator(grads, recall._replace(values=body))
    everything = aggregator(grads, recall)
    own = aggregator.own_only(grads)
    assert list(result) == list(grads)
    assert_close({name: result[name] for name in body}, {name: everything[name] for name in body})
    assert_close({name: result[name] for name in HEAD}, {name: own[name] for name in HEAD})
    nothing = aggregator(grads, recall._replace(values={}))
    assert_close(nothing, own, rtol=0, atol=0)


def test_remembered_tensors_without_gradient_are_left_out(aggregator):
    grads, recall = random_case(2, 4)
    head = {name: grads[name] for name in HEAD}
    expected = aggregator(grads, recall)
    assert_close(aggregator(head, recall), {name: expected[name] for name in HEAD}, **EXACT)


def test_values_that_do_not_fit_the_gradient_are_refused(aggregator):
    grads, recall = random_case(2, 4)
    wrong = recall.values | {"conv.bias": recall.values["conv.bias"][..., :1]}
    with pytest.raises(
        ShapeError, match=r"'conv.bias': expected shape \[2, 4, 3\], got \[2, 4, 1\]"
    ):
        aggregator(grads, recall._replace(values=wrong))


def test_the_inputs_are_not_changed(aggregator):
    grads, recall = random_case(2, 4)
    before = copy.deepcopy((grads, recall.values, recall.weights))
    aggregator(grads, recall)
    aggregator.recall_only(recall)
    aggregator.own_only(grads).clear()
    assert_close((grads, recall.values, recall.weights), before, rtol=0, atol=0)


def test_a_state_dict_carries_everything_that_was_learned(aggregator, request):
    grads, recall = random_case(2, 4)
    fresh = BUILD[request.node.callspec.params["aggregator"]]().double()
    fresh.load_state_dict(aggregator.state_dict())
    assert_close(fresh(grads, recall), aggregator(grads, recall), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["mean", "sum", "gated", "gate from mean", "coordinate from sum"])
def test_the_recall_weights_receive_the_gradient_of_the_direction(name):
    aggregator = trained(BUILD[name]())
    grads, recall = random_case(2, 3, spread=0.3)

    def total(weights):
        return sum(
            x.square().sum() for x in aggregator(grads, recall._replace(weights=weights)).values()
        )

    assert torch.autograd.gradcheck(total, recall.weights.clone().requires_grad_())


LEARNED = ["gated per step", "gate", "gate from mean", "coordinate", "coordinate from sum"]


@pytest.mark.parametrize("name", LEARNED)
def test_gradients_with_respect_to_g_and_parameters_agree_with_finite_differences(name):
    aggregator = trained(BUILD[name]())
    shapes = {name: SHAPES[name] for name in ("conv.bias", "scale", "head.bias")}
    grads, recall = random_case(2, 3, spread=0.3, shapes=shapes)
    parameters = {n: p.detach().clone().requires_grad_() for n, p in aggregator.named_parameters()}

    def direction(*leaves):
        own = dict(zip(grads, leaves, strict=False))
        mine = dict(zip(parameters, leaves[len(own) :], strict=True))
        result = torch.func.functional_call(aggregator, mine, (own, recall), {"step": 1})
        return tuple(result.values())

    leaves = [g.clone().requires_grad_() for g in grads.values()]
    assert torch.autograd.gradcheck(direction, (*leaves, *parameters.values()), fast_mode=True)
    assert torch.autograd.gradcheck(
        lambda *own: direction(*own, *(p.detach() for p in parameters.values())), leaves
    )


@pytest.mark.parametrize("name", LEARNED)
def test_a_second_order_meta_gradient_agrees_with_finite_differences(name):
    aggregator = trained(BUILD[name]())
    _, recall = random_case(2, 3, spread=0.3, shapes={"conv.bias": SHAPES["conv.bias"]})

    def outer(theta):
        for step in range(2):
            loss = (theta.sin() * theta.exp()).sum()
            (g,) = torch.autograd.grad(loss, theta, create_graph=True)
            theta = theta - 0.1 * aggregator({"conv.bias": g}, recall, step=step)["conv.bias"]
        return theta.cos().sum()

    start = torch.tensor([[0.3, -0.8, 1.1], [0.5, 0.2, -0.4]], dtype=torch.float64)
    assert torch.autograd.gradcheck(outer, start.requires_grad_())


@pytest.mark.parametrize("name", LEARNED)
def test_the_outer_loss_reaches_every_parameter(name):
    aggregator = trained(BUILD[name]())
    grads, recall = random_case(2, 4)
    loss = sum(
        x.square().sum()
        for step in range(3)
        for part in (aggregator(grads, recall, step=step), aggregator.recall_only(recall))
        for x in part.values()
    )
    loss.backward()
    dead = [n for n, p in aggregator.named_parameters() if p.grad is None or not p.grad.any()]
    assert dead == []


def test_an_unknown_rule_to_start_from_is_refused():
    for init in ("own", "mean", "sum"):
        check_init(init)
    with pytest.raises(ConfigError, match=r"expected one of \['own', 'mean', 'sum'\], got 'other'"):
        check_init("other")
    for kind in (partial(GateTransformer, SHAPES), CoordinateTransformer):
        with pytest.raises(REFUSALS, match="other"):
            kind(generator=generator_for(0), init="other")


def test_building_an_aggregator_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    for build in BUILD.values():
        build()
    assert torch.equal(torch.get_rng_state(), before)


def test_gates_are_told_by_tensor_and_averaged_over_steps():
    plain, stepwise = Gated(["a", "b"]), Gated(["a", "b"], steps=2)
    with torch.no_grad():
        plain.gate.copy_(torch.tensor([0.5, -0.25]))
        stepwise.gate.copy_(torch.tensor([[1.0, 0.0], [0.5, 0.25]]))
    assert plain.gates() == {"a": 0.5, "b": -0.25}
    assert stepwise.gates() == {"a": 0.5, "b": 0.375}
