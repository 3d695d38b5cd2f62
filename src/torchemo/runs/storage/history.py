"""The checkpoints of a run: which one is the latest, which may go, and what a crash left behind.

The three that change something are for the one writer that holds the lock of the run.
"""

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final
from uuid import uuid4

from torchemo.core.errors import CheckpointError, ConfigError, ResourceError
from torchemo.runs.storage import durable
from torchemo.runs.storage.checkpoint import (
    folder_of,
    is_newer,
    is_sound,
    published,
    step_folder,
    step_of,
    verify,
)
from torchemo.runs.storage.durable import StrPath


@final
@dataclass(frozen=True)
class Damaged:
    """A published checkpoint that does not verify, and why."""

    path: Path
    reason: str


@final
@dataclass(frozen=True)
class Latest:
    """The newest checkpoint that verifies, if there is one, and the damaged ones above it."""

    path: Path | None
    skipped: tuple[Damaged, ...]


def latest(run: StrPath, *, strict: bool = False) -> Latest:
    """Find the highest published step that verifies, and say which ones above it are damaged.

    Args:
        run: Folder of the run.
        strict: Raise what is wrong with the highest step instead of going to the one below.
    """
    skipped = []
    for path in reversed(published(run)):
        try:
            verify(path)
        except CheckpointError as error:
            if not os.path.lexists(path):  # pruned by its writer while we were reading
                continue
            if strict or is_newer(path):
                raise
            skipped.append(Damaged(path, error.message))
        else:
            return Latest(path, tuple(skipped))
    return Latest(None, tuple(skipped))


def prune(run: StrPath, *, keep_last: int = 2, keep: Collection[int] = ()) -> list[Path]:
    """Delete old checkpoints; return what was deleted.

    Damaged ones do not count as kept, so there are always ``keep_last`` to go back to.
    """
    if keep_last < 1:
        raise ConfigError(f"keep_last should be 1 or more, got {keep_last}.")
    kept, old = 0, []
    for path in reversed(published(run)):
        if kept == keep_last:
            old.append(path)
        else:
            kept += is_sound(path)
    pinned = {step_folder(run, step) for step in keep}
    old = [path for path in reversed(old) if path not in pinned]
    with _changing(run):
        durable.unpublish(old)
    return old


def rewind(run: StrPath, step: int) -> list[Path]:
    """Put every checkpoint above ``step`` aside, to continue from there; return where they are now.

    Nothing is deleted: damaged ones can be looked at, and good ones renamed back.
    """
    moved = []
    with _changing(run):
        for path in published(run):
            if step_of(path) > step:
                moved.append(path.with_name(f"aside-{path.name}-{uuid4().hex[:8]}"))
                os.rename(path, moved[-1])
        if moved:
            durable.sync_folder(folder_of(run))
    return moved


def sweep(run: StrPath) -> list[Path]:
    """Delete what a killed process left unfinished; return what was deleted. Do this on every start."""
    with _changing(run):
        return durable.sweep(Path(run)) + durable.sweep(folder_of(run))


@contextlib.contextmanager
def _changing(run: StrPath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"cannot tidy up {folder_of(run)}: {error.strerror or error}.",
            hint="Check that you may write to this folder and that its disk is sound.",
        ) from error
