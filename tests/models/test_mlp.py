import pytest
import torch
from torch import nn

from tests.models.oracles import (
    REFUSALS,
    assert_trees_close,
    derivatives,
    per_task,
    randomised,
)
from torchemo.core.errors import ConfigError, ShapeError
from torchemo.core.losses import mean_squared_error
from torchemo.core.rng import generator_for
from torchemo.core.task_axis import take
from torchemo.core.tree import select
from torchemo.core.types import Model
from torchemo.models import MLP

ACTIVATIONS = {"relu": nn.ReLU, "softplus": nn.Softplus, "tanh": nn.Tanh}


def tiny(tasks=3, **options):
    model = MLP(2, n_in=3, hidden=(5, 4), initializer="kaiming", **options)
    generator = generator_for(0, "tiny")
    params = per_task(randomised(model.init(generator), generator), tasks, generator)
    x = torch.randn(tasks, 6, 3, generator=generator, dtype=torch.float64)
    return model, params, x, torch.randn(tasks, 6, 2, generator=generator, dtype=torch.float64)


def random_like(params):
    return {
        n: torch.randn(p.shape, generator=generator_for(9, n)).double() for n, p in params.items()
    }


@pytest.mark.parametrize(
    ("options", "count"), [({}, 1_761), ({"n_in": 2}, 1_801), ({"hidden": ()}, 2)]
)
def test_parameter_counts_are_those_of_the_card(options, count):
    assert sum(p.numel() for p in MLP(**options).init(generator_for(0)).values()) == count


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_value_gradient_and_hessian_equal_a_plain_torch_network(activation):
    model, params, x, y = tiny(activation=activation)
    act = ACTIVATIONS[activation]
    module = nn.Sequential(nn.Linear(3, 5), act(), nn.Linear(5, 4), act(), nn.Linear(4, 2)).double()
    names = dict(zip(params, dict(module.named_parameters()), strict=True))
    directions = random_like(params)
    ours = derivatives(lambda p: mean_squared_error(model(p, x), y).sum(), params, directions)
    for b in range(3):

        def loss(p, b=b):
            out = torch.func.functional_call(module, {names[n]: v for n, v in p.items()}, (x[b],))
            return (out - y[b]).square().mean()

        one = {n: p[b].detach().requires_grad_() for n, p in params.items()}
        theirs = derivatives(loss, one, {n: v[b] for n, v in directions.items()})
        for got, expected in zip(ours[1:], theirs[1:], strict=True):
            assert_trees_close({n: g[b] for n, g in got.items()}, expected, tolerance=1e-12)


def test_all_tasks_at_once_equal_one_task_at_a_time():
    model, params, x, _ = tiny()
    out = model(params, x)
    for b in range(3):
        alone = model(take(params, slice(b, b + 1)), x[b : b + 1])
        torch.testing.assert_close(out[b : b + 1], alone, rtol=1e-12, atol=1e-12)


def test_output_is_the_head_on_the_features_and_each_part_needs_only_its_own_tensors():
    model, params, x, _ = tiny()
    body = {n: p for n, p in params.items() if n not in model.head}
    features = model.features(body, x)
    assert features.shape == (3, 6, 4)
    assert torch.equal(model.classify(select(params, model.head), features), model(params, x))


def test_names_are_layers_then_head():
    model = MLP(hidden=(4,))
    assert isinstance(model, Model)
    assert list(model.init(generator_for(0))) == [
        "layer1.weight",
        "layer1.bias",
        "head.weight",
        "head.bias",
    ]
    assert (model.head, model.norm, model.buffers) == (("head.weight", "head.bias"), (), ())
    assert model.at(3, stored=True, sink={}) is model


def test_initial_weights_are_small_and_truncated_or_kaiming_and_biases_zero():
    truncated = MLP(hidden=(200, 200)).init(generator_for(0))
    assert 0.0199 < truncated["layer2.weight"].abs().max() < 0.02001
    kaiming = MLP(hidden=(200, 200), initializer="kaiming").init(generator_for(0))
    assert kaiming["layer2.weight"].std().item() == pytest.approx(0.1, rel=0.02)
    assert not any(p.any() for n, p in truncated.items() if n.endswith("bias"))


def test_inputs_and_parameters_of_another_shape_are_refused():
    model, params, x, _ = tiny()
    with pytest.raises(ShapeError, match="task axis"):
        model(params, x[0])
    with pytest.raises(ShapeError, match=r"got \[3, 6, 2\]"):
        model(params, x[..., :2])
    with pytest.raises(ShapeError, match="expand"):
        model({n: p[0] for n, p in params.items()}, x)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"activation": "gelu"}, "'activation'"), ({"initializer": "zeros"}, "'initializer'")],
)
def test_unknown_options_are_refused(options, words):
    with pytest.raises(REFUSALS, match=words):
        MLP(**options)


def test_empty_layers_are_refused_by_position():
    with pytest.raises(ConfigError, match=r"hidden\[1\]"):
        MLP(hidden=(3, 0))
