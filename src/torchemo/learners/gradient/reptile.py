"""Reptile: On first-order meta-learning algorithms (Nichol, Achiam, Schulman, 2018)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Batch, Params, Start
from torchemo.learners.gradient.inner import Adapted
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.learner import Traits
from torchemo.memory.emo import Bound


@final
@dataclass(frozen=True)
class Reptile:
    """Move the initialisation towards the solutions: ``theta <- theta + eps mean_i (theta_i - theta)``.

    The outer "gradient" row of task i is ``theta - theta_i``, meant for plain SGD with rate eps in the
    outer loop; the query set is not used to learn.

    Reading: the state of the inner optimizer starts afresh in every task.

    Args:
        loop: The inner loop (published: Adam with beta_1 = 0, rate 1e-3).
        minibatch: Support examples per inner step, taken in turn; None uses all of them.
    """

    loop: InnerLoop
    minibatch: int | None = None

    def __post_init__(self) -> None:
        if self.minibatch is not None and self.minibatch < 1:
            raise ConfigError(f"minibatch should be 1 or more, got {self.minibatch}.")

    @property
    def traits(self) -> Traits:
        """Not a gradient of any loss."""
        return Traits(exact_meta_gradient=False, second_order=False)

    def init(self, generator: torch.Generator) -> Params:
        """Draw the network's parameters."""
        return self.loop.model.init(generator)

    def start(self, params: Params, support: Batch, *, base: Params) -> Start:
        """Begin at ``theta`` (plus what the memory adds)."""
        return Start(base)

    def adapt(
        self,
        start: Start,
        support: Batch,
        *,
        bound: Bound | None = None,
        steps: int | None = None,
        order: int | None = None,
    ) -> Adapted:
        """Take steps on minibatches of the support set; no graph is ever needed through them."""
        order = 1 if order is None else order
        return self.loop.run(
            start, support, bound=bound, steps=steps, order=order, minibatch=self.minibatch
        )

    def outer(
        self, start: Start, adapted: Adapted, query: Batch, *, leaves: Sequence[Tensor]
    ) -> tuple[Float[Tensor, " task"], list[Tensor]]:
        """Return ``theta - theta_i`` for the network's leaves and nothing for any other."""
        with torch.no_grad():
            losses = self.loop.losses(adapted, query)
        moved = {id(start.theta[n]): start.theta[n] - end for n, end in adapted.theta.items()}
        return losses, [moved.get(id(leaf), torch.zeros_like(leaf)).detach() for leaf in leaves]
