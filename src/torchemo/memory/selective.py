"""When to skip recall: on tasks unlike those of training, and for slots that do not help on new classes.

Both rules apply in evaluation only. A task that skips recall is adapted by the learner alone.
"""

from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from torchemo.core.errors import ConfigError
from torchemo.core.types import Recall

WINDOW = 8
"""Training tasks whose keys are kept, for every dimension of a key."""

RIDGE = 0.01
"""Part of the mean variance that is added to every direction, so that none has a variance of zero."""

BOUND = 1.645
"""Standard errors: a slot without any gain seems to gain this much in one case of twenty."""


@final
class SkipUnfamiliar(nn.Module):
    """Skip recall for tasks whose keys lie far from those of training tasks.

    The distance to the nearest slot tells little: keys of one domain lie about as far from their slot as keys
    of an unknown domain. The direction tells more: unknown keys leave the few dimensions in which training
    keys differ. The Mahalanobis distance to the keys of recent training tasks measures both.

    With the mean m and covariance C of the kept keys and ``S = C + r I``, a task uses its recall when ``(K -
    m)^T S^-1 (K - m)`` is at most the ``share`` quantile of the kept keys, each left out of m and C. Every
    task does until twice as many keys are kept as they have dimensions.

    Args:
        dim: Dimension of a key.
        share: Share of tasks like those of training that should use their recall, in (0, 1).
        window: How many keys to keep; `WINDOW` for every dimension by default.
    """

    keys: Tensor
    seen: Tensor

    def __init__(self, dim: int, *, share: float = 0.95, window: int | None = None) -> None:
        super().__init__()
        window = WINDOW * dim if window is None else window
        if not 0 < share < 1 or window < 2 * dim:
            raise ConfigError(
                f"skip_unfamiliar: share {share}, window {window} for keys of dimension {dim}.",
                hint="The share lies between 0 and 1; the window holds at least two keys per dimension.",
            )
        self.share = share
        self.register_buffer("keys", torch.zeros(window, dim))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def see(self, keys: Float[Tensor, "task dim"]) -> None:
        """Keep the keys of training tasks in place of the oldest."""
        last = keys.detach()[-len(self.keys) :]
        first = self.seen + (len(keys) - len(last))
        places = (first + torch.arange(len(last), device=keys.device)) % len(self.keys)
        self.keys[places] = last.to(self.keys)
        self.seen += len(keys)

    def allows(self, recall: Recall) -> Bool[Tensor, " task"]:
        """Return which tasks may use their recall; changes nothing."""
        keys = recall.keys.detach()
        # On the host, as not every device has float64; it is a small matrix.
        kept = self.keys[: int(self.seen)].cpu().double()
        n, dim = len(kept), self.keys.shape[1]
        if n < 2 * dim:
            return keys.new_ones(len(keys), dtype=torch.bool)
        mean, away = kept.mean(0), kept - kept.mean(0)
        covariance = away.T @ away / (n - 1)
        # Above zero even where all keys are the same.
        variance = covariance.diagonal().mean().clamp_min(1e-12)
        ridge = RIDGE * variance * torch.eye(dim, dtype=torch.float64, device="cpu")
        far = _squared(keys.cpu().double() - mean, covariance + ridge)
        return (far <= _left_out(away, covariance, ridge).quantile(self.share)).to(keys.device)


@final
class SkipUnhelpful(nn.Module):
    """Skip recall of slots that do not help on new classes.

    If a domain has few training classes, its slot can overfit to them: it then helps on training tasks and
    hurts on test tasks. Validation tasks use classes that training has not seen, so `judge` compares their
    scores with and without recall.

    With recall weights a_bj and the gain d_b of task b (its score with recall minus that without), a slot's
    gain is ``g_j = sum_b a_bj d_b / sum_b a_bj``, with the standard error
    ``sqrt(sum_b a_bj^2 (d_b - g_j)^2) / sum_b a_bj``. A slot passes when its gain, less `BOUND` standard
    errors, is above ``least``; all pass until they are judged. A task uses its recall when at least half of
    its weight lies on slots that passed.

    Args:
        capacity: Slots of the memory.
        least: Gain that a slot must exceed, in shares of right answers or in squared error.
    """

    failed: Tensor

    def __init__(self, capacity: int, *, least: float = 0.0) -> None:
        super().__init__()
        if capacity < 1:
            raise ConfigError(f"skip_unhelpful: a memory of {capacity} slots has none to judge.")
        self.least = least
        self.register_buffer("failed", torch.zeros(capacity, dtype=torch.bool))

    def allows(self, recall: Recall) -> Bool[Tensor, " task"]:
        """Return which tasks may use their recall; changes nothing."""
        weights = recall.weights.detach()
        return (weights * self.failed[recall.slots]).sum(1) <= weights.sum(1) / 2

    def judge(
        self,
        slots: Int[Tensor, "task m"],
        weights: Float[Tensor, "task m"],
        gains: Float[Tensor, " task"],
    ) -> None:
        """Judge all slots by the gains of tasks that recalled them with these weights."""
        shape = (len(slots), len(self.failed))
        a = torch.zeros(shape, dtype=torch.float64, device="cpu")
        a.scatter_(1, slots.cpu(), weights.detach().cpu().double())
        gains = gains.cpu().double()
        total = a.sum(0).clamp_min(torch.finfo(a.dtype).tiny)
        gain = (a * gains[:, None]).sum(0) / total
        error = (a * (gains[:, None] - gain)).square().sum(0).sqrt() / total
        self.failed.copy_(~(gain - BOUND * error > self.least))


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
