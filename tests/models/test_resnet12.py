import pytest
import torch

from tests.models.oracles import (
    REFUSALS,
    assert_trees_close,
    derivatives,
    module_loss,
    per_task,
    randomised,
    resnet12_module,
)
from torchemo.core.errors import ConfigError, ShapeError
from torchemo.core.losses import cross_entropy
from torchemo.core.rng import generator_for
from torchemo.core.task_axis import take
from torchemo.core.tree import expand, select
from torchemo.core.types import Model
from torchemo.models import ResNet12
from torchemo.models.dropout import DropConfig

TINY = (2, 3, 4, 5)


def tiny(tasks=2, n=6, image_size=16, **options):
    model = ResNet12(3, channels=TINY, image_size=image_size, **options)
    generator = generator_for(4, "tiny")
    params = per_task(randomised(model.init(generator), generator), tasks, generator)
    x = torch.rand(tasks, n, 3, image_size, image_size, generator=generator, dtype=torch.float64)
    return model, params, x, torch.arange(3).repeat(tasks, n // 3)


@pytest.mark.parametrize(
    ("channels", "millions", "head_pool", "features"),
    [
        ("wide", 12.42, "mean", 640),
        ("narrow", 8.00, "mean", 512),
        ("wide", 12.42, "flatten", 16_000),
    ],
)
def test_sizes_are_those_of_the_card(channels, millions, head_pool, features):
    model = ResNet12(5, channels=channels, head_pool=head_pool)
    params = model.init(generator_for(0))
    trunk = sum(p.numel() for n, p in params.items() if n not in model.head)
    assert round(trunk / 1e6, 2) == millions
    assert params["head.weight"].shape == (5, features)
    assert model.maps == (84, 42, 21, 10, 5)


def test_the_wide_head_has_3205_scalars():
    model = ResNet12(5)
    assert sum(p.numel() for p in select(model.init(generator_for(0)), model.head).values()) == 3205


@pytest.mark.parametrize("options", [{}, {"head_pool": "flatten", "image_size": 33}])
def test_value_gradient_and_hessian_equal_a_plain_torch_network(options):
    model, params, x, y = tiny(**options)
    module = resnet12_module(model).double()
    directions = {
        n: torch.randn(p.shape, generator=generator_for(1, n)).double() for n, p in params.items()
    }
    ours = derivatives(lambda p: cross_entropy(model(p, x), y).sum(), params, directions)
    for b in range(2):
        one = {n: p[b].detach().requires_grad_() for n, p in params.items()}
        vector = {n: v[b] for n, v in directions.items()}
        theirs = derivatives(module_loss(module, x[b], y[b]), one, vector)
        for got, expected in zip(ours[1:], theirs[1:], strict=True):
            assert_trees_close({n: g[b] for n, g in got.items()}, expected, tolerance=1e-9)


@pytest.mark.parametrize("bn", ["transductive", "running", "layer", "none"])
def test_all_tasks_at_once_equal_one_task_at_a_time(bn):
    model, params, x, _ = tiny(tasks=3, bn=bn)
    out = model(params, x)
    for b in range(3):
        alone = model(take(params, slice(b, b + 1)), x[b : b + 1])
        torch.testing.assert_close(out[b : b + 1], alone, rtol=1e-12, atol=1e-12)


def test_output_is_the_head_on_the_features_and_each_part_needs_only_its_own_tensors():
    model, params, x, _ = tiny()
    body = {n: p for n, p in params.items() if n not in model.head}
    features = model.features(body, x)
    assert torch.equal(model.classify(select(params, model.head), features), model(params, x))


def test_names_cover_every_tensor_and_running_statistics_are_collected():
    model, params, x, _ = tiny(bn="running")
    assert isinstance(model, Model)
    assert set(model.init(generator_for(0))) >= {*model.head, *model.norm, *model.buffers}
    assert len(model.norm) == len(model.buffers) == 4 * 4 * 2
    sink = {}
    model.at(0, sink=sink)(params, x)
    assert list(sink) == list(model.buffers)
    assert sink["block3.shortcut_norm.mean"].shape == (2, 4)
    assert not torch.allclose(model.at(0, stored=True)(params, x), model(params, x))


def test_kernels_are_kaiming_normal_by_fan_out():
    w = ResNet12(5, channels="narrow").init(generator_for(0))["block2.conv1.weight"]
    assert w.std().item() == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.01)


def test_nothing_is_dropped_without_a_generator_or_without_a_config():
    model, params, x, _ = tiny()
    dropping, _, _, _ = tiny(drop=DropConfig(dropout=0.5, keep=0.5, block_size=1))
    expected = model(params, x)
    assert torch.equal(dropping(params, x), expected)
    assert torch.equal(model.with_generator(generator_for(0))(params, x), expected)


def test_what_is_dropped_is_a_function_of_the_generator_and_survives_at():
    model, params, x, _ = tiny(drop=DropConfig(dropout=0.5, keep=0.5, block_size=1))
    first, again, at, other = (
        m(params, x)
        for m in (
            model.with_generator(generator_for(0)),
            model.with_generator(generator_for(0)),
            model.with_generator(generator_for(0)).at(2),
            model.with_generator(generator_for(1)),
        )
    )
    assert torch.equal(first, again)
    assert torch.equal(first, at)
    assert not torch.allclose(first, other)
    assert not torch.allclose(first, model(params, x))


@pytest.mark.parametrize(
    "drop", [DropConfig(dropout=0.5, keep=1.0), DropConfig(dropout=0.0, keep=0.5, block_size=1)]
)
def test_dropout_and_dropblock_act_separately(drop):
    model, params, x, _ = tiny(drop=drop)
    out = model.with_generator(generator_for(0)).features(params, x)
    assert not torch.allclose(out, model.features(params, x))
    # Maps are 1x1 after block 4, so DropBlock on it shows as features that are exactly zero.
    assert bool((out == 0).any()) is (drop.keep < 1)


def test_pictures_and_parameters_of_another_shape_are_refused():
    model, params, x, _ = tiny()
    with pytest.raises(ShapeError, match="task axis"):
        model(params, x[0])
    with pytest.raises(ShapeError, match="channels"):
        model(params, x[:, :, :1])
    with pytest.raises(ShapeError, match=r"'block1.conv1.weight'(.|\n)*expand"):
        model({n: p[0] for n, p in params.items()}, x)


def test_expanded_parameters_are_accepted():
    model, params, x, _ = tiny()
    shared = expand({n: p[0].detach() for n, p in params.items()}, 2)
    assert model(shared, x).shape == (2, 6, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"channels": "huge"}, "'?channels"),
        ({"channels": (1, 2, 3)}, "'?channels"),
        ({"head_pool": "max"}, "'head_pool'"),
    ],
)
def test_unknown_options_are_refused(options, words):
    with pytest.raises(REFUSALS, match=words):
        ResNet12(5, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"channels": (1, 0, 3, 4)}, r"channels\[1\]"),
        ({"channels": TINY, "bn": "group"}, "divide"),
        ({"image_size": 15}, "at least 16"),
    ],
)
def test_sizes_that_cannot_work_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        ResNet12(5, **options)
