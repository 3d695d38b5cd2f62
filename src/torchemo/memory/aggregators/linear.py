"""The linear aggregators: Mean, Sum (Eq. 8, 9) and Gated."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from torchemo.config.registry import NoOptions
from torchemo.core.errors import ConfigError, ShapeError
from torchemo.core.types import Params, Recall
from torchemo.memory.aggregators.aggregator import Joined
from torchemo.memory.aggregators.parts import (
    OwnAlone,
    base_weights,
    mean_weights,
    mix,
    recalled_names,
    weighted_sum,
)


@final
@dataclass(frozen=True)
class MeanOptions:
    """Options of Mean."""

    rescale: Literal["none", "own"] = "none"
    """own multiplies the result by m + 1, so that the own gradient keeps its rate (A8)."""
    pad: bool = False
    """Divide by k + 1 also while fewer slots are filled, so that the own rate is constant (A8)."""


@final
@dataclass(frozen=True)
class GatedOptions:
    """Options of Gated."""

    per_step: bool = False
    """A gate per inner step."""
    learn_own: bool = False
    """Learn the own gradient's factor too."""


class _Linear(OwnAlone):
    """``c_0 g + Σ_j c_j V_j`` with weights that depend on the recall weights a_j alone."""

    @abstractmethod
    def mixing(self, weights: Float[Tensor, "task m"]) -> tuple[float, Float[Tensor, "task m"]]:
        """Return c_0 and c_j, where ``weights`` is a_j."""

    def mixing_near(
        self, weights: Float[Tensor, "task m"], near: Bool[Tensor, "task m"]
    ) -> tuple[float | Tensor, Float[Tensor, "task m"]]:
        """Return c_0 and c_j where only some slots of a task are used."""
        return self.mixing(weights)

    def forward(self, grads: Params, recall: Recall, *, step: int = 0) -> Params:
        """Combine own and recalled gradients (Eq. 8, 9); ``step`` makes no difference."""
        if recall.m == 0:
            return self.own_only(grads)
        own, recalled = (
            self.mixing(recall.weights)
            if recall.near is None
            else self.mixing_near(recall.weights, recall.near)
        )
        return self.own_only(grads) | {
            name: mix(grads[name], recall.values[name], own=own, recalled=recalled)
            for name in recalled_names(grads, recall)
        }

    def recall_only(self, recall: Recall, *, step: int = 0) -> Params:
        """Return ``Σ_j a_j V_j``."""
        return {name: weighted_sum(v, recall.weights) for name, v in recall.values.items()}


@final
class Mean(_Linear):
    """Mean of own and recalled gradients (Eq. 8): ``(g + Σ_j V_j) / (m + 1)``.

    With recall weights a_j it is ``(g + m Σ_j a_j V_j) / (m + 1)``; uniform ``a_j = 1/m`` is Eq. 8.

    Choice: the own gradient counts 1/(m + 1), which falls from 1 to 1/(k + 1) while the memory
    fills (A8). ``rescale="own"`` multiplies by m + 1, so that the own gradient counts 1. ``pad``
    divides by k + 1 whatever m is, also in `own_only`, so that the own rate is constant. Recall
    without own gradient is ``Σ_j a_j V_j`` in all three.

    Args:
        k: How many neighbours a full memory recalls.
        rescale: ``"none"`` (the paper's) or ``"own"``.
        pad: Divide by k + 1 at all times.

    Example:
        >>> import torch
        >>> Mean(k=3, pad=True).own_only({"w": torch.tensor([[8.0]])})
        {'w': tensor([[2.]])}
    """

    any_number = False
    Options: ClassVar[type[MeanOptions]] = MeanOptions

    @classmethod
    def build(cls, options: MeanOptions, joined: Joined) -> "Mean":
        """Make the aggregator from its options."""
        return cls(joined.k, **vars(options))

    def __init__(
        self, k: int, *, rescale: Literal["none", "own"] = "none", pad: bool = False
    ) -> None:
        super().__init__()
        if k < 0:
            raise ConfigError(f"mean aggregator: k should be at least 0, got {k}.")
        if rescale not in ("none", "own"):
            raise ConfigError(
                f"mean aggregator: rescale should be 'none' or 'own', got '{rescale}'."
            )
        if pad and rescale == "own":
            raise ConfigError(
                "mean aggregator: rescale='own' and pad=True contradict each other.",
                hint="Choose one: both make the rate of the own gradient constant.",
            )
        self.k = k
        self.rescale = rescale
        self.pad = pad

    def mixing(self, weights: Float[Tensor, "task m"]) -> tuple[float, Float[Tensor, "task m"]]:
        """Return the weights of Eq. 8."""
        return mean_weights(weights, self._divisor(weights.shape[1]))

    def mixing_near(
        self, weights: Float[Tensor, "task m"], near: Bool[Tensor, "task m"]
    ) -> tuple[float | Tensor, Float[Tensor, "task m"]]:
        """Return the weights of Eq. 8 with m the number of slots that each task uses."""
        count = near.sum(1).to(weights.dtype)
        plain = self.rescale == "none" and not self.pad
        divisor = count + 1 if plain else torch.full_like(count, self._divisor(weights.shape[1]))
        return 1 / divisor, weights * (count / divisor)[:, None]

    def own_only(self, grads: Params) -> Params:
        """Return the gradients themselves, or a k + 1-th of them if padded."""
        if not self.pad:
            return dict(grads)
        return {name: grad * (1 / (self.k + 1)) for name, grad in grads.items()}

    def _divisor(self, m: int) -> int:
        if self.rescale == "own":
            return 1
        if not self.pad:
            return m + 1
        if m > self.k:
            raise ShapeError(
                f"mean aggregator: padded to k = {self.k} neighbours, got a recall of {m}.",
                hint="Give the aggregator the k of the retrieval.",
            )
        return self.k + 1


