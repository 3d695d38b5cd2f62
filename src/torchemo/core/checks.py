"""Checks of a batch of tasks before any work is done on it."""

from torch import Tensor

from torchemo.core.errors import DataError, MemoryWriteError, ShapeError
from torchemo.core.losses import check_labels
from torchemo.core.tree import is_finite
from torchemo.core.types import Batch, Episode


def check_episode(episode: Episode, *, n_way: int | None) -> None:
    """Raise an error that names the task and the part that does not fit.

    Numbers are looked at on the host alone, before tasks are moved: to look at them on a device is to wait
    for it.

    Args:
        episode: B tasks.
        n_way: Outputs of the head, where it has a fixed number of them; integer targets must be below it.
    """
    tasks = episode.support.x.shape[0]
    for part, batch in (("support", episode.support), ("query", episode.query)):
        _check_shapes(batch, tasks, part=part)
        if not batch.x.is_cpu:
            continue
        _check_finite(batch.x, what=f"{part} inputs")
        if batch.y.is_floating_point():
            _check_finite(batch.y, what=f"{part} targets")
        elif n_way is not None:
            check_labels(batch.y, n_way, what=f"{part} labels")


def _check_shapes(batch: Batch, tasks: int, *, part: str) -> None:
    x, y = batch.x, batch.y
    if x.dim() < 3 or y.dim() < 2 or x.shape[:2] != y.shape[:2] or x.shape[0] != tasks:
        raise ShapeError(
            f"{part} set: expected x [{tasks}, n, ...] and y [{tasks}, n] or [{tasks}, n, n_out],"
            f" got x {list(x.shape)} and y {list(y.shape)}.",
            hint="Everything that belongs to a task carries a leading task axis; one task is [1, n, ...].",
        )


def _check_finite(values: Tensor, *, what: str) -> None:
    # A sum is finite exactly when no summand is NaN or infinite (barring overflow, checked below).
    if bool(values.sum().isfinite()):
        return
    bad = (~values.flatten(1).isfinite().all(1)).nonzero().flatten()
    if bad.numel():
        raise DataError(
            f"{what} of task {int(bad[0])} hold NaN or infinity.",
            hint="Look for damaged files, or for a division by zero in the preparation.",
        )


def check_rows_finite(tensor: Tensor, *, what: str, where: str) -> None:
    """Raise `MemoryWriteError` naming the first task or slot whose numbers are not finite."""
    finite = is_finite({"": tensor})
    if not bool(finite.all()):
        bad = int((~finite).nonzero()[0])
        raise MemoryWriteError(
            f"refused to remember {where} {bad}: its {what} is not finite.",
            hint="A non-finite gradient is never stored; skip this task or lower the inner rate.",
        )
