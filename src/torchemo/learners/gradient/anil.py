"""ANIL: Almost No Inner Loop (Raghu, Raghu, Bengio, Vinyals, ICLR 2020)."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from torchemo.learners.gradient.base import GradientLearner


@final
@dataclass(frozen=True)
class ANIL(GradientLearner):
    """MAML that adapts the head only; features of a task are computed once.

    The trunk learns through the outer loop alone, exactly and cheaply: its gradient flows through the
    support features of every inner step and through the query features.
    """

    title: ClassVar[str] = "ANIL"
    fixed: ClassVar[dict[str, Any]] = {"adapts": "head"}
