"""Published few-shot sets that come as arrays: pickles and ``.npz`` files by split.

Every reader returns None where a folder is not of its layout. Labels of these sets count anew in every file,
so classes without a name of their own are called by split and number.
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchemo.core.errors import DataError
from torchemo.data.formats.npz import channels_last, read_arrays, rows_as_pictures
from torchemo.data.formats.pickles import read_pickle
from torchemo.data.listing import SPLIT_FOLDERS, ListedClass, Listing, Picture

_MAX_TEXT = 1 << 28
"""Characters of a list of labels at most, each counted as long as the longest."""
_CACHE_FILE = re.compile(r"mini-imagenet-cache-(train|val|validation|test)\.pkl")
_SPLIT_FILE = re.compile(
    r"(?P<set>.+?)_(?P<split>train_phase_train|train|val|validation|test)\.(pickle|pkl)",
    re.IGNORECASE,
)


def mini_imagenet_cache(root: Path, domain: str) -> Listing | None:
    """Read ``mini-imagenet-cache-{train,val,test}.pkl``: ``image_data`` and rows by class."""
    files = _matching(root, _CACHE_FILE)
    if not files:
        return None
    classes = []
    for match, path in files:
        content = _dict_with(read_pickle(path), ("image_data", "class_dict"), path=path)
        images = channels_last(_pictures_array(content["image_data"], path=path))
        by_name = {str(k): v for k, v in _dict_with(content["class_dict"], (), path=path).items()}
        for name, rows in sorted(by_name.items()):
            pictures = rows_as_pictures(images, _rows(rows, len(images), path=path), name=path.name)
            classes.append(ListedClass(name, pictures, SPLIT_FOLDERS[match[1]], domain))
    return Listing(tuple(classes), "miniImageNet cache")


def split_pickles(root: Path, domain: str) -> Listing | None:
    """Read ``<set>_{train,val,test}.pickle`` (miniImageNet, CIFAR-FS, FC100): ``data`` and ``labels``.

    Choice: of the base classes' three files in the miniImageNet release of Gidaris and Komodakis only
    ``train_phase_train`` is taken; the other two are further images of the same classes.
    """
    files = _matching(root, _SPLIT_FILE)
    files = [
        (m, p) for m, p in files if not m["set"].lower().endswith(("_phase", "_images", "_labels"))
    ]
    if not files:
        return None
    sets = {match["set"].lower() for match, _ in files}
    if len(sets) > 1:
        raise DataError(
            f"{root}: holds several sets of images: {', '.join(sorted(sets))}.",
            hint="Put the files of each set into a folder of its own.",
        )
    classes: list[ListedClass] = []
    for match, path in files:
        content = _dict_with(read_pickle(path), ("data", "labels"), path=path)
        images = channels_last(_pictures_array(content["data"], path=path))
        split = SPLIT_FOLDERS[match["split"].lower().removesuffix("_phase_train")]
        classes += _by_label(images, content["labels"], split=split, domain=domain, path=path)
    return Listing(tuple(classes), f"{files[0][0]['set']} pickles")


def tiered_imagenet(root: Path, domain: str) -> Listing | None:
    """Read ``{train,val,test}_images_png.pkl`` or ``_images.npz``, with ``_labels.pkl``."""
    classes: list[ListedClass] = []
    for split in ("train", "val", "test"):
        encoded, arrays = root / f"{split}_images_png.pkl", root / f"{split}_images.npz"
        labels = root / f"{split}_labels.pkl"
        if not labels.is_file() or not (encoded.is_file() or arrays.is_file()):
            continue
        numbers, names = _labels_and_names(read_pickle(labels))
        path = arrays if arrays.is_file() else encoded
        images = _tiered_pictures(path)
        classes += _by_label(images, numbers, split=split, domain=domain, path=path, names=names)
    return Listing(tuple(classes), "tieredImageNet") if classes else None


def _tiered_pictures(path: Path) -> Sequence[Any] | NDArray[Any]:
    if path.suffix == ".npz":
        return channels_last(
            _dict_with(read_arrays(path, wanted=("images",)), ("images",), path=path)["images"]
        )
    files = read_pickle(path)
    if not isinstance(files, list):
        raise DataError(f"{path}: should hold a list of PNG files, holds {type(files).__name__}.")
    return files


def _matching(root: Path, pattern: re.Pattern[str]) -> list[tuple[re.Match[str], Path]]:
    paths = sorted(path for path in root.iterdir() if path.is_file())
    return [(match, path) for path in paths if (match := pattern.fullmatch(path.name))]


def _dict_with(content: Any, keys: Sequence[str], *, path: Path) -> dict[str, Any]:
    if not isinstance(content, dict) or any(key not in content for key in keys):
        names = sorted(str(key)[:40] for key in content)[:20] if isinstance(content, dict) else []
        found = names if isinstance(content, dict) else type(content).__name__
        raise DataError(f"{path}: should hold a dict of {' and '.join(keys)}, holds {found}.")
    return content


def _pictures_array(value: Any, *, path: Path) -> NDArray[Any]:
    images = _array(value, path=path)
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise DataError(
            f"{path}: images should be uint8 [n, h, w, c],"
            f" got {images.dtype} of shape {list(images.shape)}."
        )
    return images


def _array(value: Any, *, path: Path) -> NDArray[Any]:
    # NumPy gives every entry the room of the longest string.
    count, longest = _extent(value)
    if count * longest > _MAX_TEXT:
        raise DataError(f"{path}: has {count} labels, one of them of {longest} characters.")
    try:
        return np.asarray(value)
    except ValueError as error:
        raise DataError(f"{path}: its images or labels are not of one shape.") from error


def _extent(value: Any) -> tuple[int, int]:
    """Count the entries of nested lists, and the characters of the longest one (1 for numbers)."""
    if isinstance(value, (list, tuple)):
        parts = [_extent(part) for part in value]
        return sum(count for count, _ in parts), max((most for _, most in parts), default=1)
    return 1, max(1, len(value)) if isinstance(value, (str, bytes)) else 1


def _rows(rows: Any, total: int, *, path: Path) -> NDArray[np.int64]:
    numbers = _array(rows, path=path)
    if numbers.size and (
        not np.issubdtype(numbers.dtype, np.integer)
        or numbers.ndim != 1
        or numbers.min() < 0
        or numbers.max() >= total
    ):
        raise DataError(f"{path}: a class lists images that are not there.")
    return numbers.astype(np.int64)


def _labels_and_names(content: Any) -> tuple[Any, Any]:
    """Find the fine labels, and the names they stand for where the file has them."""
    if not isinstance(content, dict):
        return content, None
    for key in ("label_specific", "labels", "label"):
        if key in content:
            return content[key], content.get(f"{key}_str")
    return (), None


def _by_label(
    images: Sequence[Any] | NDArray[Any],
    labels: Any,
    *,
    split: str,
    domain: str,
    path: Path,
    names: Any = None,
) -> list[ListedClass]:
    """Sort images into classes by their label."""
    numbers = _array(labels, path=path)
    if numbers.ndim != 1 or len(numbers) != len(images) or numbers.dtype.kind not in "iuSU":
        raise DataError(
            f"{path}: has {len(images)} images, but labels {numbers.dtype} of shape"
            f" {list(numbers.shape)}."
        )
    classes = []
    for label in np.unique(numbers):
        rows = (numbers == label).nonzero()[0]
        pictures = [
            Picture(f"{path.name}[{row}]", partial(_encoded, images, int(row))) for row in rows
        ]
        classes.append(ListedClass(_name(label, names, split, path), pictures, split, domain))
    return classes


def _name(label: Any, names: Any, split: str, path: Path) -> str:
    if np.issubdtype(type(label), np.character):
        return label.decode("latin1") if isinstance(label, bytes) else str(label)
    if not isinstance(names, (list, tuple, np.ndarray)):
        return f"{split} {int(label):04d}"
    if not 0 <= int(label) < len(names):
        raise DataError(f"{path}: has label {int(label)}, but only {len(names)} class names.")
    return str(names[int(label)])


def _encoded(images: Sequence[Any] | NDArray[Any], row: int) -> bytes | NDArray[Any]:
    """Return an image of an array, or the bytes of one that was stored as a file in memory."""
    picture = images[row]
    if isinstance(picture, bytes):
        return picture
    if not isinstance(picture, np.ndarray):
        raise DataError(f"image {row} is stored as {type(picture).__name__}.")
    return picture if isinstance(images, np.ndarray) else picture.tobytes()
