"""What a learner is: how tasks start, how they adapt, and what the outer loop gets back.

Names with a slash belong to the learner (``rate/conv1.weight``), all others to its network. Those that
begin with ``state/`` are kept with the parameters, but no gradient moves them.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.types import Batch, Params, Start
from torchemo.learners.gradient.inner import Adapted
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.memory.emo import Bound


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
            base: The network's tensors with a task axis: the leaves of the tasks' rows. What a memory adds
                to the start is added to what this returns.
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


class Advance(NamedTuple):
    """What a staged learner makes of an outer step.

    Attributes:
        gradients: Gradients of the meta-parameters that step now; all others stay where they are.
        resets: New contents of learned meta-parameters, set after the step.
        state: All ``state/`` tensors from now on.
    """

    gradients: Params
    resets: Params
    state: Params


@runtime_checkable
class Staged(Protocol):
    """A learner whose outer steps depend on what the run has come to (TSA-MAML's two stages)."""

    def advance(
        self, params: Params, gradients: Params, *, about: Params, iteration: int
    ) -> Advance:
        """Decide what an outer step changes; nothing has been changed yet.

        Args:
            params: Meta-parameters, with the learner's ``state/`` tensors.
            gradients: Gradient of the mean outer loss in all learned ones.
            about: What `Learner.start` found out about the B tasks.
            iteration: Which outer step it is, from 0.
        """
        ...


STATE = "state/"
"""Prefix of tensors that are kept with the meta-parameters but not learned by gradients."""


def network_names(params: Params) -> list[str]:
    """Names of the tensors that belong to the network."""
    return [name for name in params if "/" not in name]


def learned(learner: Learner, params: Params) -> Params:
    """Keep the meta-parameters that gradients move: no running statistics, no ``state/``."""
    fixed = learner.loop.model.buffers
    return {n: p for n, p in params.items() if n not in fixed and not n.startswith(STATE)}


def scoped(params: Params, scope: str) -> Params:
    """Take the tensors of one part, without its name: ``{"gate/w": t} -> {"w": t}``."""
    return {n.removeprefix(scope): p for n, p in params.items() if n.startswith(scope)}


def within(scope: str, params: Params) -> Params:
    """Put the name of a part before its tensors' names: ``{"w": t} -> {"gate/w": t}``."""
    return {scope + n: p for n, p in params.items()}


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
