"""NumPy archives (``.npz``) of images, labels and what is known of each class."""

import math
import zipfile
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchemo.core.errors import DataError, ResourceError, TorchemoError
from torchemo.core.machine import physical_memory
from torchemo.data.formats.archive import Caps, open_zip
from torchemo.data.listing import SPLIT_FOLDERS, ListedClass, Picture

MAX_CLASSES = 1 << 17
"""Classes of one archive at most: names are made for all of them before a label is used."""

_CAPS = Caps(members=1000, member_bytes=1 << 36)
_NAMES = ("class_names", "class_name", "class_alphabet", "class_character")
_WANTED = frozenset(("images", "label", "labels", *_NAMES, "class_split", "class_domain"))
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_SPLIT_NAMES = {**SPLIT_FOLDERS, "background": "train", "evaluation": "test"}


def list_npz(path: Path, *, domain: str) -> tuple[ListedClass, ...]:
    """List the classes of an archive of arrays.

    Arrays: ``images`` uint8 ``[n, h, w]``, ``[n, h, w, c]`` or ``[n, c, h, w]``; ``label`` integers
    ``[n]``; and for each class, as far as known, ``class_names`` (or ``class_name``, or ``class_alphabet``
    and ``class_character``), ``class_split`` and ``class_domain``. Arrays of python objects are refused.
    """
    arrays = read_arrays(path, wanted=_WANTED)
    images, label = _need(arrays, "images", path=path), _need(arrays, "label", "labels", path=path)
    label, n_unnamed = _checked_labels(images, label, path=path)
    images = channels_last(images)
    names = _names(arrays, n_unnamed, path=path)
    if n_unnamed > len(names):
        raise DataError(f"{path}: has label {n_unnamed - 1}, but only {len(names)} class names.")
    domains = _per_class(arrays, "class_domain", len(names), path=path) or [domain] * len(names)
    splits = _splits(arrays, len(names), path=path)
    order = np.argsort(label, kind="stable")
    groups = np.split(order, np.searchsorted(label[order], np.arange(1, len(names))))
    return tuple(
        ListedClass(name, rows_as_pictures(images, rows, name=path.name), split, own)
        for name, rows, split, own in zip(names, groups, splits, domains, strict=True)
    )


