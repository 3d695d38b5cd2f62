"""Answers of several kinds joined: how much the adapted network counts, and how much class means do.

Class means over all visits and the adapted network err in different places, and the more examples are known
the more the means are worth. With log-probabilities l_1 of the network and cosines l_2, l_3, ... to class
means in feature spaces, the joined answer is the softmax of

    sum_i w_i(n) l_i,    w_i(n) >= 0,

with weights for every range of n, the examples known per class. They are those under which answers on
validation visits are most likely (a stacked generalisation: Wolpert, Neural Networks 1992).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from torchemo.core.errors import ShapeError

EDGES = (1.5, 2.5, 4.5, 8.5)
"""Where one range of examples per class ends and the next one begins."""
_ROUNDS = 100


@final
@dataclass(frozen=True)
class Mixture:
    """Weights of the parts of an answer, by how many examples are known per class.

    Attributes:
        weights: ``[range][part]``, one range more than there are `EDGES`.

    Example:
        >>> sure, unsure = torch.tensor([[[0.0, 4.0]]]), torch.tensor([[[0.1, 0.0]]])
        >>> Mixture(((1.0, 10.0),) * 5)([sure, unsure], torch.tensor([1.0]))
        tensor([[[1., 4.]]])
    """

    weights: tuple[tuple[float, ...], ...]

    @classmethod
    def fitted(
        cls,
        parts: Sequence[Float[Tensor, "task query way"]],
        examples: Float[Tensor, " task"],
        y: Int[Tensor, "task query"],
    ) -> "Mixture":
        """Find the weights under which the labels are most likely.

        A range without tasks takes the weights of the range before it, or else after it.
        """
        stacked, which = torch.stack(list(parts), 3).double(), _range_of(examples)
        found = [_most_likely(stacked[which == r], y[which == r]) for r in range(len(EDGES) + 1)]
        known = [r for r, one in enumerate(found) if one is not None]
        if not known:
            raise ShapeError("to weigh answers, validation visits are needed; there are none.")
        nearest = [max((k for k in known if k <= r), default=known[0]) for r in range(len(found))]
        return cls(tuple(found[r] or () for r in nearest))

    def __call__(
        self, parts: Sequence[Float[Tensor, "task query way"]], examples: Float[Tensor, " task"]
    ) -> Float[Tensor, "task query way"]:
        """Join the parts of the answers of B tasks."""
        if len(parts) != len(self.weights[0]):
            raise ShapeError(
                f"there are {len(self.weights[0])} weights for {len(parts)} parts of an answer."
            )
        weights = torch.tensor(self.weights).to(parts[0])[_range_of(examples)]
        return torch.einsum("bqwp,bp->bqw", torch.stack(list(parts), 3), weights)


def _range_of(examples: Tensor) -> Int[Tensor, " task"]:
    return torch.bucketize(examples, torch.tensor(EDGES, device=examples.device).to(examples))


def _most_likely(parts: Tensor, y: Tensor) -> tuple[float, ...] | None:
    """Minimise the cross-entropy in the weights, a convex problem up to their sign."""
    if not len(parts):
        return None
    raw = parts.new_zeros(parts.shape[3], requires_grad=True)
    optimizer = torch.optim.LBFGS([raw], max_iter=_ROUNDS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            value = cross_entropy((parts @ softplus(raw)).flatten(0, 1), y.flatten())
            value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return tuple(float(w) for w in softplus(raw.detach()))
