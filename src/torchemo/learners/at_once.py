"""Learners that adapt nothing, so that an outer step needs no copy of the network per task."""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from torchemo.core.types import Episode, Params


class Together(NamedTuple):
    """Outer losses of B tasks that went through the network at once.

    Attributes:
        losses: Outer losses, on the graph of the meta-parameters.
        statistics: Normalisation statistics of the whole batch, by step, for running averages.
        state: New contents of ``state/`` tensors, where the learner writes some.
    """

    losses: Float[Tensor, " task"]
    statistics: dict[int, Params]
    state: Params


@runtime_checkable
class AtOnce(Protocol):
    """A learner whose training tasks may share one pass of the network."""

    @property
    def runs_at_once(self) -> bool:
        """Whether it is to be trained so."""
        ...

    def at_once(self, params: Params, episode: Episode) -> Together:
        """Return the losses of all tasks, from shared meta-parameters without a task axis."""
        ...
