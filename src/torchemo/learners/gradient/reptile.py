"""Reptile: On first-order meta-learning algorithms (Nichol, Achiam, Schulman, 2018)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Batch, Start
from torchemo.learners.gradient.base import GradientLearner, How
from torchemo.learners.gradient.loop import LoopOptions
from torchemo.learners.learner import Fitted


@final
@dataclass(frozen=True)
class ReptileOptions(LoopOptions):
    """Options of Reptile."""

    minibatch: int | None = None
    """Support examples per inner step; None uses all of them."""


@final
@dataclass(frozen=True)
class Reptile(GradientLearner):
    """Move the initialisation towards the solutions: ``theta <- theta + eps mean_i (theta_i - theta)``.

    The outer "gradient" of task i is ``theta - theta_i``, meant for plain SGD with rate eps in the
    outer loop; the query set is not used to learn.

    Choice: the state of the inner optimizer starts afresh in every task.

    Args:
        loop: The inner loop (published: Adam with beta_1 = 0, rate 1e-3).
        minibatch: Support examples per inner step, taken in turn; None uses all of them.
    """

    title: ClassVar[str] = "Reptile"
    Options: ClassVar[type[LoopOptions]] = ReptileOptions
    fixed: ClassVar[dict[str, Any]] = {"betas": (0.0, 0.999)}  # Adam without momentum, as published

    minibatch: int | None = None

    def __post_init__(self) -> None:
        if self.minibatch is not None and self.minibatch < 1:
            raise ConfigError(f"minibatch should be 1 or more, got {self.minibatch}.")

    @property
    def order(self) -> int:
        """Its outer gradient is not that of any loss, so no graph through inner steps is ever needed."""
        return 1

    def inner(self, start: Start, support: Batch, how: How) -> Fitted:
        """Take steps on minibatches of the support set."""
        return self.loop.run(start, support, **how._asdict(), minibatch=self.minibatch)

    def rows(
        self, start: Start, fitted: Fitted, query: Batch, *, leaves: Sequence[Tensor]
    ) -> tuple[Float[Tensor, " task"], list[Tensor]]:
        """Return ``theta - theta_i`` for the network's leaves and nothing for any other."""
        with torch.no_grad():
            losses = self.loss(fitted, query)
        moved = {id(start.theta[n]): start.theta[n] - end for n, end in fitted.path[-1].items()}
        return losses, [moved.get(id(leaf), torch.zeros_like(leaf)).detach() for leaf in leaves]
