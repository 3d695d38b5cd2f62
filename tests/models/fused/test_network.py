from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.autograd import forward_ad

from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy
from torchemo.core.rng import generator_for
from torchemo.core.tree import expand
from torchemo.core.types import Batch, Episode
from torchemo.learners.gradient.inner import SGD
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.maml import MAML
from torchemo.models import Conv4, conv4, fused
from torchemo.training.step import outer_step

compiled = pytest.mark.skipif(not fused.status(bits=64).available, reason="no C compiler")


def strokes(shape, generator):
    """White images with a few black strokes: most pooling windows are ties, as in Omniglot."""
    x = torch.ones(shape, dtype=torch.float64)
    side = shape[-1]
    for image in x.flatten(0, 1):
        for _ in range(3):
            row, col = torch.randint(2, side - 2, (2,), generator=generator).tolist()
            image[:, row, 2 : side - 2] = 0
            image[:, 2 : side - 2, col] = 0
    return x


def make_episode(model, *, tasks=2, drawn=False, dtype=torch.float64):
    g = generator_for(5, "pictures")
    shape = (model.in_channels, model.image_size, model.image_size)

    def batch(per_class):
        y = torch.arange(model.n_way).repeat(tasks, per_class)
        x = torch.rand(*y.shape, *shape, generator=g, dtype=torch.float64)
        return Batch((strokes(x.shape, g) if drawn else x).to(dtype), y)

    return Episode(batch(1), batch(3))


def make_params(model, *, dtype=torch.float64):
    g = generator_for(6, "parameters")
    params = {n: p.to(dtype) for n, p in model.init(g).items()}
    for name in model.norm:
        # Some scales negative, so that some windows take their smallest element.
        params[name] += 0.7 * torch.randn(params[name].shape, generator=g, dtype=dtype)
    return params


def meta_gradient(path, *, drawn=False, adapt_bn=False, dtype=torch.float64, **options):
    model = Conv4(3, path=path, **{"filters": 8, "image_size": 16, **options})
    learner = MAML(InnerLoop(model, rule=SGD(0.2), steps=3, adapt_bn=adapt_bn))
    episode = make_episode(model, drawn=drawn, dtype=dtype)
    return outer_step(learner, make_params(model, dtype=dtype), episode)


@compiled
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adapt_bn": True, "image_size": 19},
        {"drawn": True, "in_channels": 1, "image_size": 28},
        {"affine": "shift", "head_pool": "mean", "image_size": 21},
        {"filters": 5, "eps": 1e-5},
        {"in_channels": 6, "image_size": 17},
        {"filters": 32, "image_size": 33, "adapt_bn": True},
    ],
)
def test_the_meta_gradient_equals_that_of_the_reference_path(options):
    ours, reference = (meta_gradient(path, **options) for path in ("fused", "reference"))
    assert torch.allclose(ours.losses, reference.losses, rtol=1e-10)
    largest = max(float(row.abs().max()) for row in reference.rows.values())
    for name, row in reference.rows.items():
        assert (ours.rows[name] - row).abs().max() <= 1e-10 * largest, name


@compiled
def test_single_precision_is_no_further_from_double_than_the_reference_path():
    exact = meta_gradient("reference", image_size=28).rows
    errors = {}
    for path in ("fused", "reference"):
        rows = meta_gradient(path, image_size=28, dtype=torch.float32).rows
        gap = torch.cat([(rows[n].double() - exact[n]).flatten() for n in exact])
        errors[path] = gap.norm()
    assert errors["fused"] <= errors["reference"]


@compiled
def test_several_tasks_in_one_call_equal_the_reference_path():
    model = Conv4(3, image_size=16, filters=8, path="fused")
    reference = Conv4(3, image_size=16, filters=8, path="reference")
    params, x = expand(make_params(model), 2), make_episode(model).support.x
    assert torch.allclose(model(params, x), reference(params, x), rtol=1e-12, atol=1e-12)