def _checked_labels(
    images: NDArray[Any], label: NDArray[Any], *, path: Path
) -> tuple[NDArray[np.int64], int]:
    """Return the labels, and how many classes they count; nothing is built before that is bounded."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise DataError(
            f"{path}: images should be uint8 of shape [n, h, w] or [n, h, w, c],"
            f" got {images.dtype} of shape {list(images.shape)}."
        )
    if not np.issubdtype(label.dtype, np.integer) or label.shape != images.shape[:1]:
        raise DataError(
            f"{path}: label should be integers of shape {list(images.shape[:1])},"
            f" got {label.dtype} of shape {list(label.shape)}."
        )
    if label.size == 0 or label.min() < 0:
        raise DataError(f"{path}: there are no images, or a label is negative.")
    largest = int(label.max())
    if largest >= MAX_CLASSES:
        raise DataError(
            f"{path}: has label {largest}; labels count classes from 0, of which there may be"
            f" {MAX_CLASSES}.",
            hint="Number the classes 0, 1, 2 and so on.",
        )
    return label.astype(np.int64), largest + 1


def read_arrays(path: Path, *, wanted: Collection[str]) -> dict[str, NDArray[Any]]:
    """Read the wanted arrays of an ``.npz``, as far as it has them; nothing in it is executed.

    An array is read only if its header fits the size of its member, and if memory holds all of them.
    """
    archive, members = open_zip(path, caps=_CAPS)
    chosen = [m for m in members if m.filename.removesuffix(".npy") in wanted]
    try:
        _require_memory(chosen, path=path)
        return {m.filename.removesuffix(".npy"): _read_array(archive, m) for m in chosen}
    except TorchemoError:
        raise
    except Exception as error:
        # A hostile header may raise anything; whatever it is, this file caused it. NumPy goes on to say how
        # to turn its checks off.
        why = str(error).split("\n")[0]
        raise DataError(
            f"{path}: refused, its arrays cannot be read ({why}).",
            hint="Arrays of python objects may hide code and are never loaded.",
        ) from error
    finally:
        archive.close()


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """Read one member; its header decides what is allocated, so it is checked first."""
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            raise ValueError(f"{member.filename!r} has version {version}")
        shape, _, dtype = _HEADERS[version](stream)
        if dtype.kind not in "biufSU" or dtype.itemsize == 0:
            raise ValueError(f"{member.filename!r} holds {dtype}, not plain numbers or strings")
        needed = stream.tell() + math.prod(shape) * dtype.itemsize
        if needed != member.file_size:
            raise ValueError(
                f"{member.filename!r} has {member.file_size} bytes, should have {needed}"
            )
    with archive.open(member) as stream:
        array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
    return array


def _require_memory(members: Iterable[zipfile.ZipInfo], *, path: Path) -> None:
    needed, machine = sum(member.file_size for member in members), physical_memory()
    if machine is not None and needed > machine:
        raise ResourceError(
            f"{path}: unpacks to {needed} bytes, this machine has {machine} bytes of memory.",
            hint="Cut the set into several files, or use a folder of images.",
        )


def channels_last(images: NDArray[Any]) -> NDArray[Any]:
    """Return images as ``[n, h, w]`` or ``[n, h, w, c]``, whichever way they were stored."""
    if images.ndim == 4 and images.shape[3] not in (1, 3):
        return images.transpose(0, 2, 3, 1)
    return images


def rows_as_pictures(
    images: NDArray[Any], rows: NDArray[np.int64], *, name: str
) -> tuple[Picture, ...]:
    """Treat rows of an array of images as images."""
    return tuple(Picture(f"{name}[{row}]", partial(images.__getitem__, int(row))) for row in rows)


def _need(arrays: Mapping[str, NDArray[Any]], *names: str, path: Path) -> NDArray[Any]:
    for name in names:
        if name in arrays:
            return arrays[name]
    archive, members = open_zip(path, caps=_CAPS)
    archive.close()
    known = ", ".join(sorted(repr(m.filename.removesuffix(".npy")) for m in members)[:20])
    raise DataError(
        f"{path}: has no array {names[0]!r}, only {known or 'nothing'}.",
        hint="Expected images uint8 [n, h, w, c] and label integers [n].",
    )


def _names(arrays: Mapping[str, NDArray[Any]], n_classes: int, *, path: Path) -> list[str]:
    for key in _NAMES[:2]:
        if key in arrays:
            return _texts(arrays, key, path=path)
    if all(key in arrays for key in _NAMES[2:]):
        alphabets, characters = (_texts(arrays, key, path=path) for key in _NAMES[2:])
        if len(alphabets) != len(characters):
            raise DataError(
                f"{path}: class_alphabet has {len(alphabets)} entries, class_character"
                f" {len(characters)}."
            )
        pairs = zip(alphabets, characters, strict=True)
        return [f"{alphabet}/{character}" for alphabet, character in pairs]
    return [f"class {c:04d}" for c in range(n_classes)]


def _texts(arrays: Mapping[str, NDArray[Any]], key: str, *, path: Path) -> list[str]:
    """Return one text per class."""
    array = arrays[key]
    if array.ndim != 1 or len(array) > MAX_CLASSES:
        raise DataError(
            f"{path}: {key} should have shape [classes], {MAX_CLASSES} at most,"
            f" got {list(array.shape)}."
        )
    return [str(value) for value in array]


def _per_class(
    arrays: Mapping[str, NDArray[Any]], key: str, n_classes: int, *, path: Path
) -> list[str] | None:
    if key not in arrays:
        return None
    values = _texts(arrays, key, path=path)
    if len(values) != n_classes:
        raise DataError(f"{path}: {key} has {len(values)} entries for {n_classes} classes.")
    return values


def _splits(arrays: Mapping[str, NDArray[Any]], n_classes: int, *, path: Path) -> list[str | None]:
    values = _per_class(arrays, "class_split", n_classes, path=path)
    if values is None:
        return [None] * n_classes
    unknown = [value for value in values if value not in _SPLIT_NAMES]
    if unknown:
        raise DataError(
            f"{path}: class_split holds {unknown[0]!r}.",
            hint=f"Known are {', '.join(_SPLIT_NAMES)}.",
        )
    return [_SPLIT_NAMES[value] for value in values]
