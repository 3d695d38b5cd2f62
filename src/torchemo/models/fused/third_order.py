"""A clear refusal where a third derivative is asked for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchemo.core.errors import ConfigError


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return all but the first ``count`` tensors, as if computed from these."""
        return tuple(None if t is None else t.detach() for t in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Raise."""
        raise ConfigError(
            "the fused convolution block has no third derivative.",
            hint="Build the network with path = 'reference'.",
        )


def twice_only(
    sources: Sequence[Tensor | None], results: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return ``results`` such that differentiating them in any of ``sources`` raises."""
    if not torch.is_grad_enabled():
        return tuple(results)
    return tuple(_Refuse.apply(len(sources), *sources, *results))  # type: ignore[no-untyped-call]
