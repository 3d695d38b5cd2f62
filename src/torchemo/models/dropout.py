"""Dropout and DropBlock with an explicit generator (Ghiasi et al. 2018, Lee et al. 2019)."""

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.models.inputs import check_positive


@final
@dataclass(frozen=True, kw_only=True)
class DropConfig:
    """What a ResNet-12 drops while it is trained.

    Attributes:
        dropout: Probability of dropping a number after blocks 1 and 2.
        keep: Share of numbers that DropBlock keeps after blocks 3 and 4; ramp it with `keep_rate`.
        block_size: Side b of the dropped squares: 5 for 84 px, 2 for 32 px; at most the map's side.
    """

    dropout: float = 0.1
    keep: float = 0.9
    block_size: int = 5

    def __post_init__(self) -> None:
        check_positive(block_size=self.block_size)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"option 'dropout' should lie in [0, 1), got {self.dropout}.")
        if not 0 < self.keep <= 1:
            raise ConfigError(f"option 'keep' should lie in (0, 1], got {self.keep}.")


def keep_rate(batch: int, *, final: float = 0.9, ramp: int = 40_000) -> float:
    """Return DropBlock's keep rate after ``batch`` batches: linear from 1 to ``final``, then constant.

    Example:
        >>> keep_rate(0), keep_rate(20_000), keep_rate(10**6)
        (1.0, 0.95, 0.9)
    """
    return 1.0 - (1.0 - final) * min(batch / ramp, 1.0)


def dropblock_gamma(keep: float, *, block_size: int, side: int) -> float:
    """Return the rate of block centres, γ = (1 - keep) / b² · s² / (s - b + 1)²."""
    return (1.0 - keep) / block_size**2 * side**2 / (side - block_size + 1) ** 2


def dropout(
    x: Float[Tensor, "*shape"], rate: float, *, generator: torch.Generator
) -> Float[Tensor, "*shape"]:
    """Zero numbers with probability ``rate`` and scale the others by ``1 / (1 - rate)``."""
    if rate == 0:
        return x
    return x * _uniform(x.shape, x, generator).ge(rate).to(x.dtype) / (1.0 - rate)


def drop_block(
    x: Float[Tensor, "n task_channel side side"],
    config: DropConfig,
    *,
    tasks: int,
    generator: torch.Generator,
) -> Float[Tensor, "n task_channel side side"]:
    """Zero squares of each map and rescale what is left.

    Choice: the rescaling (all numbers / kept numbers) is counted over a task's own batch, so that the tasks
    of a call stay independent.

    Args:
        x: Square maps, the tasks side by side in the channels.
        config: Keep rate and side of the squares.
        tasks: Number of tasks B.
        generator: Where the random numbers come from.
    """
    side = x.shape[-1]
    block = min(config.block_size, side)
    gamma = dropblock_gamma(config.keep, block_size=block, side=side)
    corners = _uniform((*x.shape[:2], side - block + 1, side - block + 1), x, generator) < gamma
    # Every map position belongs to the blocks whose corner lies at most b - 1 before it.
    padded = F.pad(corners.to(x.dtype), (block - 1,) * 4)
    kept = 1.0 - F.max_pool2d(padded, block, stride=1)
    share = kept.reshape(x.shape[0], tasks, -1).mean((0, 2)).clamp(min=1e-12)
    per_channel = share.reciprocal().repeat_interleave(x.shape[1] // tasks)
    return x * kept * per_channel.view(1, -1, 1, 1)


def _uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(*shape, generator=generator, device=generator.device).to(like.device)