@final
class Sum(_Linear):
    """Own gradient plus the mean of the recalled ones (Eq. 9): ``g + (1/m) Σ_j V_j``.

    With recall weights a_j it is ``g + Σ_j a_j V_j``; uniform ``a_j = 1/m`` is Eq. 9.

    Example:
        >>> Sum().own_only({"w": torch.tensor([[8.0]])})
        {'w': tensor([[8.]])}
    """

    any_number = True

    @classmethod
    def build(cls, options: NoOptions, joined: Joined) -> "Sum":
        """Make the aggregator."""
        return cls()

    def mixing(self, weights: Float[Tensor, "task m"]) -> tuple[float, Float[Tensor, "task m"]]:
        """Return the weights of Eq. 9."""
        return base_weights("sum", weights)


@final
class Gated(OwnAlone):
    """Own gradient plus a learned share of the recalled ones: ``g + b_l Σ_j a_j V_j`` per tensor l.

    Not in the paper: Sum with one gate b_l per tensor, trained by the outer loss. It starts at
    zero, so training begins as the base learner, bit for bit, and the memory has to earn its share.

    Choice: the own factor of ``learn_own`` belongs to the recall; where nothing is recalled the
    own gradient is left alone, so that an empty memory is the base learner after training, too.

    Args:
        names: The tensors that are remembered; row l of ``gate`` is the l-th name.
        steps: Give every inner step its own gate; later steps share the last. None: one for all.
        learn_own: Also learn a factor of g per tensor, starting at one.

    Attributes:
        gate: b_l, ``[L]`` or ``[L, steps]``.
        own: The factors of g, of the same shape, or None.

    Example:
        >>> Gated(["w", "b"]).gates()
        {'w': 0.0, 'b': 0.0}
    """

    any_number = True
    Options: ClassVar[type[GatedOptions]] = GatedOptions

    own: nn.Parameter | None

    @classmethod
    def build(cls, options: GatedOptions, joined: Joined) -> "Gated":
        """Make the aggregator from its options."""
        steps = max(joined.steps, 1) if options.per_step else None
        return cls(list(joined.shapes), steps=steps, learn_own=options.learn_own)

    def __init__(
        self, names: Sequence[str], *, steps: int | None = None, learn_own: bool = False
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        if not self.names or len(set(self.names)) < len(self.names):
            raise ConfigError(
                f"gated aggregator: expected distinct tensor names, got {list(self.names)}."
            )
        if steps is not None and steps < 1:
            raise ConfigError(
                f"gated aggregator: steps should be None or at least 1, got {steps}.",
                hint="Use the number of inner steps.",
            )
        shape = (len(self.names),) if steps is None else (len(self.names), steps)
        self.gate = nn.Parameter(torch.zeros(shape))
        self.register_parameter("own", nn.Parameter(torch.ones(shape)) if learn_own else None)

    def forward(self, grads: Params, recall: Recall, *, step: int = 0) -> Params:
        """Combine own and recalled gradients with the gates of inner step ``step``."""
        if recall.m == 0:
            return self.own_only(grads)
        names = recalled_names(grads, recall)
        return self.own_only(grads) | {
            name: self._own_part(grads[name], name, step=step) + recalled
            for name, recalled in self._recalled(recall, names, step=step).items()
        }

    def recall_only(self, recall: Recall, *, step: int = 0) -> Params:
        """Return ``b_l Σ_j a_j V_j``: what `forward` adds to the own gradient."""
        return self._recalled(recall, list(recall.values), step=step)

    def gates(self) -> dict[str, float]:
        """Return b_l by tensor, averaged over inner steps where they have gates of their own."""
        shares = self.gate.detach().reshape(len(self.names), -1).mean(1)
        return dict(zip(self.names, shares.tolist(), strict=True))

    def _own_part(self, grad: Tensor, name: str, *, step: int) -> Tensor:
        return grad if self.own is None else self._entry(self.own, name, step=step) * grad

    def _recalled(self, recall: Recall, names: list[str], *, step: int) -> Params:
        unknown = [name for name in names if name not in self.names]
        if unknown:
            raise ShapeError(
                f"gated aggregator: has gates for {list(self.names)}, got values of {unknown}.",
                hint="Build the aggregator with the names of the tensors that are remembered.",
            )
        return {
            name: self._entry(self.gate, name, step=step)
            * weighted_sum(recall.values[name], recall.weights)
            for name in names
        }

    def _entry(self, table: Tensor, name: str, *, step: int) -> Tensor:
        row = table[self.names.index(name)]
        return row if row.ndim == 0 else row[min(step, row.shape[0] - 1)]
