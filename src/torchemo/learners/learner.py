"""What a learner is: how tasks start, how they adapt, and what the outer loop gets back.

Names with a slash belong to the learner (``rate/conv1.weight``), all others to its network.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.emo import Bound
from torchemo.inner import Adapted
from torchemo.learners.loop import InnerLoop
from torchemo.types import Batch, Params, Start


class Traits(NamedTuple):
    """What a learner declares about itself; the law suite checks it.

    Attributes:
        exact_meta_gradient: Rows are the exact gradient of the query loss (finite differences agree).
        label_equivariant: Permuting the labels of a task together with its head rows changes no loss.
        second_order: The graph of the inner gradients is kept.
        reads_labels_at_start: Support labels are used before the first step, so that accuracy there may
            exceed 1/N.
    """

    exact_meta_gradient: bool = True
    label_equivariant: bool = True
    second_order: bool = True
    reads_labels_at_start: bool = False


@runtime_checkable
class Learner(Protocol):
    """A meta-learner on the task axis."""

    @property
    def loop(self) -> InnerLoop:
        """Its inner loop."""
        ...

    @property
    def traits(self) -> Traits:
        """What it declares about itself."""
        ...

    def init(self, generator: torch.Generator) -> Params:
        """Draw all meta-parameters."""
        ...

    def start(self, params: Params, support: Batch, *, base: Params) -> Start:
        """Return where each task begins.

        Args:
            params: Meta-parameters without a task axis.
            support: Support sets of B tasks.
            base: The network's tensors per task, ``theta`` plus what the memory adds to it.
        """
        ...

    def adapt(
        self,
        start: Start,
        support: Batch,
        *,
        bound: Bound | None = None,
        steps: int | None = None,
        order: int | None = None,
    ) -> Adapted:
        """Run the inner loop of B tasks; ``bound`` brings EMO into it."""
        ...

    def outer(
        self, start: Start, adapted: Adapted, query: Batch, *, leaves: Sequence[Tensor]
    ) -> tuple[Float[Tensor, " task"], list[Tensor]]:
        """Return each task's outer loss, and its row of the outer gradient for every leaf."""
        ...


@runtime_checkable
class Scheduled(Protocol):
    """A learner with switches that are annealed over the outer loop."""

    def scheduled(self, iteration: int) -> Learner:
        """Return this learner as it is at an outer iteration."""
        ...


def network_names(params: Params) -> list[str]:
    """Names of the tensors that belong to the network."""
    return [name for name in params if "/" not in name]


def gradient_rows(losses: Float[Tensor, " task"], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Differentiate the tasks' losses in all leaves at once; rows of unused leaves are zero.

    Tasks are independent, so row b of the gradient of the sum is the gradient of task b.
    """
    if not leaves:
        return []
    found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True, retain_graph=False)
    return [
        torch.zeros_like(leaf) if row is None else row
        for leaf, row in zip(leaves, found, strict=True)
    ]


def query_rows(
    loop: InnerLoop, adapted: Adapted, query: Batch, *, leaves: Sequence[Tensor]
) -> tuple[Float[Tensor, " task"], list[Tensor]]:
    """Differentiate the query loss after the last step (Eq. 3): losses and rows."""
    losses = loop.losses(adapted, query)
    return losses.detach(), gradient_rows(losses, leaves)
