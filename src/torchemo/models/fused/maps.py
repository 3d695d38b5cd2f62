"""The block on maps that may need a gradient: convolutions by Winograd's F(2x2, 3x3)."""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchemo.models.fused.kernels import call, channels_last, dense, dense_maps, shape_of
from torchemo.models.fused.third_order import twice_only

Maybe: TypeAlias = Tensor | None


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
        filters = weight.shape[0]
        y = channels_last(n, filters, height, width, like=x)
        pooled = channels_last(n, filters, height // 2, width // 2, like=x)
        out, index = torch.empty_like(pooled), torch.empty_like(pooled, dtype=torch.int8)
        stats = torch.empty(2, filters, dtype=torch.float64, device="cpu")
        results = (y, pooled, index, stats, out)
        call("block_forward", shape_of(x, weight), eps, x, weight, scale, shift, *results)
        ctx.save_for_backward(x, weight, scale, y, pooled, index, stats)
        ctx.set_materialize_grads(False)
        return out, y

    @staticmethod
    def backward(ctx: Any, g: Maybe, gy: Maybe) -> tuple[Maybe, ...]:
        """Differentiate once, on the graph if there is to be a second derivative."""
        kept = ctx.saved_tensors
        g = torch.zeros_like(kept[4]) if g is None else dense_maps(g)
        need_x = ctx.needs_input_grad[0]
        return (*MapsBackward.apply(need_x, g, dense_maps(gy), *kept), None)  # type: ignore[no-untyped-call]


class MapsBackward(torch.autograd.Function):
    """The derivative as an operation: ``(need_x, g, gy, *kept) -> (dx, dweight, dbias, dscale, dshift)``.

    ``g`` and ``gy`` are the cotangents of the output and of y; ``kept`` are x, weight, scale, y, what
    pooling took of it, where, and the statistics. Normalisation takes away whatever the bias adds, so dbias
    is exactly zero.
    """

    @staticmethod
    def forward(
        ctx: Any, need_x: bool, g: Tensor, gy: Maybe, *kept: Tensor
    ) -> tuple[Maybe, Tensor, Tensor, Tensor, Tensor]:
        """Carry the cotangents back to the inputs."""
        x, weight, scale = kept[:3]
        dx = torch.empty_like(x) if need_x else None
        dw, d_scale, d_shift = (torch.empty_like(t) for t in (weight, scale, scale))
        call("block_backward", shape_of(x, weight), *kept, g, gy, dx, dw, d_scale, d_shift)
        ctx.save_for_backward(g, *kept)
        ctx.set_materialize_grads(False)
        return dx, dw, torch.zeros_like(scale), d_scale, d_shift

    @staticmethod
    def backward(ctx: Any, *cotangents: Maybe) -> tuple[Maybe, ...]:
        """Differentiate the derivative in g, x, weight, scale and y."""
        g, *kept = ctx.saved_tensors
        if all(v is None for v in cotangents):
            return (None,) * (3 + len(kept))
        found = twice_only((g, *kept, *cotangents), _second(ctx, g, kept, cotangents))
        dg, dx, dw, d_scale, dy = found
        return None, dg, None, dx, dw, d_scale, dy, None, None, None


@torch.no_grad()
def _second(
    ctx: Any, g: Tensor, kept: list[Tensor], cotangents: tuple[Maybe, ...]
) -> tuple[Maybe, ...]:
    x, weight, scale, y = kept[:4]
    vx, vw, _, v_scale, v_shift = cotangents
    dg, dy, d_scale = (torch.empty_like(t) for t in (g, y, scale))
    dx = torch.empty_like(x) if vw is not None and ctx.needs_input_grad[3] else None
    dw = torch.empty_like(weight) if vx is not None else None
    given = (dense_maps(vx), dense(vw), dense(v_scale), dense(v_shift))
    call("block_double", shape_of(x, weight), *kept, g, *given, dg, dy, dx, dw, d_scale)
    return dg, dx, dw, d_scale, dy
