"""Locks between processes, on every system: the one place that knows how a file is locked."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

native: type[FileLock] | type[SoftFileLock] = FileLock
"""The system's own lock where it has one; a lock file that is there or not otherwise."""


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold the lock of a file while the block runs; the process's end releases it, too.

    Args:
        path: The lock file; made if it is not there.
        wait: Wait for whoever holds it, instead of giving False.

    Raises:
        OSError: The lock file cannot be made, or the file system has no locks.
    """
    lock = native(path, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
