"""BOIL: Body Only update in Inner Loop (Oh, Yoo, Kim, Yun, ICLR 2021)."""

from dataclasses import dataclass
from typing import ClassVar, final

from torchemo.core.types import Model, TaskShape
from torchemo.learners.gradient.base import GradientLearner
from torchemo.learners.gradient.loop import LoopOptions


@final
@dataclass(frozen=True)
class BOIL(GradientLearner):
    """MAML that adapts the body only; the head stays as it was meta-learned."""

    title: ClassVar[str] = "BOIL"

    @classmethod
    def build(cls, options: LoopOptions, model: Model, tasks: TaskShape) -> "BOIL":
        """Make the learner of the body."""
        return cls(options.loop(model, tasks, adapts="body"))
