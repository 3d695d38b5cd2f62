"""Versions of values in files: a folder of hard links, so that what did not change is not copied.

``version-<name>/`` holds ``version.json`` (sealed by its own SHA-256), ``slots.bin`` (which row each slot
has, and its checksum), and a link to every segment that has one of these rows. Segments only grow. A version
that is deleted takes its links away, and the system frees what no other version links.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray

from torchemo.core.errors import CheckpointError
from torchemo.memory.scale.rows import Layout
from torchemo.memory.scale.segment import Segment, no_room

PREFIX, INDEX, SLOTS = "version-", "version.json", "slots.bin"
_DIGITS = 12
DIGEST_ENDS = len(PREFIX) + _DIGITS
"""Where the digest of the contents ends in the name of a version."""
_FORMAT = 1
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float64)}


@final
@dataclass(frozen=True)
class Version:
    """What is known of the values of all slots at a moment.

    Attributes:
        layout: What a row holds.
        dtype: How its numbers are kept.
        places: Segment and row of each slot as one number; -1 without a value.
        sums: CRC-32 of each row.
        segments: Number of a segment -> its file and how many rows it had.
    """

    layout: Layout
    dtype: torch.dtype
    places: NDArray[np.int64]
    sums: NDArray[np.uint32]
    segments: Mapping[int, tuple[str, int]]

    @property
    def digest(self) -> str:
        """A digest of the contents, wherever the rows lie."""
        about = json.dumps([_plain(self.layout), str(self.dtype)])
        held = self.places >= 0
        digest = hashlib.sha256(about.encode())
        digest.update(held.data)
        digest.update(np.where(held, self.sums, np.uint32(0)).data)
        return digest.hexdigest()


def publish(folder: Path, version: Version, segments: Mapping[int, Segment], *, owner: str) -> str:
    """Keep a version; return its name. It is there as a whole or not at all.

    Args:
        folder: Where versions are.
        version: The version.
        segments: Its segments, whose rows are on the disk.
        owner: Whose it is, see `collect`.
    """
    name = f"{contents_name(version)}-{uuid4().hex[:12]}"
    temporary = folder / f".tmp-{name}"
    data = (
        version.places.astype("<i8", copy=False).data,
        version.sums.astype("<u4", copy=False).data,
    )
    body = {
        "format": _FORMAT,
        "owner": owner,
        "capacity": len(version.places),
        "dtype": str(version.dtype).removeprefix("torch."),
        "shapes": _plain(version.layout),
        "segments": {str(n): [file, used] for n, (file, used) in version.segments.items()},
        "slots": _digest(*data),
    }
    try:
        temporary.mkdir()
        for number, (file, _) in version.segments.items():
            link(segments[number].path, temporary / file)
        _write(temporary / SLOTS, *data)
        _write(temporary / INDEX, _sealed(body))
        _sync(temporary)
        temporary.rename(folder / name)
        _sync(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise no_room(folder, sum(part.nbytes for part in data), error) from error
    return name


def contents_name(version: Version) -> str:
    """Return how the names of all versions with these contents begin."""
    return PREFIX + version.digest[:_DIGITS]


def read(folder: Path, name: str) -> Version:
    """Read a version, with distrust.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    place = folder / name
    if not name.startswith(PREFIX) or Path(name).name != name or not place.is_dir():
        raise CheckpointError(
            f"the values of this checkpoint are not in {folder}: it has no {name!r:.80}.",
            hint="Put the folder back, or say where it is now with memory.values_dir in config.toml.",
        )
    body = _body(place)
    try:
        capacity, dtype = int(body["capacity"]), _DTYPES[body["dtype"]]
        layout = Layout({n: torch.Size(shape) for n, shape in body["shapes"].items()})
        segments = {int(n): (str(file), int(used)) for n, (file, used) in body["segments"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(place / INDEX) from error
    data = _bytes(place / SLOTS)
    if len(data) != 12 * capacity or hashlib.sha256(data).hexdigest() != body.get("slots"):
        raise damaged(place / SLOTS)
    places = np.frombuffer(data, "<i8", capacity).astype(np.int64)
    sums = np.frombuffer(data, "<u4", capacity, 8 * capacity).astype(np.uint32)
    known = np.array([-1, *segments])
    if any(Path(file).name != file for file, _ in segments.values()) or not bool(
        np.isin(places >> 32, known).all()
    ):
        raise damaged(place / INDEX)
    return Version(layout, dtype, places, sums, segments)


def collect(folder: Path, owner: str, *, keep: set[str]) -> list[str]:
    """Delete the versions of an owner that nobody names any more; return their names."""
    gone = []
    for place in sorted(folder.glob(f"{PREFIX}*")) if owner else ():
        with contextlib.suppress(CheckpointError):  # what is damaged is left for people to see
            if place.name not in keep and _body(place).get("owner") == owner:
                # It loses its name before it loses its first file.
                trash = place.with_name(f".tmp-{place.name}")
                place.rename(trash)
                shutil.rmtree(trash, ignore_errors=True)
                gone.append(place.name)
    return gone


def link(source: Path, target: Path) -> None:
    """Give a file a second name; where a disk or a system has no links, copy it."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except (OSError, AttributeError):
        shutil.copyfile(source, target)


def damaged(path: Path) -> CheckpointError:
    """Say that a file of a version is damaged."""
    return CheckpointError(
        f"{path} is damaged: its content does not match its checksum.",
        hint="Put the file back, or go back to another checkpoint of the run.",
    )


def _plain(layout: Layout) -> dict[str, list[int]]:
    return {name: list(shape) for name, shape in layout.shapes.items()}


def _sealed(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": body}).encode()


def _body(place: Path) -> dict[str, Any]:
    try:
        found = json.loads(_bytes(place / INDEX))
        body: dict[str, Any] = found["body"]
        sound = hashlib.sha256(json.dumps(body).encode()).hexdigest() == found["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(place / INDEX) from error
    if not sound or body.get("format") != _FORMAT:
        raise damaged(place / INDEX)
    return body


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def _digest(*parts: memoryview) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _write(path: Path, *parts: bytes | memoryview) -> None:
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Force the names inside a folder to the disk, where a system opens folders."""
    if os.name != "nt":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
