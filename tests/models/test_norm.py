import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

from tests.models.oracles import REFUSALS
from torchemo.core.errors import ConfigError, ShapeError
from torchemo.core.rng import generator_for
from torchemo.core.tree import expand
from torchemo.models import Conv4
from torchemo.models import norm as norm_module
from torchemo.models.norm import TaskNorm, Usage, predict_with_support, update_running

BATCH = ["transductive", "per_query_with_support", "running", "per_step_running"]
OPTIONS = [*BATCH, "group", "layer", "none"]
TASKS, N, CHANNELS, SIDE = 2, 3, 4, 3


def double(*shape, seed=0):
    return torch.randn(*shape, generator=generator_for(seed, *shape), dtype=torch.float64)


def layer_params(norm, tasks=TASKS, channels=CHANNELS):
    params = norm.init("norm1", channels, device=torch.device("cpu"))
    return {
        name: (value + 0.3 * torch.rand(tasks, *value.shape, generator=generator_for(1, name)))
        .double()
        .contiguous()
        for name, value in params.items()
    }


def apply(norm, params, x):
    """Call a norm on ``[B, n, C, H, W]`` and return the same layout."""
    tasks, n = x.shape[:2]
    out = norm(params, x.transpose(0, 1).flatten(1, 2), layer="norm1", tasks=tasks)
    return out.reshape(n, tasks, *x.shape[2:]).transpose(0, 1)


def fused(norm, x, scale, shift):
    """One task with torch's fused kernels."""
    if norm.bn == "none":
        return x
    if norm.bn in ("group", "layer"):
        return F.group_norm(x, norm.groups if norm.bn == "group" else 1, scale, shift, norm.eps)
    return F.batch_norm(x, None, None, scale, shift, training=True, eps=norm.eps)


@pytest.mark.parametrize("affine", ["both", "shift"])
@pytest.mark.parametrize("bn", OPTIONS)
def test_every_option_equals_torchs_fused_kernel_task_by_task(bn, affine):
    norm = TaskNorm(bn=bn, affine=affine, groups=2)
    params, x = layer_params(norm), double(TASKS, N, CHANNELS, SIDE, SIDE) + 1
    ones = torch.ones(TASKS, CHANNELS).double()
    expected = [
        fused(norm, x[b], params.get("norm1.scale", ones)[b], params.get("norm1.shift", ones)[b])
        for b in range(TASKS)
    ]
    torch.testing.assert_close(
        apply(norm, params, x), torch.stack(expected), rtol=1e-12, atol=1e-12
    )


def test_batch_statistics_are_those_of_a_python_loop():
    norm = TaskNorm(eps=0.5)
    x = double(1, 2, 1, 2, 2)
    params = {"norm1.scale": torch.full((1, 1), 2.0).double(), "norm1.shift": double(1, 1)}
    numbers = x.flatten().tolist()
    mean = sum(numbers) / 8
    var = sum((v - mean) ** 2 for v in numbers) / 8
    shift = params["norm1.shift"].item()
    expected = [(v - mean) / (var + 0.5) ** 0.5 * 2 + shift for v in numbers]
    assert apply(norm, params, x).flatten().tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("affine", ["both", "shift"])
@pytest.mark.parametrize("bn", ["transductive", "group", "layer"])
def test_first_and_second_derivatives_pass_gradcheck(bn, affine):
    norm = TaskNorm(bn=bn, affine=affine, groups=2)
    params = layer_params(norm)
    names = list(params)

    def function(x, *values):
        return apply(norm, dict(zip(names, values, strict=True)), x)

    inputs = [double(TASKS, 2, CHANNELS, 1, 2), *params.values()]
    inputs = [v.detach().requires_grad_() for v in inputs]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_meta_gradients_through_vmap_equal_the_loop():
    # What a fused kernel gets wrong without a warning: adapted scale, derivative taken through vmap.
    norm = TaskNorm(eps=1e-5)
    params = {
        "conv": 0.3 * double(4, 3, 3, 3),
        "norm1.scale": double(4).abs() + 0.5,
        "norm1.shift": double(4),
        "head": 0.1 * double(5, 4 * 16),
    }
    x, q, y = double(3, 5, 3, 4, 4), double(3, 5, 3, 4, 4, seed=1), torch.arange(5).repeat(3, 1)

    def loss(p, x, y):
        axis = {name: value[None] for name, value in p.items()}
        z = norm(axis, F.conv2d(x, p["conv"], padding=1), layer="norm1", tasks=1)
        return F.cross_entropy(F.softplus(z).flatten(1) @ p["head"].T, y)

    def adapted_loss(p, x, y, q):
        g = grad(loss)(p, x, y)
        return loss({k: p[k] - 0.5 * g[k] for k in p}, q, y)

    tasks = list(zip(x, y, q, strict=True))
    loop = grad(lambda p: torch.stack([adapted_loss(p, *t) for t in tasks]).mean())(params)
    through = grad(lambda p: vmap(adapted_loss, (None, 0, 0, 0))(p, x, y, q).mean())(params)
    for name in params:
        error = (through[name] - loop[name]).norm() / loop[name].norm()
        assert error < 1e-12, name


