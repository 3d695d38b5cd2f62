"""What a run that continues takes over: its newest sound checkpoint and its log; what is damaged is told."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torchemo.core.errors import CheckpointError
from torchemo.runs.events import truncate_after
from torchemo.runs.folder import RunFolder
from torchemo.runs.storage import checkpoint, history

Tell: TypeAlias = Callable[[str, int, Mapping[str, Any]], None]
"""Called with an event, a step and what belongs to it."""


def newest(root: Path, tell: Tell) -> Path | None:
    """Find the newest checkpoint that verifies; None if nothing was saved yet."""
    found = history.latest(root)
    for damaged in found.skipped:
        tell("damaged", 0, {"path": str(damaged.path), "why": damaged.reason})
    if found.path is None and found.skipped:
        raise CheckpointError(
            f"{root} has no checkpoint that can be read.",
            hint=f"See what is wrong with: torchemo checkpoint verify {root};"
            " or start anew with another --out.",
        )
    if found.path is None:
        cut_log(root, -1, tell)
    return found.path


def cut_log(root: Path, step: int, tell: Tell, *, events: int = 0) -> None:
    """Cut the log after a step, and report lines that could not be kept.

    ``events`` is how many of them there were when the step was saved; earlier versions did not count.
    """
    log = RunFolder(root).events
    cut = truncate_after(log, step)
    if cut.damaged:
        why = f"line {_some(cut.damaged)} of the log is damaged and was left out"
        tell(
            "damaged",
            max(step, 0),
            {"path": str(log), "why": f"{why}; the whole is kept in {cut.kept_as}"},
        )
    if cut.gaps:
        why = f"lines are missing or out of order before line {_some(cut.gaps)} of the log"
        tell(
            "damaged",
            max(step, 0),
            {"path": str(log), "why": f"{why}; the whole is kept in {cut.kept_as}"},
        )
    # Every event of a step is on the disk before the checkpoint of that step.
    if step > 0 and (cut.last is None or cut.last < step):
        end = "is empty" if cut.last is None else f"ends at step {cut.last}"
        why = f"the log {end} and the checkpoint is of step {step}: the events between are lost"
        tell("damaged", step, {"path": str(log), "why": why})
    elif cut.left < events and not cut.damaged and not cut.gaps:
        why = f"the log has {cut.left} of {events} events up to step {step}: the last ones are lost"
        tell("damaged", step, {"path": str(log), "why": why})


def _some(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:5])) + (" and more" if numbers[5:] else "")


def is_sound(root: Path, step: int, tell: Tell) -> bool:
    """Return whether the best checkpoint is as it was saved, and report it if not."""
    path = checkpoint.step_folder(root, step)
    try:
        checkpoint.verify(path)
    except CheckpointError as error:
        why = f"{error.message} It was the best one; from here on the best is sought anew"
        tell("damaged", step, {"path": str(path), "why": why})
        return False
    return True
