"""The gate transformer: its descriptions, its mixing, where it starts, what it refuses."""

import pytest
import torch
from torch.testing import assert_close

from tests.reference.aggregators import (
    HEAD,
    SHAPES,
    naive_gate,
    naive_sketch,
    random_case,
)
from torchemo.core.errors import ConfigError, ShapeError
from torchemo.core.rng import generator_for
from torchemo.memory.aggregators import Mean, Sum
from torchemo.memory.aggregators.gate import CountSketch, GateTransformer

KINDS = {"conv.weight": 0, "conv.bias": 1, "scale": 1, "head.weight": 2, "head.bias": 3}


def gate(*, trained=True, **options):
    options = {"layers": 2, "head": HEAD} | options
    module = GateTransformer(SHAPES, generator=generator_for(3), **options).double()
    if trained:
        generator = generator_for(4)
        with torch.no_grad():
            for parameter in module.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.2 * noise)
    return module


def base(init, weights):
    """Weights of g and of V_j in the rule ``init``, and of V_j without g."""
    m = weights.shape[1]
    nothing = torch.zeros_like(weights)
    return {
        "own": (1.0, nothing, nothing),
        "mean": (1 / (m + 1), weights * m / (m + 1), weights),
        "sum": (1.0, weights, weights),
    }[init]


