"""One file of rows: appended to by its maker, read by all, never overwritten."""

import os
import weakref
import zlib
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import final

import numpy as np
from numpy.typing import NDArray

from torchemo.core.errors import CheckpointError, ResourceError

PAGE = 4096
"""Bytes that a disk gives at once."""


def stride_of(size: int) -> int:
    """Return the room of a row: whole pages, or a power of two, so that no small row lies in two pages.

    Example:
        >>> [stride_of(size) for size in (1, 1000, 1024, 5000)]
        [64, 1024, 1024, 8192]
    """
    if size > PAGE // 2:
        return -(-size // PAGE) * PAGE
    return max(64, 1 << (size - 1).bit_length())


@final
class Segment:
    """A file of rows of the same size.

    Args:
        path: The file.
        size: Bytes of a row.
        room: How many rows there is room for.
        used: How many rows were appended.
        new: Make the file and claim its room; otherwise it is there, and read only.

    Raises:
        ResourceError: There is no room for it.
        CheckpointError: It is missing or too short.
    """

    def __init__(self, path: Path, size: int, *, room: int, used: int = 0, new: bool) -> None:
        self.path, self.size, self.room, self.used = path, size, room, used
        self.stride = stride_of(size)
        self.live = 0
        self.lock = Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if new else os.O_RDONLY
        try:
            self.handle = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o666)
            self.close = weakref.finalize(self, os.close, self.handle)
            self.file = FileIO(self.handle, "r+" if new else "r", closefd=False)
            if hasattr(os, "posix_fadvise"):
                # Rows that are recalled lie anywhere: what stands beside one is not wanted.
                os.posix_fadvise(self.handle, 0, 0, os.POSIX_FADV_RANDOM)
            if new:
                self._claim()
        except OSError as error:
            if new:
                raise no_room(path.parent, room * self.stride, error) from error
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror}; it holds values of remembered tasks.",
                hint="Put the file back, or go back to another checkpoint of the run.",
            ) from error
        if not new and os.fstat(self.handle).st_size < used * self.stride:
            raise CheckpointError(
                f"{path} is damaged: it should hold {used} rows of {self.stride} bytes.",
                hint="Put the file back, or go back to another checkpoint of the run.",
            )

    @property
    def free(self) -> int:
        """How many rows may still be appended."""
        return self.room - self.used

    def _claim(self) -> None:
        """Claim the room at once, where the system can: a later write then cannot fail for want of it."""
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.handle, 0, self.room * self.stride)
        except BaseException:
            self.close()
            self.path.unlink()
            raise

    def append(self, rows: NDArray[np.uint8]) -> int:
        """Append rows ``[row, byte]`` and return the number of the first."""
        padded = rows
        if self.stride != self.size:
            padded = np.zeros((len(rows), self.stride), dtype=np.uint8)
            padded[:, : self.size] = rows
        data, first = memoryview(np.ascontiguousarray(padded).data).cast("B"), self.used
        with self.lock:
            try:
                self.file.seek(first * self.stride)
                while data:
                    data = data[self.file.write(data) :]
            except OSError as error:
                raise no_room(self.path.parent, len(data), error) from error
        self.used += len(rows)
        return first

    def ask(self, row: int) -> None:
        """Ask the system to fetch a row, and do not wait for it."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.handle, row * self.stride, self.stride, os.POSIX_FADV_WILLNEED)

    def read(self, row: int, into: NDArray[np.uint8]) -> None:
        """Read one row by one read."""
        view = memoryview(into.reshape(-1).data)
        try:
            with self.lock:
                self.file.seek(row * self.stride)
                while view and (count := self.file.readinto(view)):
                    view = view[count:]
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.") from error
        if view:
            raise CheckpointError(f"{self.path} is damaged: it ends within row {row}.")

    def sync(self) -> None:
        """Force what was appended to the disk."""
        if not self.room:  # it was there before, and nothing was appended
            return
        try:
            os.fsync(self.handle)
        except OSError as error:
            raise no_room(self.path.parent, self.used * self.stride, error) from error


def checksum(row: NDArray[np.uint8]) -> int:
    """Return the CRC-32 of a row."""
    return zlib.crc32(row.data)


def no_room(folder: Path, size: int, error: OSError) -> ResourceError:
    """Say that a folder takes no more values, and why."""
    return ResourceError(
        f"{folder}: no room for {size:,} bytes of values: {error.strerror}.",
        hint="Choose another folder (memory.values_dir) or fewer slots (memory.capacity).",
    )
