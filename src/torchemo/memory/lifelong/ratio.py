"""How much more likely two sets of examples are of one class than of two: a ratio that needs no threshold.

Features of a class lie around a mean of its own; means of classes lie around a common one. With normal
distributions for both (Ioffe, "Probabilistic linear discriminant analysis", ECCV 2006), along directions in
which examples of one class have variance 1 and class means variance b,

    log p(x, y | one class) - log p(x, y | two classes)

has a closed form for means x and y of any number of examples. More examples make it surer.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.linalg import eigh
from torch import Tensor
from torch.nn.functional import normalize

from torchemo.core.errors import DataError

SHRUNK = 0.5
"""Share of the variance within classes that is taken to be the same in all directions."""
LEAST = 0.05
"""Directions in which class means vary less, in units of the variance within classes, tell nothing."""


@final
@dataclass(frozen=True)
class SameClass:
    """What tells classes apart, learned from classes that are known.

    Attributes:
        centre: Mean of all class means.
        directions: Directions in which examples of one class have variance 1.
        spread: Variance b of class means along them.

    Example:
        >>> from torchemo.core.rng import generator_for
        >>> centres = 3 * torch.randn(50, 4, generator=generator_for(0))
        >>> y = torch.arange(50).repeat_interleave(20)
        >>> x = centres[y] + torch.randn(1000, 4, generator=generator_for(1))
        >>> model = SameClass.learned(x, y, unit=False)
        >>> first, one = model(x[:2]), torch.ones(2, dtype=torch.int64)
        >>> bool(model.ratios(first[:1], one[:1], first[1:], one[1:]) > 0)  # two examples of one class
        True
    """

    centre: Float[Tensor, " dim"]
    directions: Float[Tensor, "dim direction"]
    spread: Float[Tensor, " direction"]
    unit: bool = True

    @classmethod
    def learned(
        cls,
        x: Float[Tensor, "example dim"],
        y: Int[Tensor, " example"],
        *,
        shrunk: float = SHRUNK,
        unit: bool = True,
    ) -> "SameClass":
        """Learn from examples of known classes.

        Args:
            x: Features of the examples.
            y: Their classes, each with two examples or more.
            shrunk: See `SHRUNK`.
            unit: Scale features to length 1 first.
        """
        kept = (normalize(x, dim=1) if unit else x).double()
        which = torch.from_numpy(np.unique(y.numpy(), return_inverse=True)[1])
        counts = torch.bincount(which)
        if len(counts) < 2 or int(counts.min()) < 2:
            raise DataError("to tell classes apart, two classes with two examples each are needed.")
        means = kept.new_zeros(len(counts), kept.shape[1]).index_add_(0, which, kept)
        means /= counts[:, None]
        inside = kept - means[which]
        within = inside.T @ inside / (len(kept) - len(counts))
        flat = torch.diag_embed(within.diagonal().mean().expand(len(within)))
        within = (1 - shrunk) * within + shrunk * flat
        centre = means.mean(0)
        between = (means - centre).T @ (means - centre) / (len(counts) - 1)
        # Means of finite classes vary even where the classes do not.
        between -= within / counts.double().mean()
        spread, directions = eigh(between.numpy(), within.numpy())
        spread, directions = torch.from_numpy(spread), torch.from_numpy(directions)
        telling = spread > LEAST
        return cls(centre.to(x), directions[:, telling].to(x), spread[telling].to(x), unit)

    def __call__(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... direction"]:
        """Return examples along the directions."""
        return self.along(self.scaled(x))

    def scaled(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Return examples as they are compared: of length 1, where lengths tell nothing."""
        return normalize(x, dim=-1) if self.unit else x

    def along(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... direction"]:
        """Return scaled examples, or means of them, along the directions."""
        return (x - self.centre) @ self.directions

    def ratios(
        self,
        own: Float[Tensor, "... way direction"],
        shots: Int[Tensor, "... way"],
        known: Float[Tensor, "... known direction"],
        examples: Int[Tensor, "... known"],
    ) -> Float[Tensor, "... way known"]:
        """Return the log of the likelihood ratio "same class" against "two classes".

        Args:
            own: Means of the examples of some classes, along the directions.
            shots: How many examples each has.
            known: Means of the examples of other classes.
            examples: How many examples each has, 1 or more.
        """
        b, n, k = self.spread, examples[..., None].to(own), shots[..., None].to(own)
        # What n examples tell of the mean of a known class, and what is left open.
        share = n * b / (n * b + 1)
        centre, left = share * known, b / (n * b + 1)
        ratios = -self._log_normal(own, b + 1 / k).sum(-1)[..., None]
        if (shots == shots.flatten()[0]).all():
            return ratios + _log_normal_pairs(own, centre, left + 1 / k.flatten()[0])
        pairs = self._log_normal(
            own[..., :, None, :] - centre[..., None, :, :],
            left[..., None, :, :] + 1 / k[..., :, None, :],
        )
        return ratios + pairs.sum(-1)

    def _log_normal(self, x: Tensor, variance: Tensor) -> Tensor:
        return -0.5 * (variance.log() + x.square() / variance)


def _log_normal_pairs(
    x: Float[Tensor, "... way direction"],
    centre: Float[Tensor, "... known direction"],
    variance: Float[Tensor, "... known direction"],
) -> Float[Tensor, "... way known"]:
    """Return the log density of every x around every centre by products of matrices."""
    precision = 1 / variance
    constant = (variance.log() + centre.square() * precision).sum(-1)
    square = x.square() @ precision.mT - 2 * x @ (centre * precision).mT
    return -0.5 * (square + constant[..., None, :])
