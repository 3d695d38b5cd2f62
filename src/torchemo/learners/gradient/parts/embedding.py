"""One vector per support example: the first step of ARML and of HSML."""

import math
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Batch, Params, TaskShape
from torchemo.learners.gradient.parts.initial import linear
from torchemo.models.layers import truncated_normal

_RADIUS, _ALPHA = 4, 0.001 / 9
"""Local response normalisation of the published code: channels to each side, and their factor."""


@final
@dataclass(frozen=True)
class ImageEmbedding:
    """Embed images as the published code of ARML and HSML does; a network beside the learner's own.

    Convolution 5x5 (no bias), ReLU, max-pooling 3x3 by 2, local response normalisation; convolution 5x5,
    ReLU, normalisation, pooling; two linear layers with ReLU, the first of 384. Sides are halved as under
    "same" padding. Weights: truncated normal, deviation 0.04; biases of the linear layers 0.1.
    """

    channels: int
    height: int
    width: int
    dim: int = 128
    filters: int = 32
    hidden: int = 384

    def init(self, generator: torch.Generator) -> Params:
        """Draw the weights."""
        draw = partial(truncated_normal, generator=generator, std=0.04)
        flat = self.filters * _quarter(self.height) * _quarter(self.width)
        return {
            "conv1.weight": draw((self.filters, self.channels, 5, 5)),
            "conv2.weight": draw((self.filters, self.filters, 5, 5)),
            "linear1.weight": draw((self.hidden, flat)),
            "linear1.bias": torch.full((self.hidden,), 0.1, device=generator.device),
            "linear2.weight": draw((self.dim, self.hidden)),
            "linear2.bias": torch.full((self.dim,), 0.1, device=generator.device),
        }

    def __call__(self, params: Params, support: Batch) -> Float[Tensor, "task n e"]:
        """Embed ``support.x [B, n, C, H, W]``; labels are not looked at."""
        x = support.x.flatten(0, 1)
        x = _halved(F.relu(F.conv2d(x, params["conv1.weight"], padding=2)))
        x = F.relu(F.conv2d(response_norm(x), params["conv2.weight"], padding=2))
        x = _halved(response_norm(x)).flatten(1)
        x = F.relu(F.linear(x, params["linear1.weight"], params["linear1.bias"]))
        x = F.relu(F.linear(x, params["linear2.weight"], params["linear2.bias"]))
        return x.view(*support.x.shape[:2], self.dim)


@final
@dataclass(frozen=True)
class PointEmbedding:
    """Embed vectors by one linear map: ``[x, y]`` of regression points, ``x`` alone where y is a label."""

    x_dim: int
    y_dim: int | None
    dim: int = 40

    def init(self, generator: torch.Generator) -> Params:
        """Draw the weights."""
        return linear(self.x_dim + (self.y_dim or 0), self.dim, generator)

    def __call__(self, params: Params, support: Batch) -> Float[Tensor, "task n e"]:
        """Embed ``support.x [B, n, ...]``, with ``support.y [B, n, y_dim]`` for regression."""
        x = support.x.flatten(2)
        if self.y_dim is not None:
            x = torch.cat([x, support.y.flatten(2).to(x.dtype)], dim=-1)
        if x.shape[2] != params["weight"].shape[1]:
            raise ConfigError(
                f"support examples of {params['weight'].shape[1]} numbers were expected,"
                f" got {x.shape[2]}."
            )
        return F.linear(x, params["weight"], params["bias"])


Embedding: TypeAlias = ImageEmbedding | PointEmbedding
"""Maps every support example to a vector of size ``dim``; each example on its own."""


def response_norm(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
    """Divide by ``(1 + alpha sum of squares of the neighbouring channels)^(3/4)``."""
    channel = torch.arange(x.shape[1], device=x.device)
    band = ((channel[:, None] - channel).abs() <= _RADIUS).to(x.dtype) * _ALPHA
    # A 1x1 convolution and two roots: several times faster than torch's pooling over channels.
    root = (1 + F.conv2d(x * x, band[:, :, None, None])).sqrt()
    return x / (root * root.sqrt())


def _halved(x: Tensor) -> Tensor:
    # "Same" padding: one place more at the end of even sides, one at both ends of odd ones.
    padding = (x.shape[2] % 2, x.shape[3] % 2)
    return F.max_pool2d(x, 3, 2, padding=padding, ceil_mode=True)


def _quarter(side: int) -> int:
    return math.ceil(math.ceil(side / 2) / 2)


def embedding_for(tasks: TaskShape, dim: int) -> Embedding:
    """Make what embeds a support example of such tasks for a reader of tasks."""
    if len(tasks.x) == 3:
        return ImageEmbedding(*tasks.x, dim=dim)
    targets = None if tasks.kind == "classification" else tasks.n_out
    return PointEmbedding(math.prod(tasks.x), targets, dim=dim)
