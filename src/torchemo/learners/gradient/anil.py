"""ANIL: Almost No Inner Loop (Raghu, Raghu, Bengio, Vinyals, ICLR 2020)."""

from dataclasses import dataclass
from typing import ClassVar, final

from torchemo.core.types import Model, TaskShape
from torchemo.learners.gradient.base import GradientLearner
from torchemo.learners.gradient.loop import LoopOptions


@final
@dataclass(frozen=True)
class ANIL(GradientLearner):
    """MAML that adapts the head only; features of a task are computed once.

    The trunk learns through the outer loop alone, exactly and cheaply: its gradient flows through the
    support features of every inner step and through the query features.
    """

    title: ClassVar[str] = "ANIL"

    @classmethod
    def build(cls, options: LoopOptions, model: Model, tasks: TaskShape) -> "ANIL":
        """Make the learner of the head."""
        return cls(options.loop(model, tasks, adapts="head"))
