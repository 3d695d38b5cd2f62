"""Packed image sets: every image decoded once, in one memory-mapped file with checksums.

A packed set is a folder of ``images.npy`` (uint8 ``[n, C, H, W]``, sorted by class) and ``index.json``
(classes, splits, domains, SHA-256 of both files). It appears under its name only when it is complete.
A set of features (`torchemo.data.features`) has ``features.npy`` (float32 ``[n, d]``) instead.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchemo.core.errors import DataError, ResourceError
from torchemo.core.locks import locked
from torchemo.data.formats.images import PictureForm, Resample
from torchemo.data.index import ClassIndex
from torchemo.data.listing import (
    BadPicture,
    Listing,
    Progress,
    bad_picture,
    decode_all,
    form_for,
)

FORMAT = "torchemo-packed"
VERSION = 2
"""1 holds images, 2 features."""

_IMAGES, _INDEX = "images.npy", "index.json"
FEATURES = "features.npy"
_MAX_INDEX_BYTES = 1 << 28


class PackReport(NamedTuple):
    """What was packed: where, how many images and classes, and which images were left out."""

    path: Path
    images: int
    classes: int
    skipped: tuple[BadPicture, ...]


class _Index(NamedTuple):
    shape: tuple[int, ...]
    names: list[str]
    splits: list[str]
    domains: list[str]
    counts: list[int]
    file: str
    size: int
    sha256: str
    network: dict[str, Any] | None
    skipped: tuple[BadPicture, ...]


def pack(
    listing: Listing,
    out: Path | str,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    resample: Resample = "lanczos",
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> PackReport:
    """Decode listed images once into a packed set.

    The set is written beside its final place, read back, and published by renaming: after a crash it is
    there in full or not at all.

    Args:
        listing: What to pack; see `torchemo.data.load.find`.
        out: The folder to make; it must not exist.
        image_size: As in `torchemo.data.load.load`.
        channels: As there.
        resample: As there.
        skip_bad: Leave out images that cannot be read, and name them in the report.
        progress: Called with (images done, images in all).
    """
    out = Path(out)
    form = form_for(listing, image_size=image_size, channels=channels, resample=resample)
    check_place(out, listing.total * form.channels * form.height * form.width)
    with _published(out) as folder:
        counts, skipped = _write_images(
            folder / _IMAGES, listing, form, skip_bad=skip_bad, progress=progress
        )
        shape = [sum(counts), form.channels, form.height, form.width]
        about = {"version": 1, "resample": form.resample, "shape": shape}
        write_index(folder, listing, counts, skipped, about=about)
        open_packed(folder)
    return PackReport(out, sum(counts), len(counts), skipped)


def is_packed(path: Path) -> bool:
    """Say whether a folder is a packed set, or what is left of one."""
    index = path / _INDEX
    if not index.is_file():
        return _has_rows(path)
    with index.open("rb") as stream:
        return FORMAT.encode() in stream.read(1024) or _has_rows(path)


def _has_rows(path: Path) -> bool:
    return any((path / name).is_file() for name in (_IMAGES, FEATURES))


def made_by(path: Path | str) -> dict[str, Any] | None:
    """Return the network that made the features of a packed set, None for one of images."""
    return _read_index(Path(path)).network


def skipped_in(path: Path | str) -> tuple[BadPicture, ...]:
    """Return the images that were left out when a set was packed."""
    return _read_index(Path(path)).skipped


def open_packed(path: Path | str, *, verify: bool = True) -> ClassIndex:
    """Open a packed set as a memory map."""
    path = Path(path)
    index = _read_index(path)
    file, dtype = path / index.file, np.dtype(np.uint8 if index.file == _IMAGES else np.float32)
    _check_file(file, index.size, index.sha256 if verify else None)
    try:
        images = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be mapped ({error}).") from error
    if images.shape != index.shape or images.dtype != dtype:
        raise DataError(
            f"{file}: should be {dtype} of shape {list(index.shape)},"
            f" got {images.dtype} of shape {list(images.shape)}."
        )
    label = np.repeat(np.arange(len(index.counts)), index.counts)
    return ClassIndex(images, label, index.names, index.splits, index.domains)


def check_place(out: Path, size: int) -> None:
    """Refuse a place that is taken, or where ``size`` bytes do not fit."""
    if out.exists() or out.is_symlink():
        raise DataError(f"{out}: exists already.", hint="Choose another name, or remove it first.")
    if not out.parent.is_dir():
        raise DataError(f"{out.parent}: is no folder.", hint="Make it first.")
    free = shutil.disk_usage(out.parent).free
    if free < size:
        raise ResourceError(
            f"{out}: needs {size} bytes, the disk has {free} left.",
            hint="Free some space, pack elsewhere, or choose a smaller --image-size.",
        )


@contextlib.contextmanager
def _published(out: Path) -> Iterator[Path]:
    """Give a folder to write into; rename it to its final name when all went well."""
    folder = out.parent / f".tmp-{out.name}-{uuid.uuid4().hex[:8]}"
    try:
        with writing(out), locked(_lock_of(folder)):
            _sweep(out)
            folder.mkdir()
            yield folder
            sync_folder(folder)
            folder.rename(out)
            sync_folder(out.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _lock_of(folder).unlink(missing_ok=True)


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn errors of the system while a set is written into errors for people."""
    try:
        yield
    except OSError as error:
        kind = (
            ResourceError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else DataError
        )
        raise kind(
            f"{out}: cannot be written ({error.strerror}).",
            hint="Free some space or pack elsewhere.",
        ) from error


