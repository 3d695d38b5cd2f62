"""The folder of a run: where everything is, and who may write to it."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torchemo.core.errors import ResourceError, RunInUse
from torchemo.core.locks import locked
from torchemo.runs.storage import durable, heartbeat
from torchemo.runs.storage.durable import StrPath
from torchemo.runs.storage.heartbeat import Beat, Note


@final
@dataclass(frozen=True)
class RunFolder:
    """Names of everything in a run."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.toml"

    @property
    def accepted(self) -> Path:
        """The configuration as it was changed on purpose after checkpoints were saved."""
        return self.root / "accepted.toml"

    @property
    def environment(self) -> Path:
        """What the run was computed with."""
        return self.root / "environment.json"

    @property
    def events(self) -> Path:
        """What happened, one JSON object per line."""
        return self.root / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Published states."""
        return self.root / "checkpoints"

    @property
    def report(self) -> Path:
        """The run as one HTML file."""
        return self.root / "report.html"

    def save(self, path: Path, text: str) -> None:
        """Write a whole text file of this run so that nobody ever meets half of it."""
        try:
            durable.make_folder(self.root)
            durable.replace_file(path, text.encode())
        except OSError as error:
            raise _unwritable(path, error) from error


LOCK = ".lock"
"""Name of the file that the writer of a run holds."""
OWNER = ".owner"
"""Name of the note that says who the writer is."""


@contextlib.contextmanager
def lock(run: StrPath) -> Iterator[Beat]:
    """Be the only writer of a run; released when the block ends, or the process, however it ends.

    The lock of a process on another machine is taken over, with a warning, when it has given no sign of life
    for `heartbeat.STALE` seconds.
    """
    path = Path(run) / LOCK
    with contextlib.ExitStack() as held:
        try:
            durable.make_folder(path.parent)
            _hold(path, held)
            beat = held.enter_context(heartbeat.beating(path.with_name(OWNER)))
        except OSError as error:
            raise _unwritable(path, error) from error
        yield beat


def _hold(path: Path, held: contextlib.ExitStack) -> None:
    """Take the system's lock, unless a process of this or another machine has it."""
    note = path.with_name(OWNER)
    mine = held.enter_context(locked(path))
    other = heartbeat.read_note(note)
    # Here the system's lock decides, whatever a note says: a process that has ended left it.
    elsewhere = other is not None and not other.is_here
    if mine and not elsewhere:
        return
    if other is None or not elsewhere:
        raise _in_use(path, "another process" if other is None else str(other))
    quiet = heartbeat.silence(note, other)
    if quiet < heartbeat.STALE:
        when = f"{other}; its last heartbeat was {max(quiet, 0):.0f} s ago"
        raise _in_use(
            path, when, hint=f" One that has died is given up after {heartbeat.STALE:.0f} s."
        )
    if not mine:
        _replace_lock(path, other, held)
    warnings.warn(
        f"{path.parent}: {other} has given no heartbeat for {quiet:.0f} s: its lock is taken over.",
        stacklevel=5,
    )


def _replace_lock(path: Path, other: Note, held: contextlib.ExitStack) -> None:
    """Put a lock of ours in the place of one that its file system keeps for a machine that has died."""
    # Of all who find it stale, the one that makes this file goes on.
    claim = path.with_name(f"{durable.TEMPORARY}taken-{other.token}")
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY | durable.NO_LINKS))
    except FileExistsError as error:
        who = f"a process that takes it over from {other}"
        raise _in_use(path, who, hint=f" If there is none, delete {claim}.") from error
    held.callback(claim.unlink, missing_ok=True)
    path.unlink(missing_ok=True)
    if not held.enter_context(locked(path)):
        raise _in_use(path, "another process")


def _in_use(path: Path, who: str, *, hint: str = "") -> RunInUse:
    return RunInUse(
        f"{path.parent} is being written by {who}.",
        hint=f"Wait until it has finished, stop it, or use another run folder.{hint}",
    )


def _unwritable(path: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"cannot write {path}: {error.strerror or error}.",
        hint="Check that the folder may be written and its disk has space, or use another run folder.",
    )
