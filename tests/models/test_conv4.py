import math

import pytest
import torch

from tests.models.oracles import (
    REFUSALS,
    assert_trees_close,
    conv4_module,
    derivatives,
    module_loss,
    per_task,
    randomised,
)
from torchemo.core.errors import DataError, ShapeError
from torchemo.core.losses import cross_entropy
from torchemo.core.rng import generator_for
from torchemo.core.task_axis import take
from torchemo.core.tree import expand, select
from torchemo.core.types import Model
from torchemo.models import Conv4

OPTIONS = [
    "transductive",
    "per_query_with_support",
    "running",
    "per_step_running",
    "group",
    "layer",
    "none",
]
VARIANTS = [
    {"image_size": 16},
    {"image_size": 16, "activation": "softplus"},
    {"image_size": 19, "head_pool": "mean"},
    {"image_size": 18, "downsample": "stride", "head_pool": "mean"},
    {"image_size": 18, "downsample": "stride", "activation": "softplus", "in_channels": 1},
]


def tiny(tasks=2, n=6, **options):
    model = Conv4(3, filters=2, groups=2, **options)
    generator = generator_for(3, "tiny")
    params = per_task(randomised(model.init(generator), generator), tasks, generator)
    shape = (tasks, n, model.in_channels, model.image_size, model.image_size)
    x = torch.rand(shape, generator=generator, dtype=torch.float64)
    return model, params, x, torch.arange(3).repeat(tasks, n // 3)


def random_like(params, seed=0):
    return {
        n: torch.randn(p.shape, generator=generator_for(seed, n), dtype=torch.float64)
        for n, p in params.items()
    }


@pytest.mark.parametrize(
    ("options", "maps", "features", "head"),
    [
        ({}, (84, 42, 21, 10, 5), 800, 4005),
        ({"filters": 64}, (84, 42, 21, 10, 5), 1600, 8005),
        ({"head_pool": "mean"}, (84, 42, 21, 10, 5), 32, 165),
        ({"image_size": 32}, (32, 16, 8, 4, 2), 128, 645),
        ({"image_size": 28, "in_channels": 1, "filters": 64}, (28, 14, 7, 3, 1), 64, 325),
        (
            {
                "image_size": 28,
                "in_channels": 1,
                "filters": 64,
                "downsample": "stride",
                "head_pool": "mean",
            },
            (28, 14, 7, 4, 2),
            64,
            325,
        ),
    ],
)
def test_maps_features_and_head_are_those_of_the_published_networks(options, maps, features, head):
    model = Conv4(5, **options)
    assert model.maps == maps
    params = model.init(generator_for(0))
    assert sum(params[name].numel() for name in model.head) == head
    x = torch.rand(1, 2, model.in_channels, model.image_size, model.image_size)
    seen = []
    hooked = conv4_module(model)
    for i in (1, 2, 3, 4):
        last = getattr(hooked, f"pool{i}", None) or getattr(hooked, f"act{i}")
        last.register_forward_hook(lambda _, __, out: seen.append(out.shape[-1]))
    hooked(x[0])
    assert (model.image_size, *seen) == maps
    assert model.features(expand(params, 1), x).shape == (1, 2, features)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 32_901),
        ({"bn": "none"}, 32_645),
        ({"affine": "shift"}, 32_773),
        ({"head_pool": "mean"}, 29_061),
        ({"bn": "per_step_running"}, 32_901),
    ],
)
def test_parameter_counts_are_those_of_the_card(options, count):
    model = Conv4(5, **options)
    params = model.init(generator_for(0))
    learned = [p.numel() for name, p in params.items() if name not in model.buffers]
    assert sum(learned) == count
    adapted = set(params) - set(model.norm) - set(model.buffers)
    assert (
        sum(params[name].numel() for name in adapted)
        == (29_061 if options.get("head_pool") else 32_901) - 256
    )