@pytest.mark.parametrize("use_distances", [False, True])
@pytest.mark.parametrize("init", ["own", "mean", "sum"])
def test_gate_equals_one_sequence_at_a_time_with_descriptions_by_loops(init, use_distances):
    module = gate(init=init, use_distances=use_distances)
    grads, recall = random_case(2, 3)
    own, weights, recalled = base(init, recall.weights)
    with torch.no_grad():
        expected = naive_gate(module, grads, recall, own_weight=own, weights=weights, kinds=KINDS)
        assert_close(module(grads, recall), expected, rtol=1e-10, atol=1e-10)
        expected = naive_gate(module, None, recall, own_weight=0.0, weights=recalled, kinds=KINDS)
        assert_close(module.recall_only(recall), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize(("init", "rule"), [("mean", Mean(4)), ("sum", Sum())])
def test_gate_starts_exactly_at_the_named_rule(init, rule, uniform, dtype):
    grads, recall = random_case(3, 4, uniform=uniform)
    grads = {name: g.to(dtype) for name, g in grads.items()}
    values = {name: v.to(dtype) for name, v in recall.values.items()}
    recall = recall._replace(values=values, weights=recall.weights.to(dtype))
    module = gate(trained=False, init=init, layers=6).to(dtype)
    assert_close(module(grads, recall), rule(grads, recall), rtol=0, atol=0)
    assert_close(module.recall_only(recall), rule.recall_only(recall), rtol=0, atol=0)


def test_gate_starts_as_plain_gradient_descent_unless_told_otherwise():
    grads, recall = random_case(3, 4)
    module = gate(trained=False)
    assert_close(module(grads, recall), grads, rtol=0, atol=0)
    nothing = {name: torch.zeros_like(g) for name, g in grads.items()}
    assert_close(module.recall_only(recall), nothing, rtol=0, atol=0)


def test_only_the_nearest_neighbours_are_used_when_they_are_limited():
    grads, recall = random_case(2, 6, uniform=True)
    _, three = random_case(2, 3, uniform=True)
    three = three._replace(
        distances=recall.distances[:, :3],
        values={name: v[:, :3] for name, v in recall.values.items()},
    )
    limited = gate(init="mean", use_distances=True, max_neighbors=3)
    free = gate(init="mean", use_distances=True)
    assert_close(limited(grads, recall), free(grads, three), rtol=1e-12, atol=1e-12)
    assert_close(limited.recall_only(recall), free.recall_only(three), rtol=1e-12, atol=1e-12)
    assert_close(limited(grads, three), free(grads, three), rtol=0, atol=0)


def test_limited_neighbours_keep_the_proportions_of_their_weights():
    grads, recall = random_case(2, 6)
    module = gate(trained=False, init="sum", max_neighbors=2)
    a, b = recall.weights[:, :1], recall.weights[:, 1:2]
    v = recall.values["head.bias"]
    expected = grads["head.bias"] + (a * v[:, 0] + b * v[:, 1]) / (a + b)
    assert_close(module(grads, recall)["head.bias"], expected, rtol=1e-12, atol=1e-12)


def test_the_direction_follows_the_scale_of_a_tensor_only_through_its_log_norm():
    grads, recall = random_case(2, 3)
    module = gate()
    with torch.no_grad():
        module.embed.weight[:, 62] = 0.0
    doubled = {name: 2 * g for name, g in grads.items()}
    values = {name: 2 * v for name, v in recall.values.items()}
    expected = {name: 2 * x for name, x in module(grads, recall).items()}
    assert_close(module(doubled, recall._replace(values=values)), expected)


def test_a_sketch_depends_on_the_name_of_its_tensor_alone():
    x = torch.randn(2, 3, 40, dtype=torch.float64, generator=generator_for(0))
    one = CountSketch({"w": torch.Size((40,))}).double()
    other = CountSketch({"v": torch.Size((7,)), "w": torch.Size((5, 8))}).double()
    assert torch.equal(one("w", x), other("w", x))
    assert_close(one("w", x)[1, 2].tolist(), naive_sketch("w", x[1, 2].tolist()))
    same_size = CountSketch({"u": torch.Size((40,))}).double()
    assert not torch.equal(same_size("u", x), one("w", x))
    assert not one.state_dict()


def test_a_sketch_keeps_inner_products_in_expectation():
    generator = generator_for(1)
    x, y = torch.randn(2, 300, dtype=torch.float64, generator=generator)
    y = y + x
    names = [f"tensor {i}" for i in range(400)]
    sketch = CountSketch({name: torch.Size((300,)) for name in names}).double()
    both = torch.stack([x, y])[None]
    products = torch.stack([sketch(name, both)[0].prod(0).sum() for name in names])
    error = products.std() / len(names) ** 0.5
    assert abs(products.mean() - x @ y) < 4 * error
    assert error < 0.05 * (x @ y)


def test_gradients_of_zero_have_finite_derivatives():
    grads, recall = random_case(2, 3)
    grads = {name: torch.zeros_like(g, requires_grad=True) for name, g in grads.items()}
    recall.values["conv.bias"][:, 0] = 0.0
    for dtype in (torch.float64, torch.float32):
        module = gate().to(dtype)
        own = {name: g.detach().to(dtype).requires_grad_() for name, g in grads.items()}
        values = {name: v.to(dtype) for name, v in recall.values.items()}
        case = recall._replace(values=values, weights=recall.weights.to(dtype))
        result = module(own, case)
        back = torch.autograd.grad(sum(x.sum() for x in result.values()), [*own.values()])
        assert all(x.isfinite().all() for x in (*back, *result.values()))


def test_a_larger_floor_hides_gradients_that_are_zero_but_for_rounding():
    grads, recall = random_case(1, 3)
    noise = {name: 1e-9 * g for name, g in grads.items()}
    other = {name: -1e-9 * g for name, g in grads.items()}

    def gap(module):
        first, second = module(noise, recall), module(other, recall)
        return max((first[name] - second[name]).abs().max() for name in grads)

    assert gap(gate(floor=1e-2)) < 1e-5 < 1e-3 < gap(gate())


def test_evaluation_without_graph_gives_the_same_direction():
    grads, recall = random_case(2, 3)
    module = gate()
    expected = module(grads, recall)
    with torch.no_grad():
        assert_close(module.eval()(grads, recall), expected, rtol=1e-12, atol=1e-12)


def test_the_transformer_has_six_layers_of_the_documented_size():
    module = GateTransformer(SHAPES, generator=generator_for(0), head=HEAD)
    layer = 4 * (64 * 64 + 64) + 2 * 64 * 128 + 128 + 64 + 4 * 64
    beside = (64 * 64 + 64) + 64 * (1 + 2 + 4 + 2) + 2 * 64
    assert sum(p.numel() for p in module.parameters()) == 6 * layer + beside


def test_gate_refuses_what_it_was_not_built_for():
    grads, recall = random_case(1, 2)
    with pytest.raises(ConfigError, match="max_neighbors"):
        gate(max_neighbors=0)
    for wrong in ({"layers": 0}, {"floor": 0.0}):
        with pytest.raises(ConfigError, match="positive floor"):
            gate(**wrong)
    with pytest.raises(ConfigError, match="got 0 tensors"):
        GateTransformer({}, generator=generator_for(0))
    module = GateTransformer({"conv.bias": torch.Size((3,))}, generator=generator_for(0)).double()
    with pytest.raises(ShapeError, match=r"'conv.weight' of shape \[3, 2, 2\]"):
        module(grads, recall)
