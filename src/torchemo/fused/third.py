"""A clear refusal where a third derivative is asked for."""

from typing import Any

import torch
from torch import Tensor

from torchemo.errors import ConfigError


def refuse() -> None:
    """Raise what a third derivative raises."""
    raise ConfigError(
        "the fused convolution block has no third derivative.",
        hint="Build the network with path = 'reference'.",
    )


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *results: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if r is None else r.detach() for r in results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        refuse()


def twice_only(
    anchors: tuple[Tensor | None, ...], results: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Return ``results`` such that differentiating them raises, if they depend on anything at all."""
    anchor = next((a for a in anchors if a is not None and a.requires_grad), None)
    if anchor is None or not torch.is_grad_enabled():
        return results
    return tuple(_Refuse.apply(anchor, *results))  # type: ignore[no-untyped-call]
