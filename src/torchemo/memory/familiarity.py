"""Which tasks are like those of training: of the others a memory had better keep silent.

The distance to the nearest slot tells little of it: keys of one domain lie about as far from their slot as
keys of a strange domain do. What tells is the direction: strange keys leave the few dimensions in which keys
of training differ. The Mahalanobis distance to the keys of the last training tasks sees both.
"""

from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from torchemo.core.errors import ConfigError

WINDOW = 8
"""Training tasks whose keys are kept, for every dimension of a key."""

RIDGE = 0.01
"""Part of the mean variance that is added to every direction, so that none has a variance of zero."""


@final
class Familiarity(nn.Module):
    """Tell tasks unlike those of training by the Mahalanobis distance of their keys.

    With the mean m and covariance C of the kept keys and ``S = C + r I``, a key is familiar when ``(K - m)^T
    S^-1 (K - m)`` is at most the ``share`` quantile of what kept keys have when each is left out of m and C:
    about this share of tasks like those of training then counts as familiar. All do until
    twice as many keys are kept as they have dimensions.

    Args:
        dim: Dimension of a key.
        share: Share of tasks like those of training that should count as familiar, in (0, 1).
        window: How many keys to keep; `WINDOW` for every dimension by default.
    """

    keys: Tensor
    seen: Tensor

    def __init__(self, dim: int, *, share: float = 0.95, window: int | None = None) -> None:
        super().__init__()
        window = WINDOW * dim if window is None else window
        if not 0 < share < 1 or window < 2 * dim:
            raise ConfigError(
                f"familiarity: share {share}, window {window} for keys of dimension {dim}.",
                hint="The share (retrieval.familiar) lies between 0 and 1, the window holds at least two keys"
                " per dimension.",
            )
        self.share = share
        self.register_buffer("keys", torch.zeros(window, dim))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def see(self, keys: Float[Tensor, "task dim"]) -> None:
        """Keep the keys of training tasks in place of the oldest."""
        last = keys.detach()[-len(self.keys) :]
        first = int(self.seen) + len(keys) - len(last)
        places = torch.arange(first, first + len(last)) % len(self.keys)
        self.keys[places] = last.to(self.keys)
        self.seen += len(keys)

    def forward(self, keys: Float[Tensor, "task dim"]) -> Bool[Tensor, " task"]:
        """Return which tasks are familiar; changes nothing."""
        kept = self.keys[: int(self.seen)].double()
        n, dim = len(kept), self.keys.shape[1]
        if n < 2 * dim:
            return torch.ones(len(keys), dtype=torch.bool)
        mean, away = kept.mean(0), kept - kept.mean(0)
        covariance = away.T @ away / (n - 1)
        # Above zero even where all keys are the same.
        variance = covariance.diagonal().mean().clamp_min(1e-12)
        ridge = RIDGE * variance * torch.eye(dim, dtype=torch.float64)
        far = _squared(keys.detach().double() - mean, covariance + ridge)
        return far <= _left_out(away, covariance, ridge).quantile(self.share)


def _squared(
    away: Float[Tensor, "key dim"], covariance: Float[Tensor, "dim dim"]
) -> Float[Tensor, " key"]:
    """Return ``z^T S^-1 z`` of every row z."""
    factor = torch.linalg.cholesky(covariance)
    solved: Tensor = torch.linalg.solve_triangular(factor, away.T, upper=False)
    return solved.square().sum(0)


def _left_out(away: Tensor, covariance: Tensor, ridge: Tensor) -> Float[Tensor, " key"]:
    """Return the squared distance of every kept key to all others, without a loop.

    Without key i the mean is ``m - z_i / (n - 1)`` and the covariance ``a C - b z_i z_i^T``, with
    ``a = (n - 1) / (n - 2)`` and ``b = n / ((n - 1)(n - 2))``: Sherman and Morrison give its inverse.
    """
    n = len(away)
    a, b = (n - 1) / (n - 2), n / ((n - 1) * (n - 2))
    inside = _squared(away, covariance + ridge / a) / a
    return (n / (n - 1)) ** 2 * inside / (1 - b * inside)
