"""Who trains when, and at which share of its rate: the learner, the memory, or both together."""

import math
from dataclasses import dataclass
from typing import Literal, final

from torchemo.core.errors import ConfigError


@final
@dataclass(frozen=True)
class Phases:
    """The phases of a training.

    Args:
        learner: Outer steps in which the learner trains; None if nobody has said how many.
        memory: Further steps in which the memory alone trains and the learner is frozen; None if both
            train together.

    Example:
        >>> phases = Phases(learner=10, memory=5)
        >>> phases.total, phases.frozen(9), phases.frozen(10)
        (15, False, True)
    """

    learner: int | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        for name, steps in (("train.steps", self.learner), ("memory.steps", self.memory)):
            if steps is not None and steps < 1:
                raise ConfigError(f"{name} should be 1 or more, got {steps}.")
        if self.memory is not None and self.learner is None:
            raise ConfigError(
                "a memory that trains after the learner needs the learner's number of steps.",
                hint="Give Phases(learner=steps, memory=...).",
            )

    @property
    def total(self) -> int | None:
        """Outer steps of the whole training, if they are known."""
        return None if self.learner is None else self.learner + (self.memory or 0)

    @property
    def turn(self) -> int | None:
        """Step at which the memory starts training alone; None if there is none."""
        return None if self.memory is None else self.learner

    def frozen(self, iteration: int) -> bool:
        """Return whether the learner is frozen at an outer step."""
        return self.turn is not None and iteration >= self.turn

    def rate_factor(self, iteration: int, schedule: Literal["constant", "cosine"]) -> float:
        """Return the share of all outer rates at a step: 1, or ``(1 + cos(pi t / T)) / 2``.

        Every phase has a cosine of its own.
        """
        if schedule == "constant" or self.learner is None:
            return 1.0
        start, end = 0, self.learner
        if self.frozen(iteration):
            start, end = self.learner, self.learner + (self.memory or 0)
        passed = min((iteration - start) / max(1, end - start), 1.0)
        return (1 + math.cos(math.pi * passed)) / 2
