"""Values in files: rows are appended, so that a checkpoint holds a version and not a copy.

A write goes to a new row, and a table in RAM says which row a slot has: 12 bytes a slot. What is read is
compared with the checksum of what was written. Old rows go with their file: when a segment has no row in
use, its name is removed, and versions that still need it have a link of their own (`version`).
"""

import os
import platform
import re
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, final
from uuid import uuid4

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from torchemo.core.errors import CheckpointError, ResourceError
from torchemo.core.types import Params
from torchemo.memory.scale import version as versions
from torchemo.memory.scale.rows import Layout
from torchemo.memory.scale.segment import Segment, checksum, no_room, stride_of
from torchemo.memory.scale.version import Version

SMALLEST = 1 << 26
"""Bytes of a segment, unless the memory is smaller or so large that this would make too many files."""
MOST_FILES = 256

_LIVE = re.compile(r"\.live-(.+)-(\d+)-[0-9a-f]{12}")


class Staged(NamedTuple):
    """Rows that were appended and belong to no slot yet."""

    places: NDArray[np.int64]
    sums: NDArray[np.uint32]


@final
class FileRows:
    """The values of T slots in files of a folder.

    Args:
        folder: Where they are; it must be there. The files of this process are in a folder of their own,
            which vanishes with it; versions stay.
        capacity: T.
        layout: What a row holds.
        dtype: How its numbers are kept.
        owner: Whose versions these will be; None keeps none, and only names them.
    """

    def __init__(
        self,
        folder: Path,
        capacity: int,
        layout: Layout,
        dtype: torch.dtype,
        *,
        owner: str | None = "",
    ) -> None:
        self.folder, self.layout, self.dtype, self.owner = folder, layout, dtype, owner
        self.size = layout.numbers * dtype.itemsize
        self.rows_per_file = rows_per_file(capacity, self.size)
        self._places = np.full(capacity, -1, dtype=np.int64)
        self._sums: NDArray[np.uint32] = np.zeros(capacity, dtype=np.uint32)
        self._segments: dict[int, Segment] = {}
        self._next = 0
        self._active: Segment | None = None
        self._live: Path | None = None
        self._name: str | None = None

    def __len__(self) -> int:
        return len(self._places)

    @property
    def files(self) -> tuple[Segment, ...]:
        """The files that hold rows."""
        return tuple(self._segments.values())

    @property
    def about(self) -> str:
        """What a row holds, in words."""
        return described(self.layout, self.dtype)

    # -- reading -------------------------------------------------------------------------------------

    def read(self, slots: Int[Tensor, " m"]) -> Tensor:
        """Read the rows of slots in the order of the files, one read each; none is read twice.

        Raises:
            CheckpointError: A row is not what was written.
        """
        wanted = slots.cpu().numpy()
        places, first, inverse = np.unique(
            self._places[wanted], return_index=True, return_inverse=True
        )
        rows = torch.zeros(len(places), self.layout.numbers, dtype=self.dtype, device="cpu")
        data = self._bytes(rows)
        for place in places.tolist():
            if place >= 0:  # a disk fetches many rows in the time of one
                self._segments[place >> 32].ask(place & 0xFFFFFFFF)
        for i, place in enumerate(places.tolist()):
            if place >= 0:  # a slot without a value is zeros
                self._read(int(wanted[first[i]]), place, data[i])
        return rows if len(places) == 1 == len(wanted) else rows[torch.from_numpy(inverse)]

    def gather(self, slots: Int[Tensor, " m"]) -> Params:
        """Read the values of slots."""
        return self.layout.unpack(self.read(slots))

    def _bytes(self, rows: Tensor) -> NDArray[np.uint8]:
        """Return rows as the bytes they share."""
        if not self.size:
            return np.zeros((len(rows), 0), dtype=np.uint8)
        found: NDArray[np.uint8] = rows.view(torch.uint8).numpy()
        return found

    def _read(self, slot: int, place: int, into: NDArray[np.uint8]) -> None:
        segment = self._segments[place >> 32]
        segment.read(place & 0xFFFFFFFF, into)
        if checksum(into) != self._sums[slot]:
            raise CheckpointError(
                f"the value of slot {slot} is damaged: {segment.path} does not have the bytes that were"
                " written.",
                hint="Put the file back, or go back to another checkpoint of the run.",
            )

    def tensors(self) -> Params:
        """Return copies of all values."""
        whole = torch.arange(len(self._places), device="cpu")
        return {n: v.contiguous() for n, v in self.layout.unpack(self.read(whole)).items()}

    @contextmanager
    def changing(self, filled: int) -> Iterator[Params]:
        """Read the values of the first slots, and write them again on leaving."""
        rows = self.read(torch.arange(filled, device="cpu"))
        values = self.layout.unpack(rows)
        yield values
        self.write(range(filled), self.stage(values), range(filled))

    def moved(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Stay where they are: files are on the host."""

    # -- writing -------------------------------------------------------------------------------------

    def stage(self, values: Params) -> Staged:
        """Append the values of B tasks.

        Raises:
            ResourceError: There is no room; no slot has changed.
        """
        packed = self.layout.pack(values).to(device="cpu", dtype=self.dtype).contiguous()
        rows = self._bytes(packed)
        places = np.concatenate([np.zeros(0, np.int64), *self._appended(rows)])
        return Staged(places, np.array([checksum(row) for row in rows], dtype=np.uint32))

    def _appended(self, rows: NDArray[np.uint8]) -> Iterator[NDArray[np.int64]]:
        while len(rows):
            number, segment = self._with_room()
            part, rows = rows[: segment.free], rows[segment.free :]
            at = segment.append(part)
            yield (number << 32) + np.arange(at, at + len(part), dtype=np.int64)

    def write(self, slots: Sequence[int], staged: Staged, tasks: Sequence[int]) -> None:
        """Give slots their new rows."""
        where, which = np.asarray(slots, dtype=np.int64), np.asarray(tasks, dtype=np.int64)
        self._count(self._places[where], -1)
        self._places[where], self._sums[where] = staged.places[which], staged.sums[which]
        self._count(self._places[where], 1)
        self._name = None
        for number in [
            n for n, s in self._segments.items() if not s.live and s is not self._active
        ]:
            self._let_go(number)

    def _count(self, places: NDArray[np.int64], change: int) -> None:
        numbers, counts = np.unique(places[places >= 0] >> 32, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self._segments[number].live += change * count

    def _with_room(self) -> tuple[int, Segment]:
        """Return a segment to append to; a new one if the last is full."""
        if self._active is None or not self._active.free:
            path = self._own_folder() / f"segment-{uuid4().hex}.rows"
            self._active = Segment(path, self.size, room=self.rows_per_file, new=True)
            self._segments[self._next] = self._active
            self._next += 1
            self._compact()
        return self._next - 1, self._active

    def _compact(self) -> None:
        """Copy rows in use out of files that are mostly waste: files hold at most twice the rows in use."""
        used = sum(segment.used for segment in self._segments.values())
        if used <= 2 * len(self._places) + self.rows_per_file:
            return
        mostly_waste = [
            n for n, s in self._segments.items() if s is not self._active and 2 * s.live <= s.used
        ]
        for number in mostly_waste:
            slots = np.nonzero(self._places >> 32 == number)[0]
            for part in np.array_split(slots, -(-len(slots) // 256)) if len(slots) else ():
                values = self.layout.unpack(self.read(torch.from_numpy(part)))
                self.write(part.tolist(), self.stage(values), range(len(part)))

    def _let_go(self, number: int) -> None:
        segment = self._segments.pop(number)
        segment.close()
        if self._live is not None and segment.path.parent == self._live:
            segment.path.unlink(missing_ok=True)

    def _own_folder(self) -> Path:
        """Return the folder of this process, made when it is first needed."""
        if self._live is None:
            sweep(self.folder)
            live = (
                self.folder / f".live-{platform.node() or 'host'}-{os.getpid()}-{uuid4().hex[:12]}"
            )
            try:
                live.mkdir()
            except OSError as error:
                raise no_room(self.folder, self.size * len(self._places), error) from error
            self._live = live
            weakref.finalize(self, _vanish, live, os.getpid())
        return self._live

    # -- versions ------------------------------------------------------------------------------------

    @property
    def version(self) -> Version:
        """What all slots hold now."""
        named = {n: (s.path.name, s.used) for n, s in self._segments.items() if s.live}
        return Version(self.layout, self.dtype, self._places, self._sums, named)

    @property
    def digest(self) -> str:
        """A digest of what all slots hold, wherever the rows lie."""
        return self.version.digest

    def snapshot(self) -> str:
        """Keep what the slots hold now, and return a name that `restore` takes back; nothing is copied."""
        if self._name is not None and (self.folder / self._name).is_dir():
            return self._name
        now = self.version
        if self.owner is None:
            return versions.contents_name(now)
        for number in now.segments:
            self._segments[number].sync()
        self._name = versions.publish(self.folder, now, self._segments, owner=self.owner)
        for number in now.segments:
            segment = self._segments[number]
            # The version that was restored may be deleted before the next is made.
            if not segment.room:
                segment.path = self.folder / self._name / segment.path.name
        return self._name

    def restore(self, name: str) -> None:
        """Go back to a version.

        Raises:
            CheckpointError: It is missing, damaged, or of other values.
        """
        found = versions.read(self.folder, name)
        mine = (len(self._places), self.layout, self.dtype)
        if (len(found.places), found.layout, found.dtype) != mine:
            raise CheckpointError(
                f"{self.folder / name} holds other values than this memory: of another network, number of"
                " slots or memory.value_dtype.",
                hint="Open it with the configuration the run was started with.",
            )
        opened = {
            number: Segment(self.folder / name / file, self.size, room=0, used=used, new=False)
            for number, (file, used) in found.segments.items()
        }
        for number in list(self._segments):
            self._let_go(number)
        # The next version is made anew: this one may belong to somebody else.
        self._segments, self._active, self._name = opened, None, None
        self._next = max(opened, default=-1) + 1
        self._places, self._sums = found.places, found.sums
        self._count(self._places, 1)

    @classmethod
    def opened(cls, folder: Path, name: str, *, owner: str | None = "") -> "FileRows":
        """Open a version as the values of a memory."""
        found = versions.read(folder, name)
        made = cls(folder, len(found.places), found.layout, found.dtype, owner=owner)
        made.restore(name)
        return made


def described(layout: Layout, dtype: torch.dtype) -> str:
    """Say in words what a row holds."""
    numbers = f"{layout.numbers:,} numbers in {len(layout.shapes)} tensors"
    return f"{numbers} of {str(dtype).removeprefix('torch.')}"


def rows_per_file(capacity: int, size: int) -> int:
    """Return how many rows of ``size`` bytes a segment holds."""
    return max(1, min(capacity, max(SMALLEST // stride_of(size), -(-capacity // MOST_FILES))))


def sweep(folder: Path) -> None:
    """Delete what processes of this machine that are no more left in a folder of values."""
    if os.name != "posix" or not folder.is_dir():
        return
    for place in folder.iterdir():
        found = _LIVE.fullmatch(place.name)
        if found and found[1] == (platform.node() or "host") and not _is_alive(int(found[2])):
            shutil.rmtree(place, ignore_errors=True)


def check_folder(folder: Path, needed: int, *, option: str = "memory.values_dir") -> None:
    """Refuse a folder that values cannot be written to, or whose disk is too small, before they are.

    Raises:
        ResourceError: It is missing, read-only or too small.
    """
    hint = f"Name another folder ({option}), or fewer slots."
    if not folder.is_dir():
        raise ResourceError(f"{option}: there is no folder {folder}.", hint="Make it.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ResourceError(f"{option}: {folder} may not be written.", hint=hint)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"{option}: the values take {needed:,} bytes, {folder} has {free:,} free.",
            hint=hint,
        )


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _vanish(folder: Path, maker: int) -> None:
    """Delete the folder of a process; a child that was forked from it leaves it alone."""
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)
