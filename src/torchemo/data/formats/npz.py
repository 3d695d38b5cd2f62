"""NumPy archives (``.npz``) of images, labels and what is known of each class."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchemo.core.errors import DataError
from torchemo.data.formats.archive import Caps, open_zip
from torchemo.data.listing import SPLIT_FOLDERS, ListedClass, Picture

_CAPS = Caps(members=1000, member_bytes=1 << 36)
_SPLIT_NAMES = {**SPLIT_FOLDERS, "background": "train", "evaluation": "test"}


def list_npz(path: Path, *, domain: str) -> tuple[ListedClass, ...]:
    """List the classes of an archive of arrays.

    Arrays: ``images`` uint8 ``[n, h, w]``, ``[n, h, w, c]`` or ``[n, c, h, w]``; ``label`` integers
    ``[n]``; and for each class, as far as known, ``class_names`` (or ``class_name``, or ``class_alphabet``
    and ``class_character``), ``class_split`` and ``class_domain``. Arrays of python objects are refused.
    """
    arrays = read_arrays(path)
    images, label = _need(arrays, "images", path=path), _need(arrays, "label", "labels", path=path)
    if not np.issubdtype(label.dtype, np.integer) or label.shape != images.shape[:1]:
        raise DataError(
            f"{path}: label should be integers of shape {list(images.shape[:1])},"
            f" got {label.dtype} of shape {list(label.shape)}."
        )
    if label.size == 0 or label.min() < 0:
        raise DataError(f"{path}: there are no images, or a label is negative.")
    images = channels_last(images)
    names = _names(arrays, int(label.max()) + 1)
    if label.max() >= len(names):
        raise DataError(f"{path}: has label {label.max()}, but only {len(names)} class names.")
    domains = _per_class(arrays, "class_domain", len(names), path=path) or [domain] * len(names)
    splits = _splits(arrays, len(names), path=path)
    order = np.argsort(label, kind="stable")
    groups = np.split(order, np.searchsorted(label[order], np.arange(1, len(names))))
    return tuple(
        ListedClass(name, rows_as_pictures(images, rows, name=path.name), split, own)
        for name, rows, split, own in zip(names, groups, splits, domains, strict=True)
    )


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read every array of an ``.npz``; nothing in it is executed."""
    open_zip(path, caps=_CAPS)[0].close()
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except Exception as error:
        # A hostile header may raise anything; whatever it is, this file caused it.
        raise DataError(
            f"{path}: refused, its arrays cannot be read ({error}).",
            hint="Arrays of python objects may hide code and are never loaded.",
        ) from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise DataError(f"{path}: refused, its member {name!r} is no array.")
    return arrays


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
    raise DataError(
        f"{path}: has no array {names[0]!r}, only {sorted(arrays)}.",
        hint="Expected images uint8 [n, h, w, c] and label integers [n].",
    )


def _names(arrays: Mapping[str, NDArray[Any]], n_classes: int) -> list[str]:
    for key in ("class_names", "class_name"):
        if key in arrays:
            return [str(name) for name in arrays[key]]
    if "class_alphabet" in arrays and "class_character" in arrays:
        pairs = zip(arrays["class_alphabet"], arrays["class_character"], strict=True)
        return [f"{alphabet}/{character}" for alphabet, character in pairs]
    return [f"class {c:04d}" for c in range(n_classes)]


def _per_class(
    arrays: Mapping[str, NDArray[Any]], key: str, n_classes: int, *, path: Path
) -> list[str] | None:
    if key not in arrays:
        return None
    values = [str(value) for value in arrays[key]]
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
