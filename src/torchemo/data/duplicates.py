"""Images that are there twice: found by their pixels, counted by split, and dropped but for one."""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchemo.core.errors import DataError
from torchemo.data.index import ClassIndex

KEPT_FIRST = ("test", "val", "train")
"""Of copies in several splits the one that training does not see stays: test tasks keep their images."""


class Copies(NamedTuple):
    """Places of the same pixels, the one to keep first."""

    places: tuple[int, ...]
    across_splits: bool


def digest(pixels: NDArray[np.uint8]) -> bytes:
    """Return a digest of an image; equal for equal pixels."""
    return hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=16).digest()


def copies(digests: Iterable[bytes], splits: Iterable[str]) -> list[Copies]:
    """Group the places of equal images.

    Args:
        digests: Of each image.
        splits: Of each image.

    Example:
        >>> copies([b"a", b"b", b"a"], ["train", "train", "test"])
        [Copies(places=(2, 0), across_splits=True)]
    """
    held: dict[bytes, list[tuple[int, int]]] = {}
    for place, (one, split) in enumerate(zip(digests, splits, strict=True)):
        held.setdefault(one, []).append((KEPT_FIRST.index(split), place))
    return [
        Copies(tuple(place for _, place in sorted(same)), len({split for split, _ in same}) > 1)
        for same in held.values()
        if len(same) > 1
    ]


def refuse_leaks(index: ClassIndex, *, drop: bool) -> tuple[ClassIndex, int]:
    """Return an image set in which no image is in two splits, and how many copies were dropped.

    Args:
        index: The set.
        drop: Drop all copies but one, those within a split too, instead of refusing leaks.

    Raises:
        DataError: An image is in two splits and ``drop`` is False.
    """
    splits = [index.class_split[c] for c in index.label.tolist()]
    found = copies((digest(image) for image in index.images), splits)
    if drop:
        return _without(index, [place for same in found for place in same.places[1:]])
    leaks = [same for same in found if same.across_splits]
    if leaks:
        names = [index.class_names[index.label[place]] for place in leaks[0].places[:2]]
        where = [splits[place] for place in leaks[0].places[:2]]
        raise leak_error(len(leaks), *zip(names, where, strict=True))
    return index, 0


def leak_error(count: int, first: tuple[str, str], second: tuple[str, str]) -> DataError:
    """Say that images are in two splits, and where the first of them is: (class or file, split)."""
    images = "1 image is" if count == 1 else f"{count} images are"
    return DataError(
        f"{images} in two splits; the first is in {first[0]!r} ({first[1]})"
        f" and {second[0]!r} ({second[1]}): results would be too good.",
        hint="List them with: torchemo data check. Leave the copies out with --drop-duplicates.",
    )


def _without(index: ClassIndex, places: list[int]) -> tuple[ClassIndex, int]:
    if not places:
        return index, 0
    kept = np.ones(len(index), bool)
    kept[places] = False
    classes = (index.class_names, index.class_split, index.class_domain)
    return ClassIndex(index.images[kept], index.label[kept], *classes), len(places)
