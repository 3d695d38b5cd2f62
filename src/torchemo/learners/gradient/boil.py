"""BOIL: Body Only update in Inner Loop (Oh, Yoo, Kim, Yun, ICLR 2021)."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from torchemo.learners.gradient.base import GradientLearner


@final
@dataclass(frozen=True)
class BOIL(GradientLearner):
    """MAML that adapts the body only; the head stays as it was meta-learned."""

    title: ClassVar[str] = "BOIL"
    fixed: ClassVar[dict[str, Any]] = {"adapts": "body"}
