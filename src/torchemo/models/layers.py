"""Layers with a task axis, and the draws that initialise them.

Convolutional trunks keep the layout ``[n, B*C, H, W]`` from the first layer to the last: the tasks lie
side by side in the channels, so B networks are one grouped convolution and no block transposes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.types import Params

Activation: TypeAlias = Literal["relu", "softplus", "tanh"]

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "softplus": F.softplus,
    "tanh": torch.tanh,
}


def to_trunk(
    x: Float[Tensor, "task n channel height width"],
) -> Float[Tensor, "n task*channel height width"]:
    """Lay the tasks side by side in the channels (a view when there is one task)."""
    return x.transpose(0, 1).flatten(1, 2)


def from_trunk(
    x: Float[Tensor, "n task_channel height width"], tasks: int
) -> Float[Tensor, "{tasks} n feature"]:
    """Flatten every example's maps and bring the task axis back to the front."""
    return x.reshape(x.shape[0], tasks, -1).transpose(0, 1)


def task_conv(
    params: Params, x: Tensor, *, layer: str, stride: int = 1
) -> Float[Tensor, "n task_channel height width"]:
    """Convolve each task with its own kernel, padded so that stride 1 keeps the map's size.

    Args:
        params: ``{layer}.weight [B, O, I, k, k]`` and, if the layer has one, ``{layer}.bias [B, O]``.
        x: Maps ``[n, B*I, H, W]``.
        layer: Name of the layer.
        stride: Step of the kernel.
    """
    weight, bias = params[f"{layer}.weight"], params.get(f"{layer}.bias")
    # One task gives groups = 1: the ordinary, faster convolution.
    return F.conv2d(
        x,
        weight.flatten(0, 1),
        None if bias is None else bias.flatten(),
        stride=stride,
        padding=weight.shape[-1] // 2,
        groups=weight.shape[0],
    )


def task_linear(params: Params, x: Tensor, *, layer: str) -> Float[Tensor, "task n out"]:
    """Apply ``x W^T + b`` to each task with its own ``weight [B, out, in]`` and ``bias [B, out]``."""
    weight, bias = params[f"{layer}.weight"], params[f"{layer}.bias"]
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def glorot_uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw from ``U(-a, a)`` with ``a = sqrt(6 / (fan_in + fan_out))``."""
    fan_in, fan_out = _fans(shape)
    bound = math.sqrt(6.0 / (fan_in + fan_out))
    return bound * (2.0 * _draw(torch.rand, shape, generator) - 1.0)


def kaiming_normal(
    shape: Sequence[int], generator: torch.Generator, *, fan: Literal["in", "out"] = "in"
) -> Tensor:
    """Draw from ``N(0, 2 / fan)``."""
    fan_in, fan_out = _fans(shape)
    std = math.sqrt(2.0 / (fan_in if fan == "in" else fan_out))
    return std * _draw(torch.randn, shape, generator)


def truncated_normal(
    shape: Sequence[int], generator: torch.Generator, *, std: float = 0.01
) -> Tensor:
    """Draw from ``N(0, std^2)`` cut at two standard deviations."""
    # The inverse of the normal distribution function, restricted to the mass within two deviations.
    mass = math.erf(math.sqrt(2.0))
    return (
        std * math.sqrt(2.0) * torch.erfinv(mass * (2.0 * _draw(torch.rand, shape, generator) - 1))
    )


def zeros(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return zeros on the generator's device, in the precision of the drawn tensors."""
    return torch.zeros(*shape, dtype=torch.float32, device=generator.device)


def _draw(
    sample: Callable[..., Tensor], shape: Sequence[int], generator: torch.Generator
) -> Tensor:
    # The precision is fixed so that a seed gives the same weights whatever torch's default is.
    return sample(*shape, generator=generator, dtype=torch.float32, device=generator.device)


def _fans(shape: Sequence[int]) -> tuple[int, int]:
    out, inside, *kernel = shape
    return inside * math.prod(kernel), out * math.prod(kernel)
