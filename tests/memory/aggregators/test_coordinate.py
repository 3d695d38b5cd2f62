"""The coordinate transformer: the algebra against torch's own layer, features, where it starts."""

import math

import pytest
import torch
from torch.testing import assert_close

from tests.reference.aggregators import NaiveCoordinate, each_scalar, naive_features, random_case
from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.memory.aggregators import Mean, Sum
from torchemo.memory.aggregators.coordinate import CoordinateTransformer, features

RULES = {"mean": Mean(4), "sum": Sum()}


def coordinate(*, trained=True, **options):
    module = CoordinateTransformer(generator=generator_for(3), **options).double()
    if trained:
        generator = generator_for(4)
        with torch.no_grad():
            for parameter in module.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.3 * noise)
    return module


def naive(module):
    reference = NaiveCoordinate().double()
    reference.load_state_dict(module.state_dict())
    return reference


@pytest.mark.parametrize("spread", [0.5, 8.0])
@pytest.mark.parametrize("chunk", [7, 1 << 18])
def test_the_algebra_equals_torchs_post_norm_layer_on_every_sequence(spread, chunk):
    module = coordinate(chunk=chunk)
    layer = naive(module)
    grads, recall = random_case(2, 4, spread=spread)
    with torch.no_grad():
        result, recalled = module(grads, recall), module.recall_only(recall)
        expected = each_scalar(lambda g, v, a: g + layer.increment(g, v), grads, recall)
        alone = each_scalar(lambda g, v, a: layer.increment(None, v), grads, recall)
    assert_close(result, expected, rtol=1e-10, atol=1e-10)
    assert_close(recalled, alone, rtol=1e-10, atol=1e-10)


def test_the_gradients_of_the_algebra_equal_those_of_torchs_layer():
    module = coordinate()
    layer = naive(module)
    _, recall = random_case(1, 4, shapes={"w": torch.Size(())})
    g = torch.tensor([0.7], dtype=torch.float64)
    (module({"w": g}, recall)["w"].sum() - g.sum()).backward()
    scalars = torch.stack([g, *recall.values["w"][0][:, None]])
    tokens = layer.embed(torch.stack([scalars.abs().log() / 10, scalars.sign()], dim=-1)[:, 0])
    tokens = tokens + layer.types[[0, 1, 1, 1, 1]]
    tokens = torch.cat([layer.cls[None], tokens])[None]
    layer.readout(layer.layer(tokens)[0, 0]).backward(torch.ones(1, dtype=torch.float64))
    got = {name: p.grad for name, p in module.named_parameters()}
    expected = {name: p.grad for name, p in layer.named_parameters()}
    assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("init", ["mean", "sum"])
def test_the_increment_is_added_to_the_named_rule(init):
    grads, recall = random_case(2, 4)
    rule, started = RULES[init](grads, recall), coordinate(init=init)(grads, recall)
    own = coordinate(init="own")(grads, recall)
    gained = {name: started[name] - rule[name] for name in grads}
    assert_close(gained, {name: own[name] - g for name, g in grads.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("init", ["own", "mean", "sum"])
def test_coordinate_starts_exactly_at_the_named_rule(init, dtype):
    grads, recall = random_case(3, 4)
    grads = {name: g.to(dtype) for name, g in grads.items()}
    values = {name: v.to(dtype) for name, v in recall.values.items()}
    recall = recall._replace(values=values, weights=recall.weights.to(dtype))
    module = coordinate(trained=False, init=init).to(dtype)
    if init == "own":
        expected = grads, {name: torch.zeros_like(g) for name, g in grads.items()}
    else:
        expected = RULES[init](grads, recall), RULES[init].recall_only(recall)
    assert_close((module(grads, recall), module.recall_only(recall)), expected, rtol=0, atol=0)


def test_features_are_those_of_the_learned_optimiser_literature():
    edge = math.exp(-10)
    scalars = [3.0, -0.02, 1e-3, edge * 1.001, edge * 0.999, -1e-6, 0.0, 1e30, -1e-300]
    got = features(torch.tensor(scalars, dtype=torch.float64)).T
    assert_close(got, torch.tensor([naive_features(x) for x in scalars], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_features_have_finite_first_and_second_derivatives_at_zero(dtype):
    x = torch.tensor([0.0, -0.0, 1e-30, 1e-3, -2.0], dtype=dtype, requires_grad=True)
    (first,) = torch.autograd.grad(features(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_close(first[:2], torch.full((2,), math.exp(10), dtype=dtype))
    assert_close(first[3:], torch.tensor([1 / (10 * 1e-3), -1 / 20], dtype=dtype))
    assert_close(second[:3], torch.zeros(3, dtype=dtype))
    assert_close(second[3:], torch.tensor([-1e5, -1 / 40], dtype=dtype))


def test_directions_at_zero_gradients_can_be_differentiated_twice():
    _, recall = random_case(1, 3)
    value = recall.values["conv.bias"]
    value[:, 1] = 0.0
    g = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    result = coordinate()({"conv.bias": g}, recall)["conv.bias"]
    (first,) = torch.autograd.grad(result.sum(), g, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), g)
    assert first.isfinite().all()
    assert second.isfinite().all()
    assert second.any()


def test_the_second_derivative_agrees_with_finite_differences():
    module = coordinate()
    _, recall = random_case(1, 3, spread=0.3)
    g = torch.tensor([[0.4, -0.9, 1.3]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: module({"conv.bias": x}, recall)["conv.bias"], g)


def test_recall_weights_enter_through_the_rule_alone():
    grads, recall = random_case(2, 4)
    uniform = recall._replace(weights=torch.full_like(recall.weights, 0.25))
    own, from_sum = coordinate(), coordinate(init="sum")
    assert_close(own(grads, recall), own(grads, uniform), rtol=0, atol=0)
    moved, expected = from_sum(grads, recall), Sum()(grads, recall)
    still, base = from_sum(grads, uniform), Sum()(grads, uniform)
    for name in grads:
        assert_close(moved[name] - still[name], expected[name] - base[name])


def test_only_the_nearest_neighbours_are_used_when_they_are_limited():
    grads, recall = random_case(2, 6, uniform=True)
    _, two = random_case(2, 2, uniform=True)
    two = two._replace(values={name: v[:, :2] for name, v in recall.values.items()})
    limited, free = coordinate(init="mean", max_neighbors=2), coordinate(init="mean")
    assert_close(limited(grads, recall), free(grads, two), rtol=1e-12, atol=1e-12)


def test_it_has_about_as_many_parameters_as_the_paper_counts():
    assert sum(p.numel() for p in coordinate().parameters()) == 2337


def test_coordinate_refuses_options_that_cannot_work():
    for wrong in ({"max_neighbors": 0}, {"chunk": 0}):
        with pytest.raises(ConfigError):
            coordinate(**wrong)
