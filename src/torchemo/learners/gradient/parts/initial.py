"""How the parts' weights begin."""

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from torchemo.models.layers import glorot_uniform, truncated_normal

Draw: TypeAlias = Literal["glorot", "tf"]
"""``tf`` is the published code's truncated normal with deviation 1, which saturates wide layers."""


def weight(shape: tuple[int, int], generator: torch.Generator, *, draw: Draw) -> Tensor:
    """Draw a matrix ``[out, in]``."""
    if draw == "tf":
        return truncated_normal(shape, generator, std=1.0)
    return glorot_uniform(shape, generator)


def linear(
    inside: int, out: int, generator: torch.Generator, *, draw: Draw = "glorot"
) -> dict[str, Tensor]:
    """Draw ``weight [out, in]``; ``bias [out]`` is 0."""
    drawn = weight((out, inside), generator, draw=draw)
    return {"weight": drawn, "bias": drawn.new_zeros(out)}


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw from ``U(-1, 1) / sqrt(width)``, for vectors that are compared with others."""
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float32) - 1) / math.sqrt(
        shape[-1]
    )
