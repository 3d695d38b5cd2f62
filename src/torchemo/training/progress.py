"""What a training knows besides its tensors: its best step, and the steps it had to leave out."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, final

from torchemo.training.trainer import StepReport, Trainer

HOPELESS = 2
"""Validations in a row without a slot that helps, after which slots may stop training."""


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        iteration: Outer steps done.
        best_step: The checkpoint with the best validation score.
        best_score: That score: accuracy, or minus the squared error.
        ended: All steps done, early stop, or asked to stop.
    """

    iteration: int
    best_step: int | None
    best_score: float | None
    ended: Literal["finished", "early", "stopped"]


@final
@dataclass(frozen=True)
class Progress:
    """What a run knows besides its tensors; saved with every checkpoint."""

    best_step: int | None = None
    best_score: float | None = None
    validations_since_best: int = 0
    skipped_in_a_row: int = 0
    skipped: tuple[int, ...] = ()
    without_help: int = 0
    """Validations in a row in which no slot of the memory passed."""

    @property
    def hopeless(self) -> bool:
        """No slot has helped at several validations in a row."""
        return self.without_help >= HOPELESS

    def judged(self, *, none_passed: bool) -> "Progress":
        """Note whether a validation found no slot that helps."""
        return replace(self, without_help=self.without_help + 1 if none_passed else 0)

    def scored(self, step: int, score: float) -> "Progress":
        """Note a validation; a score that is not finite is never the best."""
        better = self.best_score is None or score > self.best_score
        if better and math.isfinite(score):
            return replace(self, best_step=step, best_score=score, validations_since_best=0)
        return replace(self, validations_since_best=self.validations_since_best + 1)

    def skip(self, step: int) -> "Progress":
        """Note a step that was left out because its numbers were not finite."""
        recent = tuple(s for s in self.skipped if s > step - 1000)
        return replace(self, skipped_in_a_row=self.skipped_in_a_row + 1, skipped=(*recent, step))

    @property
    def diverged(self) -> bool:
        """Ten steps in a row, or more than one in a hundred of the last thousand."""
        return self.skipped_in_a_row >= 10 or len(self.skipped) > 10


def logged(report: StepReport, trainer: Trainer) -> dict[str, Any]:
    """Return what is logged of an outer step."""
    fields: dict[str, Any] = {
        "loss": float(report.losses.mean()),
        "gradient_norm": report.gradient_norm,
    }
    if report.recognition_loss is not None:
        fields["recognition_loss"] = report.recognition_loss
    if report.statistics is not None and trainer.memory is not None:
        fields["filled"] = len(trainer.memory.store)
        for name in ("age", "distance", "same_domain"):
            value = getattr(report.statistics, name)
            if value is not None:
                fields[name] = value
    return fields
