"""BOIL: Body Only update in Inner Loop (Oh, Yoo, Kim, Yun, ICLR 2021)."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch

from torchemo.core.errors import ConfigError
from torchemo.learners.gradient.base import GradientLearner


@final
@dataclass(frozen=True)
class BOIL(GradientLearner):
    """MAML that adapts the body only; the head stays as it was meta-learned."""

    title: ClassVar[str] = "BOIL"
    fixed: ClassVar[dict[str, Any]] = {"adapts": "body"}

    def for_classes(self, n_way: int) -> "BOIL":
        """Return this learner for tasks of fewer classes than in training, and refuse more."""
        known = self.model.init(torch.Generator())[self.model.head[0]].shape[0]
        if n_way > known:
            raise ConfigError(
                f"BOIL's head never adapts and has rows for {known} classes, got {n_way}: new rows could not"
                " be told apart.",
                hint=f"Give at most {known} classes, or train with another learner, such as maml.",
            )
        return super().for_classes(n_way)
