"""One operation for a Conv-4 block, with exact first and second derivatives."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.fused.kernels import SUFFIX
from torchemo.fused.maps import Maps
from torchemo.fused.pictures import CHANNELS, Pictures

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
) -> Float[Tensor, "n filter half_height half_width"]:
    """Convolve 3x3, normalise by the batch's statistics, pool 2x2 (floor) and apply ReLU, for one task.

    First and second derivatives are exact in everything but ``eps``; a third one raises.
    """
    filters, channels = weight.shape[:2]
    missing = -filters % GROUP
    if missing:
        weight = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, missing))
        bias, scale, shift = (F.pad(v, (0, missing)) for v in (bias, scale, shift))
    parameters = (bias, scale.contiguous(), shift.contiguous(), eps)
    if channels <= CHANNELS and not x.requires_grad:
        out, _ = Pictures.apply(x.contiguous(), weight.contiguous(), *parameters)
    else:
        fill = -channels % GROUP
        if fill:
            x, weight = F.pad(x, (0, 0, 0, 0, 0, fill)), F.pad(weight, (0, 0, 0, 0, 0, fill))
        x = x.contiguous(memory_format=torch.channels_last)
        out, _ = Maps.apply(x, weight.contiguous(), *parameters)
    return out[:, :filters] if missing else out