@compiled
def test_threads_at_once_give_bitwise_what_one_gives():
    model = Conv4(3, image_size=20, filters=8)
    learner = MAML(InnerLoop(model, rule=SGD(0.2), steps=2))
    params, episode = make_params(model), make_episode(model, tasks=6)
    tasks = [
        Episode(*(Batch(b.x[i : i + 1], b.y[i : i + 1]) for b in (episode.support, episode.query)))
        for i in range(6)
    ]
    alone = [outer_step(learner, params, task).rows for task in tasks]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda task: outer_step(learner, params, task).rows, tasks * 3))
    for i, rows in enumerate(together):
        assert all(torch.equal(rows[n], alone[i % 6][n]) for n in rows)


class Counted:
    """Counts the calls of the compiled block."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return fused.conv_block(*args, **kwargs)


@compiled
@pytest.mark.parametrize("filters", [3, 4, 8])
def test_bits_do_not_depend_on_whether_gradients_are_recorded(filters):
    model = Conv4(3, image_size=16, filters=filters, path="fused")
    params = {n: p.requires_grad_() for n, p in expand(make_params(model), 1).items()}
    x = make_episode(model, tasks=1).support.x
    with torch.no_grad():
        quiet = model(params, x)
    assert torch.equal(quiet, model(params, x))


@pytest.fixture
def counted(monkeypatch):
    counter = Counted()
    monkeypatch.setattr(conv4, "conv_block", counter)
    return counter


def call(model, *, tasks=1, dtype=torch.float64):
    params = expand(make_params(model, dtype=dtype), tasks)
    return model(params, make_episode(model, tasks=tasks, dtype=dtype).support.x)


@compiled
def test_auto_takes_the_compiled_block_for_one_task(counted):
    call(Conv4(3, image_size=16, filters=8))
    assert counted.calls == 4


@compiled
@pytest.mark.parametrize(
    "options",
    [
        {"bn": "layer"},
        {"downsample": "stride"},
        {"activation": "softplus"},
        {"path": "reference"},
        {"tasks": 2},
        {"dtype": torch.bfloat16},
    ],
)
def test_auto_takes_the_reference_path_for_everything_else(counted, options):
    how = {name: options[name] for name in ("tasks", "dtype") if name in options}
    network = {name: value for name, value in options.items() if name not in how}
    call(Conv4(3, image_size=16, filters=8, **network), **how)
    assert counted.calls == 0


# Torch compiles its forward-mode formulas with an interface it has deprecated.
@compiled
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_function_transforms_and_forward_mode_see_the_reference_path(counted):
    model = Conv4(3, image_size=16, filters=8)
    params = expand(make_params(model), 1)
    batch = make_episode(model, tasks=1).support

    def loss(p):
        return cross_entropy(model(p, batch.x), batch.y).sum()

    gradient = torch.func.grad(loss)(params)
    direction = {n: torch.ones_like(p) for n, p in params.items()}
    with forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(p, direction[n]) for n, p in params.items()}
        slope = forward_ad.unpack_dual(loss(duals)).tangent
    assert slope.item() == pytest.approx(sum(g.sum() for g in gradient.values()).item())
    assert counted.calls == 0


@pytest.mark.parametrize(
    "options", [{"bn": "group"}, {"downsample": "stride"}, {"activation": "tanh"}]
)
def test_asking_for_the_fused_path_where_there_is_none_is_refused(options):
    with pytest.raises(ConfigError, match="'fused' needs"):
        Conv4(3, image_size=16, path="fused", **options)


def test_an_unknown_path_is_refused():
    with pytest.raises(ConfigError, match="path"):
        Conv4(3, path="quick")


@compiled
def test_the_fused_path_refuses_what_the_kernels_cannot_read():
    model = Conv4(3, image_size=16, filters=8, path="fused")
    with pytest.raises(ConfigError, match="bfloat16"):
        call(model, dtype=torch.bfloat16)
