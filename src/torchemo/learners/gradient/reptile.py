"""Reptile: On first-order meta-learning algorithms (Nichol, Achiam, Schulman, 2018)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Batch, Model, Start, TaskShape
from torchemo.learners.gradient.base import GradientLearner
from torchemo.learners.gradient.loop import LoopOptions
from torchemo.learners.learner import Fitted, Traits
from torchemo.memory.interface import BoundMemory


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

    minibatch: int | None = None

    def __post_init__(self) -> None:
        if self.minibatch is not None and self.minibatch < 1:
            raise ConfigError(f"minibatch should be 1 or more, got {self.minibatch}.")

    @classmethod
    def build(cls, options: ReptileOptions, model: Model, tasks: TaskShape) -> "Reptile":
        """Make the learner; Adam without momentum, as published."""
        return cls(options.loop(model, tasks, betas=(0.0, 0.999)), options.minibatch)

    @property
    def traits(self) -> Traits:
        """Not a gradient of any loss."""
        return Traits(exact_meta_gradient=False, second_order=False)

    def fit(
        self,
        start: Start,
        support: Batch,
        *,
        memory: BoundMemory | None = None,
        steps: int | None = None,
        graph: bool = True,
    ) -> Fitted:
        """Take steps on minibatches of the support set; no graph is ever needed through them."""
        order = 1 if graph else 0
        return self.loop.run(
            start, support, memory=memory, steps=steps, order=order, minibatch=self.minibatch
        )

    def rows(
        self, start: Start, fitted: Fitted, query: Batch, *, leaves: Sequence[Tensor]
    ) -> tuple[Float[Tensor, " task"], list[Tensor]]:
        """Return ``theta - theta_i`` for the network's leaves and nothing for any other."""
        with torch.no_grad():
            losses = self.loss(fitted, query)
        moved = {id(start.theta[n]): start.theta[n] - end for n, end in fitted.path[-1].items()}
        return losses, [moved.get(id(leaf), torch.zeros_like(leaf)).detach() for leaf in leaves]
