"""The block on images that need no gradient: the first layer, which never stores its maps."""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchemo.models.fused.kernels import call, channels_last, dense, dense_maps, shape_of
from torchemo.models.fused.third_order import twice_only

Maybe: TypeAlias = Tensor | None

CHANNELS = 4
"""Images with more channels have a Gram matrix that costs more than it saves."""


class Pictures(torch.autograd.Function):
    """``(x, weight, bias, scale, shift, eps) -> (out, pooled)``, x contiguous and without gradient.

    What pooling took of the convolution is returned beside the output so that autograd adds up what the
    second derivative sends to it before the one weight gradient. It has no other use.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Convolve, pool, normalise what was taken, and apply ReLU."""
        n, channels, height, width = x.shape
        filters, patch = weight.shape[0], 9 * channels
        pooled = channels_last(n, filters, height // 2, width // 2, like=x)
        out, index = torch.empty_like(pooled), torch.empty_like(pooled, dtype=torch.int8)
        stats = torch.empty(2, filters, dtype=torch.float64, device="cpu")
        picture = torch.empty(channels + patch * (1 + patch), dtype=torch.float64, device="cpu")
        results = (picture, pooled, index, stats, out)
        call("first_forward", shape_of(x, weight), eps, x, weight, scale, shift, *results)
        ctx.save_for_backward(x, weight, scale, picture, pooled, index, stats)
        ctx.set_materialize_grads(False)
        return out, pooled

    @staticmethod
    def backward(ctx: Any, g: Maybe, g_pooled: Maybe) -> tuple[Maybe, ...]:
        """Differentiate once, on the graph if there is to be a second derivative."""
        kept = ctx.saved_tensors
        g = torch.zeros_like(kept[4]) if g is None else dense_maps(g)
        return (None, *PicturesBackward.apply(g, dense_maps(g_pooled), *kept), None)  # type: ignore[no-untyped-call]


class PicturesBackward(torch.autograd.Function):
    """The derivative as an operation: ``(g, g_pooled, *kept) -> (dweight, dbias, dscale, dshift)``.

    ``g`` and ``g_pooled`` are the cotangents of the output and of what pooling took; ``kept`` are x, weight,
    scale, the images' levels and Gram matrix, what pooling took, where, and the statistics. Normalisation
    takes away whatever the bias adds, so dbias is exactly zero.
    """

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, g_pooled: Maybe, *kept: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Carry the cotangents back to the parameters."""
        x, weight, scale = kept[:3]
        dw, d_scale, d_shift = (torch.empty_like(t) for t in (weight, scale, scale))
        call("first_backward", shape_of(x, weight), *kept, g, g_pooled, dw, d_scale, d_shift)
        ctx.save_for_backward(g, *kept)
        ctx.set_materialize_grads(False)
        return dw, torch.zeros_like(scale), d_scale, d_shift

    @staticmethod
    def backward(ctx: Any, *cotangents: Maybe) -> tuple[Maybe, ...]:
        """Differentiate the derivative in g, weight, scale and what pooling took."""
        g, *kept = ctx.saved_tensors
        if all(v is None for v in cotangents):
            return (None,) * (2 + len(kept))
        found = twice_only((g, *kept, *cotangents), _second(g, kept, cotangents))
        dg, dw, d_scale, d_pooled = found
        return dg, None, None, dw, d_scale, None, d_pooled, None, None


@torch.no_grad()
def _second(g: Tensor, kept: list[Tensor], cotangents: tuple[Maybe, ...]) -> tuple[Maybe, ...]:
    x, weight, scale = kept[:3]
    vw, _, v_scale, v_shift = (dense(v) for v in cotangents)
    dg, dw, d_scale, d_pooled = (torch.empty_like(t) for t in (g, weight, scale, kept[4]))
    given = (vw, v_scale, v_shift)
    call("first_double", shape_of(x, weight), *kept, g, *given, dg, d_pooled, dw, d_scale)
    return dg, dw, d_scale, d_pooled
