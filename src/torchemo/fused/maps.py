"""The block on maps that may need a gradient: convolutions by Winograd's F(2x2, 3x3)."""

from typing import Any

import torch
from torch import Tensor

from torchemo.fused.kernels import call, channels_last, dense, dense_maps, shape_of
from torchemo.fused.third import refuse, twice_only


class Maps(torch.autograd.Function):
    """``(x, weight, bias, scale, shift, eps) -> (out, y)``.

    The convolution's output y is returned beside the block's so that autograd adds up what the second
    derivative sends to it before the one backward convolution. It has no other use.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Convolve, pool, normalise what was taken, and apply ReLU."""
        n, _, height, width = x.shape
        channels = weight.shape[0]
        y = channels_last(n, channels, height, width, like=x)
        pooled = channels_last(n, channels, height // 2, width // 2, like=x)
        out, index = torch.empty_like(pooled), torch.empty_like(pooled, dtype=torch.int8)
        stats = torch.empty(2, channels, dtype=torch.float64)
        call("block_forward", shape_of(x, weight), eps, x, weight, scale, shift, y, pooled, index, stats, out)
        ctx.save_for_backward(x, weight, bias, scale, y, pooled, index, stats)
        ctx.set_materialize_grads(False)
        return out, y

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, gy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Differentiate once, on the graph if there is to be a second derivative."""
        x, weight, bias, scale, y, pooled, index, stats = ctx.saved_tensors
        g = torch.zeros_like(pooled) if g is None else dense_maps(g)
        dx, dw, d_scale, d_shift = MapsBackward.apply(
            g, dense_maps(gy), x, weight, scale, y, pooled, index, stats, ctx.needs_input_grad[0]
        )
        # Normalisation takes away whatever the bias adds: its gradient is exactly zero.
        return dx, dw, torch.zeros_like(bias), d_scale, d_shift, None


class MapsBackward(torch.autograd.Function):
    """``(g, gy, x, weight, scale, y, ...) -> (dx, dweight, dscale, dshift)``: the derivative as an operation."""

    @staticmethod
    def forward(
        ctx: Any,
        g: Tensor,
        gy: Tensor | None,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        y: Tensor,
        pooled: Tensor,
        index: Tensor,
        stats: Tensor,
        need_x: bool,  # noqa: FBT001 -- autograd functions take positional arguments only
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """Carry cotangents of the output and of y back to the inputs."""
        dx = torch.empty_like(x) if need_x else None
        dw, d_scale, d_shift = torch.empty_like(weight), torch.empty_like(scale), torch.empty_like(scale)
        call("block_backward", shape_of(x, weight), x, weight, scale, y, pooled, index, stats, g, gy, dx, dw, d_scale, d_shift)
        ctx.save_for_backward(g, x, weight, scale, y, pooled, index, stats)
        ctx.third = gy is not None
        ctx.set_materialize_grads(False)
        return dx, dw, d_scale, d_shift

    @staticmethod
    def backward(
        ctx: Any, vx: Tensor | None, vw: Tensor | None, v_scale: Tensor | None, v_shift: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Differentiate the derivative in everything it was computed from."""
        if ctx.third:
            refuse()
        g, x, weight, scale, y, pooled, index, stats = ctx.saved_tensors
        if vx is None and vw is None and v_scale is None and v_shift is None:
            return (None,) * 10
        with torch.no_grad():
            dg, dy, d_scale = torch.empty_like(g), torch.empty_like(y), torch.empty_like(scale)
            dx = None if vw is None else torch.empty_like(x)
            dw = None if vx is None else torch.empty_like(weight)
            call(
                "block_double", shape_of(x, weight), x, weight, scale, y, pooled, index, stats, g,
                dense_maps(vx), dense(vw), dense(v_scale), dense(v_shift), dg, dy, dx, dw, d_scale,
            )
        found = twice_only((vx, vw, v_scale, v_shift, g), (dg, None, dx, dw, d_scale, dy))
        return (*found, None, None, None, None)
