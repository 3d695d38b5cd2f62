"""The one in-memory form of an image set: images or their features, classes, and the split of each class."""

import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from torchemo.core.errors import DataError

Split: TypeAlias = Literal["train", "val", "test"]

SPLITS: tuple[Split, ...] = ("train", "val", "test")
"""Meta-training, model selection, and the classes nobody looks at before the end."""

_HASH_BYTES = 1 << 24


class DomainSummary(NamedTuple):
    """What one domain holds: classes by split, images, and its smallest and largest class."""

    domain: str
    classes: dict[str, int]
    images: int
    smallest: int
    largest: int


@final
@dataclass(frozen=True, eq=False, repr=False)
class ClassIndex:
    """Images sorted into classes, classes sorted into splits and domains.

    Splits are disjoint by class, as few-shot learning needs it: a class has one split. The images
    may lie in RAM or in a memory map; they are held as a read-only view and never copied here.

    Args:
        images: Images, uint8 ``[n, C, H, W]`` with one or three channels; or features that a network made
            of them, float32 or float16 ``[n, d]``.
        label: Class of each image, integers ``[n]`` in ``0 .. len(class_names) - 1``.
        class_names: Name of each class, unique within a domain.
        class_split: Split of each class: ``train``, ``val`` or ``test``.
        class_domain: Domain of each class; a task never mixes domains.

    Raises:
        DataError: Something does not fit, said by name.

    Example:
        >>> index = ClassIndex(
        ...     np.zeros((4, 3, 8, 8), np.uint8), np.array([0, 0, 1, 1]),
        ...     ("wren", "robin"), ("train", "test"), ("birds", "birds"),
        ... )
        >>> index.classes(split="test").tolist(), index.counts.tolist()
        ([1], [2, 2])
    """

    images: NDArray[Any]
    label: NDArray[Any]
    class_names: Sequence[str]
    class_split: Sequence[str]
    class_domain: Sequence[str]

    def __post_init__(self) -> None:
        _check_images(self.images, self.label)
        for field in ("class_names", "class_split", "class_domain"):
            object.__setattr__(self, field, tuple(str(value) for value in getattr(self, field)))
        _check_classes(self.class_names, self.class_split, self.class_domain)
        _check_labels(self.label, len(self.class_names))
        images = self.images.view()
        label = np.array(self.label, dtype=np.int64)
        images.flags.writeable = label.flags.writeable = False
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "label", label)

    def __len__(self) -> int:
        return len(self.label)

    def __repr__(self) -> str:
        what = "features" if self.holds_features else "images"
        return (
            f"ClassIndex({len(self)} {what} {'x'.join(map(str, self.shape))},"
            f" {len(self.class_names)} classes, domains {list(self.domains)})"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of every image; length of every feature vector."""
        return tuple(self.images.shape[1:])

    @property
    def holds_features(self) -> bool:
        """Whether examples are feature vectors instead of images."""
        return self.images.ndim == 2

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """Domain names in order of first appearance: a task's domain number counts in it."""
        return tuple(dict.fromkeys(self.class_domain))

    @cached_property
    def domain_of_class(self) -> NDArray[np.int64]:
        """Domain number of each class, ``[classes]``."""
        number = {domain: i for i, domain in enumerate(self.domains)}
        return np.array([number[domain] for domain in self.class_domain], dtype=np.int64)

    @cached_property
    def split_of_class(self) -> NDArray[np.int64]:
        """Position of each class's split in `SPLITS`, ``[classes]``."""
        number = {str(split): i for i, split in enumerate(SPLITS)}
        return np.array([number[split] for split in self.class_split], dtype=np.int64)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Images of each class, ``[classes]``."""
        return np.bincount(self.label, minlength=len(self.class_names)).astype(np.int64)

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Image ids sorted by class: class c owns ``counts[c]`` of them from ``starts[c]`` on."""
        return np.argsort(self.label, kind="stable").astype(np.int64)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each class begins in `order`, ``[classes]``."""
        return np.cumsum(self.counts) - self.counts

    def images_of(self, class_id: int | np.int64) -> NDArray[np.int64]:
        """Return the image ids of one class, ascending."""
        start = self.starts[class_id]
        return self.order[start : start + self.counts[class_id]]

    def classes(self, *, split: str | None = None, domain: str | None = None) -> NDArray[np.int64]:
        """Return the class ids of a split, of a domain, or of both."""
        keep = np.ones(len(self.class_names), dtype=bool)
        if split is not None:
            keep &= self.split_of_class == _number(split, SPLITS, what="split")
        if domain is not None:
            keep &= self.domain_of_class == _number(domain, self.domains, what="domain")
        return keep.nonzero()[0].astype(np.int64)

    def select(self, class_ids: Sequence[int] | NDArray[np.int64]) -> "ClassIndex":
        """Keep the given classes, in the given order; images stay in theirs.

        Images that lie side by side are viewed; otherwise they are copied into RAM.
        """
        ids = np.asarray(class_ids, dtype=np.int64)
        position = np.full(len(self.class_names), -1, dtype=np.int64)
        position[ids] = np.arange(len(ids))
        rows = (position[self.label] >= 0).nonzero()[0]
        side_by_side = len(rows) > 0 and rows[-1] - rows[0] + 1 == len(rows)
        return ClassIndex(
            self.images[rows[0] : rows[-1] + 1] if side_by_side else self.images[rows],
            position[self.label[rows]],
            [self.class_names[c] for c in ids],
            [self.class_split[c] for c in ids],
            [self.class_domain[c] for c in ids],
        )

    def subset(
        self, *, split: str | None = None, domain: str | None = None, min_images: int = 0
    ) -> "ClassIndex":
        """Keep the classes of a split and a domain that have at least ``min_images`` images."""
        ids = self.classes(split=split, domain=domain)
        ids = ids[self.counts[ids] >= min_images]
        if not len(ids):
            raise DataError(
                f"no class left: split {split!r}, domain {domain!r}, {min_images}+ images.",
                hint="Lower --min-images, or take another split or domain.",
            )
        return self.select(ids)

    def summary(self) -> tuple[DomainSummary, ...]:
        """Count classes and images, one row per domain."""
        rows = []
        for domain in self.domains:
            ids = self.classes(domain=domain)
            splits = Counter(self.class_split[c] for c in ids)
            counts = self.counts[ids]
            classes: dict[str, int] = {split: splits[split] for split in SPLITS}
            rows.append(
                DomainSummary(
                    domain, classes, int(counts.sum()), int(counts.min()), int(counts.max())
                )
            )
        return tuple(rows)

    def with_splits(self, splits: Sequence[str], *, domains: Sequence[str]) -> "ClassIndex":
        """Return the same classes with other splits and names of domains."""
        return ClassIndex(self.images, self.label, self.class_names, splits, domains)

    def fingerprint(self) -> str:
        """Return the SHA-256 of images, labels, names, splits and domains.

        Sets with the same fingerprint give the same tasks, whatever form they were read from.
        """
        described = [self.class_names, self.class_split, self.class_domain, self.images.shape]
        digest = hashlib.sha256(json.dumps(described).encode())
        digest.update(self.label.astype("<i8").tobytes())
        rows = max(1, _HASH_BYTES // max(1, self.images[:1].nbytes))
        for start in range(0, len(self), rows):
            digest.update(np.ascontiguousarray(self.images[start : start + rows]).data)
        return digest.hexdigest()


def merge(indexes: Sequence[ClassIndex]) -> ClassIndex:
    """Join image sets of one image shape, for instance several domains, into one (in RAM)."""
    if not indexes:
        raise DataError("there is nothing to merge: no image set was given.")
    first = indexes[0]
    for index in indexes[1:]:
        if index.shape != first.shape:
            raise DataError(
                f"domains {list(first.domains)} have images of shape {first.shape},"
                f" domains {list(index.domains)} of shape {index.shape}.",
                hint="Load all of them with the same --image-size and --channels.",
            )
    offsets = np.cumsum([0, *(len(index.class_names) for index in indexes)])
    return ClassIndex(
        np.concatenate([index.images for index in indexes]),
        np.concatenate(
            [index.label + offset for index, offset in zip(indexes, offsets, strict=False)]
        ),
        [name for index in indexes for name in index.class_names],
        [split for index in indexes for split in index.class_split],
        [domain for index in indexes for domain in index.class_domain],
    )


def _number(name: str, known: Sequence[str], *, what: str) -> int:
    if name not in known:
        raise DataError(
            f"there is no {what} {name!r}.", hint=f"Take one of {', '.join(map(repr, known))}."
        )
    return known.index(name)


def _check_images(images: NDArray[Any], label: NDArray[Any]) -> None:
    pixels = images.dtype == np.uint8 and images.ndim == 4 and images.shape[1] in (1, 3)
    if not pixels and not (images.dtype in (np.float32, np.float16) and images.ndim == 2):
        raise DataError(
            "images should be uint8 of shape [n, C, H, W] with 1 or 3 channels, or features float32 or"
            f" float16 of shape [n, d], got {images.dtype} of shape {list(images.shape)}.",
            hint="Move the channel axis to position 1 and keep the 0..255 range.",
        )
    if 0 in images.shape:
        raise DataError(f"there are no images: images have shape {list(images.shape)}.")
    if label.shape != images.shape[:1] or not np.issubdtype(label.dtype, np.integer):
        raise DataError(
            f"label should be integers of shape [{len(images)}], one per image,"
            f" got {label.dtype} of shape {list(label.shape)}."
        )


def _check_classes(names: Sequence[str], splits: Sequence[str], domains: Sequence[str]) -> None:
    if not len(names) == len(splits) == len(domains):
        raise DataError(
            f"{len(names)} class names, {len(splits)} splits and {len(domains)} domains were given;"
            " every class needs one of each."
        )
    for name, split, domain in zip(names, splits, domains, strict=True):
        if not name or not domain:
            raise DataError(f"class {name!r} of domain {domain!r} has an empty name.")
        if split not in SPLITS:
            raise DataError(
                f"class {name!r} has split {split!r}.",
                hint=f"A split is one of {', '.join(SPLITS)}.",
            )
    # Names that look the same, but are composed of other characters, are one name.
    pairs = [(_composed(d), _composed(n)) for d, n in zip(domains, names, strict=True)]
    (pair, times), *_ = Counter(pairs).most_common(1) or [(("", ""), 0)]
    if times > 1:
        held = [split for known, split in zip(pairs, splits, strict=True) if known == pair]
        raise DataError(
            f"class {pair[1]!r} of domain {pair[0]!r} appears {times} times, in splits {held}.",
            hint="A class belongs to one split: join its images, or rename one of the two.",
        )


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _check_labels(label: NDArray[Any], n_classes: int) -> None:
    if label.min() < 0 or label.max() >= n_classes:
        at = int(((label < 0) | (label >= n_classes)).argmax())
        raise DataError(
            f"image {at} has label {int(label[at])}; there are {n_classes} classes,"
            f" labels should lie in 0..{n_classes - 1}."
        )