@pytest.mark.parametrize("options", VARIANTS)
def test_value_gradient_and_hessian_equal_a_plain_torch_network(options):
    model, params, x, y = tiny(**options)
    module = conv4_module(model).double()
    directions = random_like(params)
    ours = derivatives(lambda p: cross_entropy(model(p, x), y).sum(), params, directions)
    total = 0.0
    for b in range(2):
        one = {n: p[b].detach().requires_grad_() for n, p in params.items()}
        vector = {n: v[b] for n, v in directions.items()}
        theirs = derivatives(module_loss(module, x[b], y[b]), one, vector)
        total += theirs[0]
        for got, expected in zip(ours[1:], theirs[1:], strict=True):
            assert_trees_close({n: g[b] for n, g in got.items()}, expected, tolerance=1e-10)
    torch.testing.assert_close(ours[0], total, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("bn", "options"),
    [(bn, VARIANTS[1]) for bn in OPTIONS] + [("transductive", v) for v in VARIANTS[2:4]],
)
def test_all_tasks_at_once_equal_one_task_at_a_time(bn, options):
    model, params, x, y = tiny(tasks=3, bn=bn, **options)
    params = {n: p for n, p in params.items() if n not in model.buffers}

    def loss(p, x, y):
        return cross_entropy(model(p, x), y).sum()

    directions = random_like(params)
    whole = derivatives(lambda p: loss(p, x, y), params, directions)
    for b in range(3):
        one = {n: p.detach().requires_grad_() for n, p in take(params, slice(b, b + 1)).items()}
        part = slice(b, b + 1)
        alone = derivatives(
            lambda p, part=part: loss(p, x[part], y[part]), one, take(directions, slice(b, b + 1))
        )
        assert torch.allclose(model(params, x)[part], model(one, x[part]), rtol=1e-12, atol=1e-12)
        for got, expected in zip(whole[1:], alone[1:], strict=True):
            assert_trees_close(take(got, slice(b, b + 1)), expected, tolerance=1e-12)


@pytest.mark.parametrize("bn", OPTIONS)
def test_every_normalisation_has_the_second_derivative_of_finite_differences(bn):
    model, params, x, y = tiny(tasks=1, image_size=16, activation="softplus", bn=bn)
    params = {n: p for n, p in params.items() if n not in model.buffers}
    names = list(params)

    def gradient(p):
        leaves = [p[n].detach().requires_grad_() for n in names]
        out = model(dict(zip(names, leaves, strict=True)), x)
        return torch.autograd.grad(cross_entropy(out, y).sum(), leaves)

    direction = random_like(params)
    _, _, second = derivatives(lambda p: cross_entropy(model(p, x), y).sum(), params, direction)
    h = 1e-5
    up = gradient({n: p + h * direction[n] for n, p in params.items()})
    down = gradient({n: p - h * direction[n] for n, p in params.items()})
    largest = max(v.abs().max() for v in second.values())
    for name, plus, minus in zip(names, up, down, strict=True):
        difference = (plus - minus) / (2 * h)
        assert (difference - second[name]).abs().max() <= 1e-6 * largest, name


@pytest.mark.parametrize("downsample", ["stride", "pool"])
def test_meta_gradient_of_one_maml_step_equals_finite_differences(downsample):
    size = 8 if downsample == "stride" else 16
    model, _, x, y = tiny(tasks=2, image_size=size, activation="softplus", downsample=downsample)
    generator = generator_for(8, "theta")
    theta = {n: p.requires_grad_() for n, p in randomised(model.init(generator), generator).items()}
    query = torch.rand(x.shape, generator=generator, dtype=torch.float64)
    adapted_names = [n for n in theta if n not in model.norm]

    def meta_loss(meta):
        start = expand(meta, 2)
        losses = cross_entropy(model(start, x), y)
        inner = select(start, adapted_names)
        grads = torch.autograd.grad(losses.sum(), list(inner.values()), create_graph=True)
        moved = {n: p - 0.4 * g for (n, p), g in zip(inner.items(), grads, strict=True)}
        return cross_entropy(model({**start, **moved}, query), y).mean()

    exact = torch.autograd.grad(meta_loss(theta), list(theta.values()))
    h = 1e-6  # small enough that no maximum of a pooling window changes its place
    for (name, value), meta_gradient in zip(theta.items(), exact, strict=True):
        direction = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        up = meta_loss({**theta, name: (value + h * direction).detach().requires_grad_()})
        down = meta_loss({**theta, name: (value - h * direction).detach().requires_grad_()})
        difference = ((up - down) / (2 * h)).item()
        expected = (meta_gradient * direction).sum().item()
        assert difference == pytest.approx(expected, rel=1e-6, abs=1e-9), name


def test_expanded_parameters_give_the_same_result_as_copies():
    model, params, x, _ = tiny(image_size=16)
    shared = expand({n: p[0].detach() for n, p in params.items()}, 2)
    copies = {n: p.contiguous() for n, p in shared.items()}
    assert torch.equal(model(shared, x), model(copies, x))


def test_output_is_the_head_on_the_features_and_each_part_needs_only_its_own_tensors():
    model, params, x, _ = tiny(image_size=16)
    body = {n: p for n, p in params.items() if n not in model.head}
    features = model.features(body, x)
    out = model.classify(select(params, model.head), features)
    assert torch.equal(out, model(params, x))


