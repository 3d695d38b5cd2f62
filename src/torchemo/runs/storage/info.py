"""What a run saves beside its tensors, read with distrust: progress, and what its tasks look like."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

import torch

from torchemo.core.errors import CheckpointError
from torchemo.core.types import TaskShape
from torchemo.data.source import TaskSource
from torchemo.learners.learner import STATE
from torchemo.runs.storage.checkpoint import Checkpoint
from torchemo.runs.storage.manifest import Manifest
from torchemo.training.progress import Progress

_MAX_SIZE = 1 << 31
_LATER = {"without_help": 0}
_LATER_TASKS = {"base_classes": 0}
"""Fields that runs of earlier versions did not save, and what they stood at."""


def plain_progress(progress: Progress) -> dict[str, Any]:
    """Return what is saved of a run's progress."""
    return {**asdict(progress), "skipped": list(progress.skipped)}


def run_info(
    source: TaskSource, progress: Progress, *, data: str, config: str, events: int
) -> dict[str, Any]:
    """Return what a run saves beside its tensors.

    Args:
        source: Where its tasks come from.
        progress: How far it is.
        data: Fingerprint of the data.
        config: The configuration as TOML.
        events: How many events its log has.
    """
    return {
        "data": data,
        "domains": list(source.domains),
        "tasks": {**asdict(source.shape), "x": list(source.shape.x)},
        "progress": plain_progress(progress),
        "config": config,
        "events": events,
    }


def progress_of(saved: Manifest) -> Progress:
    """Return the progress of a saved run.

    Raises:
        CheckpointError: Fields are missing, not known, or have values that no run can have.
    """
    found = saved.info.get("progress")
    found = {**_LATER, **found} if isinstance(found, dict) else found
    known = {field.name for field in fields(Progress)}
    if not isinstance(found, dict) or set(found) != known:
        got = sorted(found) if isinstance(found, dict) else found
        raise _unfit(saved, f"its progress should have {sorted(known)}, has {got!r:.300}")
    steps = [found["best_step"]] if found["best_step"] is not None else []
    skipped = found["skipped"]
    score = found["best_score"]
    sound = (
        isinstance(skipped, list)
        and all(_natural(step, most=saved.step) for step in [*steps, *skipped])
        and all(_natural(found[n]) for n in ("validations_since_best", "skipped_in_a_row", *_LATER))
        and (type(score) in (int, float) if steps else score is None)
    )
    if not sound:
        raise _unfit(saved, f"its progress cannot be {found!r:.300}")
    return Progress(**{**found, "skipped": tuple(skipped)})


def tasks_of(saved: Manifest) -> tuple[TaskShape, tuple[str, ...]]:
    """Return what the tasks of a saved run look like, and the names of their domains.

    Raises:
        CheckpointError: They are not those of any task.
    """
    tasks, domains = saved.info.get("tasks"), saved.info.get("domains")
    tasks = {**_LATER_TASKS, **tasks} if isinstance(tasks, dict) else tasks
    sizes = ("n_out", "n_shot", "n_query")
    if not isinstance(domains, list) or not all(isinstance(name, str) for name in domains):
        raise _unfit(saved, f"its domains should be a list of names, got {domains!r:.100}")
    sound = (
        isinstance(tasks, dict)
        and set(tasks) == {"kind", "x", *sizes, *_LATER_TASKS}
        and _natural(tasks["base_classes"])
        and tasks["kind"] in ("classification", "regression")
        and isinstance(tasks["x"], list)
        and 0 < len(tasks["x"]) <= 3
        and all(_natural(n) and n for n in [*tasks["x"], *(tasks[name] for name in sizes)])
    )
    if not isinstance(tasks, dict) or not sound:
        raise _unfit(saved, f"it does not say which tasks it is for (tasks: {tasks!r:.200})")
    return TaskShape(**{**tasks, "x": tuple(tasks["x"])}), tuple(domains)


def events_of(saved: Manifest) -> int:
    """Return how many events the log of a saved run had; 0 if an earlier version did not count.

    Raises:
        CheckpointError: The number cannot be one of events.
    """
    events = saved.info.get("events", 0)
    if not _natural(events):
        raise _unfit(saved, f"the number of its events cannot be {events!r:.50}")
    return int(events)


def check_run_state(saved: Checkpoint) -> Checkpoint:
    """Return a checkpoint of a run when all that stands beside its tensors is sound.

    Raises:
        CheckpointError: Progress, tasks, events or step are not those of a run.
    """
    progress_of(saved.manifest)
    tasks_of(saved.manifest)
    events_of(saved.manifest)
    own = saved.groups.get("progress", {})
    inside = own.get("iteration")
    if len(own) != 1 or inside is None or inside.numel() != 1 or int(inside) != saved.step:
        got = "nothing" if inside is None else inside.flatten()[:3].tolist()
        raise _unfit(saved.manifest, f"its tensors are those of step {got}")
    for name, tensor in saved.groups.get("params", {}).items():
        if not name.startswith(STATE) and tensor.dtype != torch.float32:
            raise _unfit(saved.manifest, f"its parameter {name!r:.80} is {tensor.dtype}")
    return saved


@contextlib.contextmanager
def restoring(saved: Checkpoint) -> Iterator[None]:
    """Turn whatever a part says of a state that is not its own into an error of the checkpoint."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise _unfit(saved.manifest, f"its tensors do not fit this run ({error!s:.200})") from error


def _natural(value: object, *, most: int = _MAX_SIZE) -> bool:
    return type(value) is int and 0 <= value <= most


def _unfit(saved: Manifest, why: str) -> CheckpointError:
    return CheckpointError(
        f"step {saved.step} cannot be used: {why}.",
        hint="Go back to another checkpoint of the run: remove this one, or name the other with --step.",
    )
