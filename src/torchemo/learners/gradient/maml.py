"""MAML: Model-Agnostic Meta-Learning (Finn, Abbeel, Levine, ICML 2017), second and first order."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from torchemo.learners.gradient.base import GradientLearner


@final
@dataclass(frozen=True)
class MAML(GradientLearner):
    """Meta-learn an initialisation from which a few gradient steps go far (Eq. 2, 3).

    All tasks begin at ``theta``; the outer gradient of a task is that of its query loss through the
    inner steps, ``prod_s (I - alpha H_s) grad L_Q(theta_S)``.
    """

    title: ClassVar[str] = "MAML"


@final
@dataclass(frozen=True)
class FOMAML(GradientLearner):
    """First-order MAML: inner gradients are detached, so the outer gradient is ``grad L_Q(theta_S)``."""

    title: ClassVar[str] = "FOMAML"
    fixed: ClassVar[dict[str, Any]] = {"order": 1}
