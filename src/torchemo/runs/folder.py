"""The folder of a run: where everything is, and who may write to it."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torchemo.core.errors import ResourceError
from torchemo.runs.storage import durable
from torchemo.runs.storage.durable import StrPath


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


@contextlib.contextmanager
def lock(run: StrPath) -> Iterator[None]:
    """Be the only writer of a run; released when the block ends, or the process, however it ends.

    The lock file stays: deleting it would let two processes lock two files of the same name.
    """
    path = Path(run) / LOCK
    try:
        durable.make_folder(path.parent)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        _acquire(handle, path)
        yield
    finally:
        os.close(handle)


def _acquire(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(owner).encode(), 0)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise _unwritable(path, error) from error
        raise ResourceError(
            f"{path.parent} is being written by {_owner(handle)}.",
            hint="Wait until it has finished, stop it, or use another run folder.",
        ) from error


def _owner(handle: int) -> str:
    """Say who holds the lock; the note may be empty for the moment in which it changes hands."""
    try:
        note = json.loads(os.pread(handle, 1000, 0))
        return f"process {note['pid']} on {note['host']} since {note['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _unwritable(path: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"cannot write {path}: {error.strerror or error}.",
        hint="Check that the folder may be written and its disk has space, or use another run folder.",
    )