@pytest.mark.parametrize("affine", ["both", "shift"])
def test_the_kernel_and_what_is_written_out_agree_to_the_second_derivative(monkeypatch, affine):
    norm = TaskNorm(affine=affine)
    params = {n: v.detach().requires_grad_() for n, v in layer_params(norm).items()}
    x = double(TASKS, 3, CHANNELS, 4, 5).requires_grad_()
    inputs, found = [x, *params.values()], []
    for plain in (True, False):
        monkeypatch.setattr(norm_module, "plain_autograd", lambda plain=plain: plain)
        out = apply(norm, params, x)
        first = torch.autograd.grad(out.pow(3).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        found.append([out, *first, *second])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


def test_stored_statistics_give_what_torch_gives_in_evaluation_mode():
    norm = TaskNorm(bn="running", usage=Usage(stored=True))
    params, x = layer_params(norm), double(TASKS, N, CHANNELS, SIDE, SIDE)
    for b in range(TASKS):
        one = [params[f"norm1.{key}"][b] for key in ("mean", "var", "scale", "shift")]
        expected = F.batch_norm(x[b], *one, training=False, eps=norm.eps)
        torch.testing.assert_close(apply(norm, params, x)[b], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("step", "row"), [(0, 0), (2, 2), (4, 2), (100, 2)])
def test_per_step_statistics_are_indexed_by_the_step_and_the_last_one_is_kept(step, row):
    norm = TaskNorm(bn="per_step_running", steps=3, usage=Usage(step=step, stored=True))
    params, x = layer_params(norm), double(TASKS, N, CHANNELS, SIDE, SIDE)
    plain = TaskNorm(bn="running", usage=Usage(stored=True))
    chosen = {n: v[:, row] if n in norm.buffers("norm1") else v for n, v in params.items()}
    assert torch.equal(apply(norm, params, x), apply(plain, chosen, x))


@pytest.mark.parametrize("bn", ["transductive", "per_query_with_support", "group", "layer"])
def test_options_without_running_statistics_ignore_stored_and_sink(bn):
    sink = {}
    x = double(TASKS, N, CHANNELS, SIDE, SIDE)
    plain = TaskNorm(bn=bn, groups=2)
    used = TaskNorm(bn=bn, groups=2, usage=Usage(step=3, stored=True, sink=sink))
    params = layer_params(plain)
    assert torch.equal(apply(plain, params, x), apply(used, params, x))
    assert sink == {}
    assert plain.buffers("norm1") == ()


def test_running_averages_follow_torchs_batch_norm_over_several_batches():
    oracle = nn.BatchNorm2d(CHANNELS, momentum=0.3).double()
    norm, sink = TaskNorm(bn="running"), {}
    buffers = {
        n: v.double()
        for n, v in norm.init("norm1", CHANNELS, device=torch.device("cpu")).items()
        if n in norm.buffers("norm1")
    }
    for i in range(3):
        x = double(1, N, CHANNELS, SIDE, SIDE, seed=i) * (i + 1) + i
        oracle(x[0])
        recording = TaskNorm(bn="running", usage=Usage(sink=sink))
        apply(recording, layer_params(norm, tasks=1), x)
        buffers = update_running(buffers, sink, step=0, momentum=0.3)
    torch.testing.assert_close(buffers["norm1.mean"], oracle.running_mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(buffers["norm1.var"], oracle.running_var, rtol=1e-12, atol=0)


def test_recorded_statistics_are_one_row_per_task_and_off_the_graph():
    sink = {}
    norm = TaskNorm(bn="running", usage=Usage(sink=sink))
    x = double(TASKS, N, CHANNELS, SIDE, SIDE).requires_grad_()
    apply(norm, layer_params(norm), x)
    assert list(sink) == ["norm1.mean", "norm1.var"]
    torch.testing.assert_close(sink["norm1.mean"], x.detach().mean((1, 3, 4)))
    torch.testing.assert_close(sink["norm1.var"], x.detach().transpose(1, 2).flatten(2).var(2))
    assert not any(value.requires_grad for value in sink.values())


def test_update_running_averages_over_tasks_and_leaves_its_arguments_alone():
    old = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([5.0])}
    new = update_running(old, {"a": torch.tensor([[3.0, 0.0], [5.0, 2.0]])}, step=0, momentum=0.5)
    assert new["a"].tolist() == [2.5, 1.5]
    assert new["b"] is old["b"]
    assert old["a"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("step", "row"), [(0, 0), (1, 1), (7, 1)])
def test_update_running_changes_only_the_row_of_its_step(step, row):
    old = {"a": torch.zeros(2, 3)}
    new = update_running(old, {"a": torch.ones(4, 3)}, step=step)["a"]
    expected = torch.zeros(2, 3)
    expected[row] = 0.1
    torch.testing.assert_close(new, expected)


@pytest.mark.parametrize("sink", [{"b": torch.ones(2, 3)}, {"a": torch.ones(2, 4)}])
def test_statistics_of_another_network_are_refused(sink):
    with pytest.raises(ShapeError, match="running average"):
        update_running({"a": torch.zeros(3)}, sink, step=0)


def tiny_conv4():
    model = Conv4(3, image_size=16, filters=2, in_channels=1, bn="per_query_with_support")
    params = expand(model.init(generator_for(0)), 2)
    params = {n: v.double() + 0.2 * double(*v.shape) for n, v in params.items()}
    return model, params, double(2, 3, 1, 16, 16), double(2, 5, 1, 16, 16, seed=1)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_predicting_with_the_support_set_equals_a_loop_over_queries(chunk):
    model, params, support, query = tiny_conv4()
    got = predict_with_support(model, params, support, query, chunk=chunk)
    assert got.shape == (2, 5, 3)
    for b in range(2):
        for i in range(5):
            one = {name: value[b : b + 1] for name, value in params.items()}
            x = torch.cat([support[b], query[b, i : i + 1]])[None]
            expected = model(one, x)[0, -1]
            torch.testing.assert_close(got[b, i], expected, rtol=1e-12, atol=1e-12)


def test_predicting_with_the_support_set_does_not_see_the_other_queries():
    model, params, support, query = tiny_conv4()
    changed = query.clone()
    changed[:, 1:] += 3
    first = predict_with_support(model, params, support, query)
    second = predict_with_support(model, params, support, changed)
    torch.testing.assert_close(first[:, 0], second[:, 0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(params, query)[:, 0], model(params, changed)[:, 0])


def test_predicting_with_the_support_set_of_other_tasks_is_refused():
    model, params, support, query = tiny_conv4()
    with pytest.raises(ShapeError, match="same tasks"):
        predict_with_support(model, params, support[:1], query)


@pytest.mark.parametrize("bn", ["transductive", "group"])
def test_a_single_number_is_refused_because_it_has_no_variance(bn):
    norm = TaskNorm(bn=bn, groups=CHANNELS)
    with pytest.raises(ShapeError, match="variance"):
        apply(norm, layer_params(norm, tasks=1), double(1, 1, CHANNELS, 1, 1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bn": "batch"}, "'bn'"),
        ({"affine": "scale"}, "'affine'"),
        ({"eps": 0.0}, "'eps' should be positive"),
        ({"groups": 0}, "'groups'"),
        ({"steps": 0}, "'steps'"),
    ],
)
def test_options_that_cannot_work_are_refused(options, words):
    with pytest.raises(REFUSALS, match=words):
        TaskNorm(**options)


def test_groups_that_do_not_divide_the_channels_are_refused():
    with pytest.raises(ConfigError, match="divide the 4 channels, got 3"):
        TaskNorm(bn="group", groups=3).check_channels(4)


def test_a_negative_inner_step_is_refused():
    with pytest.raises(ConfigError, match="at least 0"):
        Usage(step=-1)