def _sweep(out: Path) -> None:
    """Delete what a killed process left of the same set; what a living one is writing is claimed."""
    name = re.compile(re.escape(f".tmp-{out.name}-") + "[0-9a-f]{8}")
    for folder in [path for path in out.parent.iterdir() if name.fullmatch(path.name)]:
        if folder.is_symlink() or not folder.is_dir():
            continue
        with locked(_lock_of(folder)) as mine:
            if mine:
                shutil.rmtree(folder, ignore_errors=True)
        if mine:
            _lock_of(folder).unlink(missing_ok=True)


def _lock_of(folder: Path) -> Path:
    """Return the lock that whoever writes an unfinished folder holds."""
    return folder.with_name(f"{folder.name}.lock")


def _write_images(
    path: Path, listing: Listing, form: PictureForm, *, skip_bad: bool, progress: Progress | None
) -> tuple[list[int], tuple[BadPicture, ...]]:
    counts, skipped = [0] * len(listing.classes), []
    with path.open("wb") as stream:
        shape = (form.channels, form.height, form.width)
        stream.write(header(0, shape, "|u1"))
        for number, picture, pixels in decode_all(listing, form, progress=progress):
            if isinstance(pixels, DataError):
                if not skip_bad:
                    raise pixels
                skipped.append(bad_picture(picture, pixels))
                continue
            stream.write(pixels.data)
            counts[number] += 1
        stream.seek(0)
        stream.write(header(sum(counts), shape, "|u1"))
        sync(stream)
    return counts, tuple(skipped)


def header(rows: int, shape: tuple[int, ...], kind: str) -> bytes:
    """Return the header of an npy file; NumPy pads it so that its length does not depend on ``rows``."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        stream, {"descr": kind, "fortran_order": False, "shape": (rows, *shape)}
    )
    return stream.getvalue()


def write_index(
    folder: Path,
    listing: Listing,
    counts: list[int],
    skipped: Sequence[BadPicture],
    *,
    about: dict[str, Any],
    file: str = _IMAGES,
) -> None:
    """Describe the rows in ``file``, sorted by class; ``about`` is what else is worth knowing."""
    rows = folder / file
    content = {
        "format": FORMAT,
        **about,
        "layout": listing.layout,
        "classes": [
            {"name": c.name, "split": c.split, "domain": c.domain, "images": n}
            for c, n in zip(listing.classes, counts, strict=True)
        ],
        "skipped": [bad._asdict() for bad in skipped],
        "files": {file: {"bytes": rows.stat().st_size, "sha256": _sha256(rows)}},
    }
    with (folder / _INDEX).open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(content | {"sha256": _content_sha256(content)}, indent=1))
        sync(stream)


def _read_index(path: Path) -> _Index:
    file = path / _INDEX
    try:
        if file.stat().st_size > _MAX_INDEX_BYTES:
            raise DataError(f"{file}: is too large to be the index of a packed set.")
        content = json.loads(file.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read ({error}).") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{file}: is not the index of a packed set.")
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise DataError(
            f"{file}: has format version {version}, this is {VERSION}.", hint="Upgrade torchemo."
        )
    said = content.pop("sha256", None)
    if said != _content_sha256(content):
        raise DataError(
            f"{file}: is damaged, its checksum does not fit.", hint="Pack the data again."
        )
    return _parse(content, file)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _parse(content: dict[str, Any], file: Path) -> _Index:
    """Take what is needed from an index that may have been made by hand."""
    try:
        classes = content["classes"]
        ((name, stored),) = content["files"].items()
        index = _Index(
            tuple(int(n) for n in content["shape"]),
            [str(c["name"]) for c in classes],
            [str(c["split"]) for c in classes],
            [str(c["domain"]) for c in classes],
            [int(c["images"]) for c in classes],
            {_IMAGES: _IMAGES, FEATURES: FEATURES}[name],  # no other file is ever opened
            int(stored["bytes"]),
            str(stored["sha256"]),
            content.get("network"),
            tuple(BadPicture(str(b["name"]), str(b["reason"])) for b in content.get("skipped", ())),
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DataError(f"{file}: its entry {error} is missing or garbled.") from error
    if min(index.counts, default=-1) < 0 or (sum(index.counts),) != index.shape[:1]:
        raise DataError(f"{file}: its classes do not add up to its images.")
    return index


def _check_file(file: Path, size: int, digest: str | None) -> None:
    found = file.stat().st_size if file.is_file() else 0
    if found != size:
        raise DataError(
            f"{file}: is damaged (size {found}, expected {size}).", hint="Pack the data again."
        )
    if digest is not None and _sha256(file) != digest:
        raise DataError(
            f"{file}: is damaged, its checksum does not fit.", hint="Pack the data again."
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _content_sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sync(stream: Any) -> None:
    """Bring what was written to a file to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    if os.name == "nt":  # Windows opens no folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
