"""One operation for a Conv-4 block, with exact first and second derivatives."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ShapeError
from torchemo.models.fused.first_layer import CHANNELS, Pictures
from torchemo.models.fused.maps import Maps

GROUP = 8
"""The kernels work on channels in groups of this many; others are filled up with zeros."""


def conv_block(
    x: Float[Tensor, "n channel height width"],
    weight: Float[Tensor, "filter channel 3 3"],
    *,
    bias: Float[Tensor, " filter"],
    scale: Float[Tensor, " filter"],
    shift: Float[Tensor, " filter"],
    eps: float,
    pictures: bool = True,
) -> Float[Tensor, "n filter half_height half_width"]:
    """Convolve 3x3, normalise by the batch's statistics, pool 2x2 (floor) and apply ReLU, for one task.

    Normalisation with given statistics is monotone per channel, so the maps are pooled first: the largest
    element of a window where ``scale`` is positive, the smallest where it is negative. Where several are
    equal, or ``scale`` is 0, the first one counts and gets the gradient, as in torch's own pooling. First
    and second derivatives are exact in all tensors; a third one raises. ``bias`` changes nothing but is
    accepted: normalisation removes it, and its gradient is exactly zero.

    Args:
        x: Maps or images of one task, at least 2 x 2.
        weight: Kernels.
        bias: Added to the convolution.
        scale: Factor of the normalised maps.
        shift: Added to them.
        eps: Added to the variances.
        pictures: ``x`` may be taken for images, with kernels of their own, if it needs no gradient. Not for
            the maps of another block: their bits must not depend on whether gradients are recorded.
    """
    _check(x, weight, bias, scale, shift)
    # The kernels write whole groups of filters: those that are missing are zeros, cut off at the end.
    filters = weight.shape[0]
    missing = -filters % GROUP
    if missing:
        weight = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, missing))
        bias, scale, shift = (F.pad(v, (0, missing)) for v in (bias, scale, shift))
    images = pictures and x.shape[1] <= CHANNELS and not x.requires_grad
    vectors = (bias, scale.contiguous(), shift.contiguous())
    out = _on_images(x, weight, *vectors, eps) if images else _on_maps(x, weight, *vectors, eps)
    return out[:, :filters] if missing else out


def _on_images(
    x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> Tensor:
    out: Tensor
    out, _ = Pictures.apply(x.contiguous(), weight.contiguous(), bias, scale, shift, eps)  # type: ignore[no-untyped-call]
    return out


def _on_maps(
    x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> Tensor:
    """Run the kernels for maps, which also read whole groups of channels, channels last."""
    fill = -x.shape[1] % GROUP
    if fill:
        x, weight = F.pad(x, (0, 0, 0, 0, 0, fill)), F.pad(weight, (0, 0, 0, 0, 0, fill))
    x = x.contiguous(memory_format=torch.channels_last)
    out: Tensor
    out, _ = Maps.apply(x, weight.contiguous(), bias, scale, shift, eps)  # type: ignore[no-untyped-call]
    return out


def _check(x: Tensor, weight: Tensor, *vectors: Tensor) -> None:
    """Refuse what the kernels would read beyond its end or in another precision."""
    shapes = [list(t.shape) for t in (x, weight, *vectors)]
    fits = x.ndim == 4 and x.numel() > 0 and min(x.shape[2:]) >= 2 and weight.ndim == 4
    fits = fits and shapes[1][1:] == [shapes[0][1], 3, 3] and weight.shape[0] > 0
    if not fits or any(shape != shapes[1][:1] for shape in shapes[2:]):
        raise ShapeError(
            "a convolution block should get x [n, c, h, w], h and w at least 2, weight [f, c, 3, 3] and"
            f" bias, scale and shift [f], got {shapes}."
        )
    kinds = {(t.dtype, t.device) for t in (x, weight, *vectors)}
    if len(kinds) > 1:
        raise ShapeError(
            f"the tensors of a convolution block should have one type and device, got {kinds}.",
            hint="Bring images and parameters to the same type, for example x.float().",
        )
