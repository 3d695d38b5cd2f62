"""Augmentation of training images: crop with padding, flip, colour, erasing.

What happens to an image is a function of the generator alone, and the generator of the seed and the number of
the task or batch. Images of validation and test tasks are never changed.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor

from torchemo.config.run import AugmentSpec

Images = Float[Tensor, "n c h w"]
_GREY = (0.299, 0.587, 0.114)
"""Shares of red, green and blue in a grey value."""
_AREA, _SHAPE = (0.02, 0.4), (0.3, 1 / 0.3)
"""Share of an image that is erased, and its height over its width (Zhong et al. 2020)."""


def augmented(x: Images, spec: AugmentSpec, *, generator: Generator) -> Images:
    """Return changed copies of images in [0, 1]; the order is crop, flip, colour, erasing.

    Args:
        x: Images.
        spec: What is done.
        generator: Where the random numbers come from.
    """
    if spec.crop:
        x = _cropped(x, spec.crop, generator)
    if spec.flip:
        turned = torch.rand(len(x), generator=generator) < 0.5
        x = torch.where(turned[:, None, None, None], x.flip(-1), x)
    if spec.jitter:
        x = _coloured(x, spec.jitter, generator)
    return _erased(x, spec.erase, generator) if spec.erase else x


def _cropped(x: Images, padding: int, generator: Generator) -> Images:
    """Pad with black, and cut out windows of the first size."""
    n, _, height, width = x.shape
    down, right = torch.randint(2 * padding + 1, (2, n), generator=generator)
    rows = (down[:, None] + torch.arange(height))[:, :, None]
    columns = (right[:, None] + torch.arange(width))[:, None, :]
    padded = F.pad(x, (padding,) * 4)
    # Indices on both sides of the channels put these last.
    found = padded[torch.arange(n)[:, None, None], :, rows, columns]
    return found.permute(0, 3, 1, 2).contiguous()


def _coloured(x: Images, share: float, generator: Generator) -> Images:
    """Change brightness, contrast and saturation by factors of ``1 - share`` to ``1 + share``."""
    drawn = torch.rand(3, len(x), 1, 1, 1, generator=generator)
    brightness, contrast, saturation = 1 + share * (2 * drawn - 1)
    x = (brightness * x).clamp(0, 1)
    level = _grey(x).mean((1, 2, 3), keepdim=True)
    x = (contrast * x + (1 - contrast) * level).clamp(0, 1)
    mixed: Tensor = saturation * x + (1 - saturation) * _grey(x)
    return mixed.clamp(0, 1)


def _grey(x: Images) -> Float[Tensor, "n 1 h w"]:
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    shares = torch.tensor(_GREY, dtype=x.dtype)
    grey: Tensor = torch.einsum("nchw,c->nhw", x, shares)
    return grey.unsqueeze(1)


def _erased(x: Images, share: float, generator: Generator) -> Images:
    """Fill a rectangle of some images with the mean colour of the image."""
    n, _, height, width = x.shape
    chosen, area, shape, down, right = torch.rand(5, n, generator=generator)
    area = height * width * (_AREA[0] + (_AREA[1] - _AREA[0]) * area)
    shape = torch.exp(math.log(_SHAPE[0]) + (math.log(_SHAPE[1]) - math.log(_SHAPE[0])) * shape)
    tall = (area * shape).sqrt().round().clamp(1, height)
    wide = (area / shape).sqrt().round().clamp(1, width)
    top, left = ((height + 1 - tall) * down).floor(), ((width + 1 - wide) * right).floor()
    rows, columns = torch.arange(height), torch.arange(width)
    high = (rows >= top[:, None]) & (rows < (top + tall)[:, None])
    across = (columns >= left[:, None]) & (columns < (left + wide)[:, None])
    inside = high[:, :, None] & across[:, None, :] & (chosen < share)[:, None, None]
    return torch.where(inside.unsqueeze(1), x.mean((2, 3), keepdim=True), x)
