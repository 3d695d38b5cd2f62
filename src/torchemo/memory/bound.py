"""A memory of gradients as an inner loop sees it: a direction for every step."""

from typing import NamedTuple, Protocol

from torchemo.core.types import Params, Recall


class JoinsSteps(Protocol):
    """Joins what was recalled to inner steps."""

    def combine(
        self, grads: Params, recall: Recall, *, step: int = 0, theta: Params | None = None
    ) -> Params:
        """Return the direction of inner step ``step`` at the parameters ``theta`` (Eq. 7)."""
        ...

    def opening(self, recall: Recall) -> Params | None:
        """Return the direction of a step before the first support gradient, or None."""
        ...


class BoundMemory(NamedTuple):
    """A memory with the recall of B tasks in hand, for an inner loop that has taken ``first`` steps."""

    memory: JoinsSteps
    recall: Recall
    first: int = 0

    def direction(self, grads: Params, step: int, theta: Params | None = None) -> Params:
        """Return the direction of inner step ``step`` at the parameters ``theta`` (Eq. 7)."""
        return self.memory.combine(grads, self.recall, step=self.first + step, theta=theta)

    def opening(self) -> Params | None:
        """Return the recall step before the first support gradient, or None."""
        return None if self.first else self.memory.opening(self.recall)