def test_names_are_head_norm_and_buffers_in_reading_order():
    model = Conv4(5, bn="running")
    assert isinstance(model, Model)
    assert model.head == ("head.weight", "head.bias")
    assert model.norm[:3] == ("norm1.scale", "norm1.shift", "norm2.scale")
    assert model.buffers[:3] == ("norm1.mean", "norm1.var", "norm2.mean")
    assert Conv4(5, affine="shift").norm == tuple(f"norm{i}.shift" for i in (1, 2, 3, 4))
    assert Conv4(5, bn="none").norm == ()
    params = model.init(generator_for(0))
    assert list(params)[:4] == ["conv1.weight", "conv1.bias", "norm1.scale", "norm1.shift"]
    assert set(params) >= {*model.head, *model.norm, *model.buffers}


def test_initial_kernels_fill_the_glorot_interval_and_biases_are_zero():
    params = Conv4(5).init(generator_for(0))
    for name, fans in {"conv1.weight": 27 + 288, "conv2.weight": 576, "head.weight": 805}.items():
        bound = math.sqrt(6 / fans)
        assert 0.95 * bound < params[name].abs().max() <= bound
    zero = [n for n in params if n.endswith(("bias", "shift"))]
    assert len(zero) == 9
    assert not any(params[n].any() for n in zero)
    assert all((params[f"norm{i}.scale"] == 1).all() for i in (1, 2, 3, 4))
    kaiming = Conv4(5, initializer="kaiming").init(generator_for(0))
    assert kaiming["conv2.weight"].std().item() == pytest.approx(math.sqrt(2 / 288), rel=0.05)


def test_initialisation_is_a_function_of_the_generator():
    first, again = (Conv4(5).init(generator_for(1)) for _ in range(2))
    other = Conv4(5).init(generator_for(2))
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])


def test_running_statistics_are_collected_while_training_and_used_when_stored():
    model, params, x, _ = tiny(image_size=16, bn="per_step_running", bn_steps=2)
    sink = {}
    trained = model.at(1, sink=sink)(params, x)
    assert torch.equal(trained, Conv4(3, filters=2, image_size=16)(params, x))
    assert list(sink) == list(model.buffers)
    assert all(value.shape == (2, 2) for value in sink.values())
    stored = dict(params)
    for i, side in enumerate(model.maps[:4], start=1):
        biased = 1 - 1 / (6 * side**2)
        for name, value in (
            (f"norm{i}.mean", sink[f"norm{i}.mean"]),
            (f"norm{i}.var", sink[f"norm{i}.var"] * biased),
        ):
            stored[name] = torch.stack([torch.full_like(value, 7.0), value], dim=1)
    used = model.at(1, stored=True)(stored, x)
    torch.testing.assert_close(used, trained, rtol=1e-12, atol=1e-12)
    assert torch.equal(used, model.at(9, stored=True)(stored, x))
    assert not torch.allclose(used, model.at(0, stored=True)(stored, x))


def test_a_model_at_a_step_is_still_the_same_model():
    model = Conv4(5)
    assert model.at(3, stored=True, sink={}) == model
    assert hash(model.at(3)) == hash(model)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((6, 3, 16, 16), "task axis"),
        ((2, 6, 1, 16, 16), "channels"),
        ((2, 6, 3, 17, 17), "Resize"),
    ],
)
def test_pictures_of_another_shape_are_refused(shape, words):
    model, params, _, _ = tiny(image_size=16)
    with pytest.raises(ShapeError, match=words):
        model(params, torch.zeros(shape).double())


def test_integer_pictures_are_refused():
    model, params, x, _ = tiny(image_size=16)
    with pytest.raises(DataError, match="floating"):
        model(params, x.to(torch.uint8))


def test_parameters_without_task_axis_or_of_other_tasks_are_refused_by_name():
    model, params, x, _ = tiny(image_size=16)
    with pytest.raises(ShapeError, match=r"'conv1.weight'(.|\n)*expand"):
        model({n: p[0] for n, p in params.items()}, x)
    with pytest.raises(ShapeError, match=r"'conv1.weight' should have shape \[1,"):
        model(params, x[:1])
    with pytest.raises(ShapeError, match=r"'head.bias' is missing"):
        model({n: p for n, p in params.items() if n != "head.bias"}, x)


def test_stored_statistics_must_be_among_the_parameters():
    model, params, x, _ = tiny(image_size=16, bn="running")
    del params["norm2.var"]
    model.at(0)(params, x)
    with pytest.raises(ShapeError, match=r"'norm2.var' is missing"):
        model.at(0, stored=True)(params, x)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_size": 15}, "at least 16"),
        ({"filters": 0}, "'filters'"),
        ({"filters": 12, "bn": "group"}, "divide the 12 channels"),
        ({"activation": "gelu"}, "'activation'"),
        ({"downsample": "mean"}, "'downsample'"),
        ({"head_pool": "max"}, "'head_pool'"),
        ({"initializer": "zeros"}, "'initializer'"),
        ({"bn": "batch"}, "'bn'"),
    ],
)
def test_options_that_cannot_work_are_refused(options, words):
    with pytest.raises(REFUSALS, match=words):
        Conv4(5, **options)
