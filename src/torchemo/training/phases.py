"""Who trains when, and at which share of its rate: the network on dense labels, the learner, the memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torchemo.config.run import OptimizerConfig, Schedule
from torchemo.core.errors import ConfigError


@final
@dataclass(frozen=True)
class Phases:
    """The phases of a training.

    Args:
        learner: Outer steps in which the learner trains on episodes; None if nobody has said how many.
        memory: Further steps in which the memory alone trains and the learner is frozen; None if both
            train together.
        dense: Steps before all others, in which the network learns to tell all base classes apart.

    Example:
        >>> phases = Phases(learner=10, memory=5)
        >>> phases.total, phases.frozen(9), phases.frozen(10)
        (15, False, True)
    """

    learner: int | None = None
    memory: int | None = None
    dense: int = 0

    def __post_init__(self) -> None:
        least = 0 if self.dense and self.memory is None else 1
        for name, steps, at_least in (
            ("train.steps", self.learner, least),
            ("memory.steps", self.memory, 1),
            ("train.dense.steps", self.dense, 0),
        ):
            if steps is not None and steps < at_least:
                raise ConfigError(f"{name} should be {at_least} or more, got {steps}.")
        if self.memory is not None and self.learner is None:
            raise ConfigError(
                "a memory that trains after the learner needs the learner's number of steps.",
                hint="Give Phases(learner=steps, memory=...).",
            )

    @property
    def total(self) -> int | None:
        """Outer steps of the whole training, if they are known."""
        return None if self.learner is None else self.dense + self.learner + (self.memory or 0)

    @property
    def turn(self) -> int | None:
        """Step at which the memory starts training alone; None if there is none."""
        return None if self.memory is None or self.learner is None else self.dense + self.learner

    def frozen(self, iteration: int) -> bool:
        """Return whether the learner is frozen at an outer step."""
        return self.turn is not None and iteration >= self.turn

    def rate_factor(
        self, iteration: int, schedule: Schedule, *, drops: Sequence[tuple[float, float]] = ()
    ) -> float:
        """Return the share of all outer rates at a step: 1, or ``(1 + cos(pi t / T)) / 2``.

        Every phase has a schedule of its own.

        Args:
            iteration: The outer step, from 0.
            schedule: How rates fall.
            drops: steps: shares of the phase, and the factor after each.
        """
        if schedule == "constant" or self.learner is None:
            return 1.0
        ends = (0, self.dense, self.dense + self.learner, self.total or 0)
        phase = 0 if iteration < self.dense else 2 if self.frozen(iteration) else 1
        start, end = ends[phase : phase + 2]
        passed = min((iteration - start) / max(1, end - start), 1.0)
        if schedule == "cosine":
            return (1 + math.cos(math.pi * passed)) / 2
        return ([1.0] + [factor for share, factor in drops if passed >= share])[-1]

    def share_of(self, how: OptimizerConfig, iteration: int) -> float:
        """Return the share of an optimizer's rates at an outer step."""
        return self.rate_factor(iteration, how.schedule, drops=how.drops)
