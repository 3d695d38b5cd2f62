import math

import pytest
import torch
import torch.nn.functional as F

from torchemo.core.rng import generator_for
from torchemo.models.layers import (
    from_trunk,
    glorot_uniform,
    kaiming_normal,
    task_conv,
    task_linear,
    to_trunk,
    truncated_normal,
    zeros,
)

DRAWS = [glorot_uniform, kaiming_normal, truncated_normal]


def double(*shape, seed=0):
    return torch.randn(*shape, generator=generator_for(seed, *shape), dtype=torch.float64)


@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (1, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_task_convolution_equals_one_convolution_per_task(tasks, kernel, stride, bias):
    x = double(tasks, 4, 2, 7, 7)
    params = {"c.weight": double(tasks, 5, 2, kernel, kernel)}
    if bias:
        params["c.bias"] = double(tasks, 5)
    out = task_conv(params, to_trunk(x), layer="c", stride=stride)
    expected = [
        F.conv2d(
            x[b],
            params["c.weight"][b],
            params["c.bias"][b] if bias else None,
            stride=stride,
            padding=kernel // 2,
        )
        for b in range(tasks)
    ]
    got = out.reshape(4, tasks, 5, *out.shape[2:]).transpose(0, 1)
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_from_trunk_undoes_to_trunk_up_to_flattening():
    x = double(3, 4, 2, 5, 5)
    assert torch.equal(from_trunk(to_trunk(x), 3), x.flatten(2))


def test_to_trunk_of_a_single_task_copies_nothing():
    x = double(1, 4, 2, 5, 5)
    assert to_trunk(x).data_ptr() == x.data_ptr()


def test_task_linear_equals_one_linear_layer_per_task():
    x, params = double(3, 4, 6), {"l.weight": double(3, 2, 6), "l.bias": double(3, 2)}
    expected = [F.linear(x[b], params["l.weight"][b], params["l.bias"][b]) for b in range(3)]
    got = task_linear(params, x, layer="l")
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_glorot_fills_its_interval():
    w = glorot_uniform((32, 16, 3, 3), generator_for(0))
    bound = math.sqrt(6 / (16 * 9 + 32 * 9))
    assert w.abs().max() <= bound
    assert w.abs().max() > 0.99 * bound
    assert w.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert abs(w.mean().item()) < 0.05 * bound


@pytest.mark.parametrize(("fan", "count"), [("in", 16 * 9), ("out", 64 * 9)])
def test_kaiming_has_variance_two_over_fan(fan, count):
    w = kaiming_normal((64, 16, 3, 3), generator_for(0), fan=fan)
    assert w.std().item() == pytest.approx(math.sqrt(2 / count), rel=0.03)


def test_truncated_normal_stays_within_two_deviations_and_has_the_known_variance():
    w = truncated_normal((300, 300), generator_for(0), std=0.01)
    assert 0.0199 < w.abs().max() <= 0.02 + 1e-7
    # Variance of a normal cut at +-2: 1 - 2 * 2 * phi(2) / (Phi(2) - Phi(-2)) = 0.7737.
    assert (w / 0.01).var().item() == pytest.approx(0.7737, rel=0.02)


@pytest.mark.parametrize("draw", DRAWS)
def test_draws_depend_on_the_generator_alone_and_not_on_the_default_precision(draw):
    first = draw((4, 3), generator_for(5, "a"))
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        again = draw((4, 3), generator_for(5, "a"))
        assert zeros((2,), generator_for(0)).dtype == torch.float32
    finally:
        torch.set_default_dtype(previous)
    assert again.dtype == torch.float32
    assert torch.equal(first, again)
    assert not torch.equal(first, draw((4, 3), generator_for(5, "b")))
