"""A note beside a lock that says who holds it, and a heartbeat that other machines can see.

On one machine the system's lock decides. Between machines it may not: some network file systems let every
machine lock for itself, others keep the lock of a machine that has died. So the note counts there.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, final
from uuid import uuid4

from torchemo.core.errors import RunInUse
from torchemo.runs.storage import durable

BEAT = 10.0
"""Seconds between two heartbeats."""
STALE = 120.0
"""Seconds without a heartbeat after which a process of another machine is given up."""


class Note(NamedTuple):
    """Who holds a lock.

    Attributes:
        pid: Number of the process.
        host: Name of its machine.
        since: When it began, for people.
        token: Another one for each holder; empty in notes of earlier versions.
        beaten: When it gave its last sign of life, by the clock of the file system.
    """

    pid: int
    host: str
    since: str
    token: str = ""
    beaten: float = 0.0

    @property
    def is_here(self) -> bool:
        """Return whether the process is, or was, on this machine."""
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


def read_note(path: Path) -> Note | None:
    """Read who holds a lock; None where the note is missing or unreadable."""
    try:
        # Opening a file, unlike asking for its date alone, makes network file systems ask the server.
        with durable.open_regular(path) as handle:
            note = json.loads(os.read(handle, 1000))
            beaten = os.fstat(handle).st_mtime
        return Note(note["pid"], note["host"], note["since"], str(note.get("token", "")), beaten)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def silence(path: Path, note: Note) -> float:
    """Return for how many seconds a process has given no sign of life.

    Both dates are those of the file system, so that clocks of machines may differ.
    """
    clock = path.with_name(f"{durable.TEMPORARY}clock-{uuid4().hex}")
    try:
        clock.touch()
        return clock.stat().st_mtime - note.beaten
    except OSError:
        return time.time() - note.beaten
    finally:
        with contextlib.suppress(OSError):
            clock.unlink()


@final
class Beat:
    """The heartbeat of this process beside a lock; a thread gives it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = uuid4().hex
        self._seen = time.monotonic()
        self._end = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._go_on, name="heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Refuse to go on where this process seemed dead and another has taken its place.

        It is cheap while heartbeats succeed: the note is looked at where they do not, as after a pause of
        the whole process or of its file system.

        Raises:
            RunInUse: Another process has taken over.
        """
        if time.monotonic() - self._seen < 2 * BEAT:
            return
        note = read_note(self._path)
        if note is not None and note.token != self._token:
            raise RunInUse(
                f"{self._path.parent} was taken over by {note}: this process gave no heartbeat in time.",
                hint="Nothing is lost: the other one continues from the last checkpoint.",
            )

    def close(self) -> None:
        """Stop, and remove the note unless it is of another process."""
        self._end.set()
        self._thread.join()
        note = read_note(self._path)
        if note is not None and note.token == self._token:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _write(self) -> None:
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "token": self._token,
        }
        durable.replace_file(self._path, json.dumps(owner).encode())

    def _go_on(self) -> None:
        while not self._end.wait(BEAT):
            note = read_note(self._path)
            if note is not None and note.token == self._token:
                with contextlib.suppress(OSError):  # a file system that is away may come back
                    os.utime(self._path)
                    self._seen = time.monotonic()


@contextlib.contextmanager
def beating(path: Path) -> Iterator[Beat]:
    """Give signs of life beside a file while the block runs."""
    beat = Beat(path)
    try:
        yield beat
    finally:
        beat.close()
