"""The block on pictures that need no gradient: the first layer, which never stores its maps."""

from typing import Any

import torch
from torch import Tensor

from torchemo.fused.kernels import call, channels_last, dense, dense_maps, shape_of
from torchemo.fused.third import refuse, twice_only

CHANNELS = 4
"""Pictures with more channels have a Gram matrix that costs more than it saves."""


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
        n, inside, height, width = x.shape
        channels, patch = weight.shape[0], 9 * inside
        pooled = channels_last(n, channels, height // 2, width // 2, like=x)
        out, index = torch.empty_like(pooled), torch.empty_like(pooled, dtype=torch.int8)
        stats = torch.empty(2, channels, dtype=torch.float64)
        picture = torch.empty(inside + patch + patch * patch, dtype=torch.float64)
        call("first_forward", shape_of(x, weight), eps, x, weight, scale, shift, picture, pooled, index, stats, out)
        ctx.save_for_backward(x, weight, bias, scale, picture, pooled, index, stats)
        ctx.set_materialize_grads(False)
        return out, pooled

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_pooled: Tensor | None) -> tuple[Tensor | None, ...]:
        """Differentiate once, on the graph if there is to be a second derivative."""
        x, weight, bias, scale, picture, pooled, index, stats = ctx.saved_tensors
        g = torch.zeros_like(pooled) if g is None else dense_maps(g)
        dw, d_scale, d_shift = PicturesBackward.apply(
            g, dense_maps(g_pooled), x, weight, scale, picture, pooled, index, stats
        )
        # Normalisation takes away whatever the bias adds: its gradient is exactly zero.
        return None, dw, torch.zeros_like(bias), d_scale, d_shift, None


class PicturesBackward(torch.autograd.Function):
    """``(g, g_pooled, x, weight, scale, ..., pooled, ...) -> (dweight, dscale, dshift)``."""

    @staticmethod
    def forward(
        ctx: Any,
        g: Tensor,
        g_pooled: Tensor | None,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        picture: Tensor,
        pooled: Tensor,
        index: Tensor,
        stats: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Carry cotangents of the output and of what was taken back to the parameters."""
        dw, d_scale, d_shift = torch.empty_like(weight), torch.empty_like(scale), torch.empty_like(scale)
        call("first_backward", shape_of(x, weight), x, weight, scale, picture, pooled, index, stats, g, g_pooled, dw, d_scale, d_shift)
        ctx.save_for_backward(g, x, weight, scale, picture, pooled, index, stats)
        ctx.third = g_pooled is not None
        ctx.set_materialize_grads(False)
        return dw, d_scale, d_shift

    @staticmethod
    def backward(
        ctx: Any, vw: Tensor | None, v_scale: Tensor | None, v_shift: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Differentiate the derivative in everything it was computed from."""
        if ctx.third:
            refuse()
        g, x, weight, scale, picture, pooled, index, stats = ctx.saved_tensors
        if vw is None and v_scale is None and v_shift is None:
            return (None,) * 9
        with torch.no_grad():
            dg, d_pooled = torch.empty_like(g), torch.empty_like(pooled)
            dw, d_scale = torch.empty_like(weight), torch.empty_like(scale)
            call(
                "first_double", shape_of(x, weight), x, weight, scale, picture, pooled, index, stats, g,
                dense(vw), dense(v_scale), dense(v_shift), dg, d_pooled, dw, d_scale,
            )
        dg, d_pooled, dw, d_scale = twice_only((vw, v_scale, v_shift, g), (dg, d_pooled, dw, d_scale))
        return dg, None, None, dw, d_scale, None, d_pooled, None, None
