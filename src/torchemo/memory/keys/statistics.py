"""Task keys from plain statistics of the support set: as they are, or through a small network.

Mean colours tell birds from fungi; what a Transformer over a Conv-4 must learn from pixels is here from the
start, at a thousandth of the cost.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor, nn

from torchemo.core.errors import ShapeError
from torchemo.core.prototypes import class_means
from torchemo.core.types import Batch, Model, Params, TaskShape
from torchemo.memory.keys.encoder import (
    KeyOptions,
    check_support,
    checked_keys,
    draw_weights,
    join_pairs,
)

LAYOUT = 4
"""Images are also described by their means over a grid of this many cells a side."""


@final
@dataclass(frozen=True)
class StatisticsOptions:
    """Options of keys without weights."""

    unit: bool = True
    """Keys are unit vectors; needed by softmax weights."""
    training: Literal["none"] = "none"
    """There are no weights to train."""


@final
@dataclass(frozen=True)
class StatisticsNetworkOptions(KeyOptions):
    """Options of the network on statistics."""

    dim: int = 64
    """Dimension of a key."""


class _OfStatistics(nn.Module):
    """Statistics of each image or each pair (x, y), and their means by class.

    Features of a pretrained network (``vectors``) are statistics already: e_i is their direction.
    """

    def __init__(self, x_dim: int, y_dim: int | None, *, vectors: bool = False) -> None:
        super().__init__()
        self.sizes = (x_dim, y_dim)
        self.vectors = vectors

    def describe(self, x: Float[Tensor, "task n c h w"]) -> Float[Tensor, "task n e"]:
        """Return mean and standard deviation of each channel of each image."""
        pixels = x.flatten(3)
        return torch.cat([pixels.mean(-1), pixels.std(-1, correction=0)], dim=-1)

    def embed(self, support: Batch, params: Params | None = None) -> Float[Tensor, "task n e"]:
        """Return the statistics of each image, or each pair (x, y)."""
        x_dim, y_dim = self.sizes
        if y_dim is not None:
            check_support(support)
            return join_pairs(support, x_dim, y_dim)
        if self.vectors:
            check_support(support)
            return F.normalize(support.x, dim=-1)
        return self.describe(_pictures(support, x_dim))

    def prototypes(self, support: Batch, n_way: int, *, params: Params | None = None) -> Tensor:
        """Return the mean e_i of each class."""
        return class_means(self.embed(support, params), support.y, n_way=n_way)


@final
class StatisticsKey(_OfStatistics):
    """Describe a task by plain statistics, without weights: the baseline of learned keys.

    Images: e_i = mean and standard deviation of each channel, K = their mean over the task.
    Regression: e_i = (x_i, y_i), K = means, standard deviations and covariances of these numbers.

    Args:
        x_dim: Channels of an image, or numbers in one regression input.
        y_dim: Numbers in one regression target; None for images.
        unit: Put keys on the unit sphere (loses the scale of the statistics).
        vectors: Examples are features ``[x_dim]`` instead of images.
    """

    Options: ClassVar[type[StatisticsOptions]] = StatisticsOptions

    @classmethod
    def build(
        cls, options: StatisticsOptions, model: Model, tasks: TaskShape, *, generator: Generator
    ) -> "StatisticsKey":
        """Make the keys from their options."""
        return cls(tasks.x[0], _targets(tasks), unit=options.unit, vectors=_are_vectors(tasks))

    def __init__(
        self, x_dim: int, y_dim: int | None = None, *, unit: bool = False, vectors: bool = False
    ) -> None:
        super().__init__(x_dim, y_dim, vectors=vectors)
        self.unit = unit
        width = x_dim + (y_dim or 0)
        of_images = x_dim if vectors else 2 * x_dim
        self.dim = of_images if y_dim is None else width * (width + 3) // 2

    def forward(self, support: Batch, params: Params | None = None) -> Float[Tensor, "task dim"]:
        """Return the statistics of each support set."""
        embedded = self.embed(support, params)
        keys = embedded.mean(1) if self.sizes[1] is None else _moments(embedded)
        return checked_keys(keys, unit=self.unit)


@final
class StatisticsNetwork(_OfStatistics):
    """Learn which plain statistics tell tasks apart: K = W_2 relu(W_1 s + b_1) + b_2, on the unit sphere.

    Images: e_i = colours, contrast, roughness, correlation of channels and a coarse layout of the image,
    s = mean and standard deviation of e_i over the task. Regression: s = first and second moments of the
    pairs (x, y), and how y goes with x^2 and x^3, each as sign(v) log(1 + |v|).

    Choice: the paper's key network is a Transformer over image features; this one is ours. It sees neither
    labels nor the order of the support set.

    Args:
        x_dim: Channels of an image, or numbers in one regression input.
        y_dim: Numbers in one regression target; None for images.
        generator: Draws the weights.
        dim: Length of a key.
        hidden: Width of the hidden layer.
        vectors: Examples are features ``[x_dim]`` instead of images.
    """

    Options: ClassVar[type[KeyOptions]] = StatisticsNetworkOptions

    @classmethod
    def build(
        cls,
        options: StatisticsNetworkOptions,
        model: Model,
        tasks: TaskShape,
        *,
        generator: Generator,
    ) -> "StatisticsNetwork":
        """Make the key network from its options."""
        return cls(
            tasks.x[0],
            _targets(tasks),
            generator=generator,
            dim=options.dim,
            vectors=_are_vectors(tasks),
        )

    def __init__(
        self,
        x_dim: int,
        y_dim: int | None = None,
        *,
        generator: Generator,
        dim: int = 64,
        hidden: int = 64,
        vectors: bool = False,
    ) -> None:
        super().__init__(x_dim, y_dim, vectors=vectors)
        self.dim = dim
        with torch.device("meta"):
            parts = nn.Sequential(
                nn.Linear(self._inputs, hidden), nn.ReLU(), nn.Linear(hidden, dim)
            )
        self.layers = draw_weights(parts, generator)

    @property
    def _inputs(self) -> int:
        x_dim, y_dim = self.sizes
        if self.vectors:
            return 2 * x_dim
        if y_dim is None:
            return 2 * (4 * x_dim + x_dim * (x_dim - 1) // 2 + x_dim * LAYOUT**2)
        width = x_dim + y_dim
        return width * (width + 3) // 2 + 2 * x_dim * y_dim

    def describe(self, x: Float[Tensor, "task n c h w"]) -> Float[Tensor, "task n e"]:
        """Describe each image in more detail, see `describe_pictures`."""
        return describe_pictures(x)

    def forward(self, support: Batch, params: Params | None = None) -> Float[Tensor, "task dim"]:
        """Return the keys of the support sets."""
        return self.of_summary(self.summary(support))

    def summary(self, support: Batch) -> Float[Tensor, "task s"]:
        """Return s, which no weight enters."""
        embedded = self.embed(support)
        if self.sizes[1] is None:
            # A unit vector of d numbers has entries of about 1 / sqrt(d); layers expect about 1.
            embedded = embedded * self.sizes[0] ** 0.5 if self.vectors else embedded
            return torch.cat([embedded.mean(1), embedded.std(1, correction=0)], dim=1)
        return _signed_log(self._curves(embedded))

    def of_summary(self, summary: Float[Tensor, "task s"]) -> Float[Tensor, "task dim"]:
        """Return the keys of support sets with these statistics."""
        weights = next(self.layers.parameters())
        return checked_keys(self.layers(summary.to(weights.dtype)), unit=True)

    def _curves(self, pairs: Float[Tensor, "task n e"]) -> Tensor:
        """Add to the moments how each target goes with the square and the cube of each input."""
        centred = pairs - pairs.mean(1, keepdim=True)
        x, y = centred[..., : self.sizes[0]], centred[..., self.sizes[0] :]
        bends = [(x**power).transpose(1, 2) @ y / pairs.shape[1] for power in (2, 3)]
        return torch.cat([_moments(pairs), *(bend.flatten(1) for bend in bends)], dim=1)


def describe_pictures(x: Float[Tensor, "task n c h w"]) -> Float[Tensor, "task n e"]:
    """Describe each image by numbers of about unit spread over photographs with values in [0, 1].

    Per channel its mean, its standard deviation, and the mean step to the right and to the lower neighbour;
    per pair of channels their covariance; the means of a coarse grid of cells.
    """
    pixels = x.flatten(3)
    mean, spread = pixels.mean(-1), pixels.std(-1, correction=0)
    right = (x[..., 1:] - x[..., :-1]).abs().flatten(3).mean(-1)
    below = (x[..., 1:, :] - x[..., :-1, :]).abs().flatten(3).mean(-1)
    centred = pixels - mean[..., None]
    row, column = torch.triu_indices(x.shape[2], x.shape[2], offset=1, device=x.device)
    together = (centred @ centred.transpose(2, 3) / pixels.shape[-1])[..., row, column]
    layout = F.adaptive_avg_pool2d(x.flatten(0, 1), LAYOUT).view(*x.shape[:2], -1)
    parts = [(mean - 0.5) / 0.2, (spread - 0.25) / 0.1, (right - 0.06) / 0.04]
    parts += [(below - 0.06) / 0.04, together.sign() * together.abs().sqrt() / 0.2]
    return torch.cat([*parts, (layout - 0.5) / 0.25], dim=-1)


def _are_vectors(tasks: TaskShape) -> bool:
    return tasks.kind == "classification" and len(tasks.x) == 1


def _targets(tasks: TaskShape) -> int | None:
    return tasks.n_out if tasks.kind == "regression" else None


def _pictures(support: Batch, channels: int) -> Float[Tensor, "task n c h w"]:
    check_support(support)
    if support.x.ndim != 5 or support.x.shape[2] != channels:
        got = list(support.x.shape)
        raise ShapeError(f"support images should be [B, n, {channels}, H, W], got {got}.")
    return support.x


def _moments(pairs: Float[Tensor, "task n e"]) -> Float[Tensor, "task moment"]:
    """Return means, standard deviations and covariances of the numbers in the pairs."""
    mean = pairs.mean(1)
    centred = pairs - mean[:, None]
    covariance = centred.transpose(1, 2) @ centred / pairs.shape[1]
    spread = covariance.diagonal(dim1=1, dim2=2).sqrt()
    row, column = torch.triu_indices(mean.shape[1], mean.shape[1], offset=1, device=mean.device)
    return torch.cat([mean, spread, covariance[:, row, column]], dim=1)


def _signed_log(values: Tensor) -> Tensor:
    return values.sign() * values.abs().log1p()
