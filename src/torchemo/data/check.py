"""Look an image set over before it is used: every trouble at once, by name."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from torchemo.core.errors import DataError
from torchemo.data.duplicates import copies, digest
from torchemo.data.episodes import EpisodeSpec, check_fits
from torchemo.data.formats.images import PictureForm
from torchemo.data.index import SPLITS, ClassIndex, DomainSummary
from torchemo.data.listing import BadPicture, Listing, Progress, bad_picture, decode_all
from torchemo.data.load import find
from torchemo.data.splits import Splits

CHECK_SIZE = 84


class SmallClass(NamedTuple):
    """A class with fewer good images than a task needs."""

    domain: str
    name: str
    images: int
    needed: int


class Duplicate(NamedTuple):
    """The same pixels twice."""

    first: str
    second: str
    first_split: str
    second_split: str

    @property
    def across_splits(self) -> bool:
        """Whether an image of one split is also in another, so that results would be too good."""
        return self.first_split != self.second_split


@final
@dataclass(frozen=True)
class CheckReport:
    """What was found in an image set.

    Attributes:
        layout: What the data was recognised as.
        domains: Classes and good images, by domain.
        bad: Images that cannot be used, with the reason.
        small: Classes with fewer images than K + Q.
        duplicates: Images with the same pixels.
        colliding: Groups of class names that differ only in upper and lower case.
        problems: Why N-way K-shot tasks cannot be drawn, by domain and split.
    """

    layout: str
    domains: tuple[DomainSummary, ...]
    bad: tuple[BadPicture, ...]
    small: tuple[SmallClass, ...]
    duplicates: tuple[Duplicate, ...]
    colliding: tuple[tuple[str, ...], ...]
    problems: tuple[str, ...]

    dropped: int = 0

    @property
    def leaks(self) -> tuple[Duplicate, ...]:
        """Images in two splits, unless the copies are dropped."""
        return () if self.dropped else tuple(d for d in self.duplicates if d.across_splits)

    @property
    def ok(self) -> bool:
        """Whether `train` takes the set: tasks fit in every split, no image in two; bad ones are left out."""
        return not (self.problems or self.leaks)


class _Survey(NamedTuple):
    """Each good image with its digest and class, and the bad images."""

    names: list[str]
    digests: list[bytes]
    label: list[int]
    bad: list[BadPicture]


def check(
    path: Path | str,
    spec: EpisodeSpec,
    *,
    splits: Splits | None = None,
    domain: str | None = None,
    image_size: int | None = None,
    drop_duplicates: bool = False,
    progress: Progress | None = None,
) -> CheckReport:
    """Decode every image of an image set and report what is wrong with it, by the rules of `train`."""
    listing = find(path, splits=splits, domain=domain)
    size = image_size or listing.image_size or CHECK_SIZE
    survey = _survey(listing, PictureForm(size, size), progress)
    held = [str(listing.classes[c].split) for c in survey.label]
    same = copies(survey.digests, held)
    dropped = {place for one in same for place in one.places[1:]} if drop_duplicates else set()
    label = [c for place, c in enumerate(survey.label) if place not in dropped]
    index = _without_pixels(listing, label)
    return CheckReport(
        listing.layout,
        index.summary() if index else (),
        tuple(survey.bad),
        _small(index, spec) if index else (),
        tuple(
            Duplicate(survey.names[first], survey.names[other], held[first], held[other])
            for first, *others in (one.places for one in same)
            for other in others
        ),
        _colliding(listing),
        _problems(index, spec) if index else ("no image can be read.",),
        len(dropped),
    )


def _survey(listing: Listing, form: PictureForm, progress: Progress | None) -> _Survey:
    survey = _Survey([], [], [], [])
    for number, picture, pixels in decode_all(listing, form, progress=progress):
        if isinstance(pixels, DataError):
            survey.bad.append(bad_picture(picture, pixels))
            continue
        survey.names.append(picture.name)
        survey.digests.append(digest(pixels))
        survey.label.append(number)
    return survey


def _without_pixels(listing: Listing, label: list[int]) -> ClassIndex | None:
    """Return an index that counts like the real one and takes no memory."""
    if not label:
        return None
    return ClassIndex(
        np.broadcast_to(np.zeros((), np.uint8), (len(label), 1, 1, 1)),
        np.array(label),
        [c.name for c in listing.classes],
        [str(c.split) for c in listing.classes],
        [c.domain for c in listing.classes],
    )


def _small(index: ClassIndex, spec: EpisodeSpec) -> tuple[SmallClass, ...]:
    needed = spec.images_per_class
    return tuple(
        SmallClass(index.class_domain[c], index.class_names[c], int(index.counts[c]), needed)
        for c in (index.counts < needed).nonzero()[0].tolist()
    )


def _colliding(listing: Listing) -> tuple[tuple[str, ...], ...]:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for c in listing.classes:
        groups[c.domain, c.name.casefold()].append(c.name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _problems(index: ClassIndex, spec: EpisodeSpec) -> tuple[str, ...]:
    found = []
    held = dict.fromkeys(zip(index.class_domain, index.class_split, strict=True))
    absent = [split for split in SPLITS if split not in index.class_split]
    for domain, split in (*held, *((None, split) for split in absent)):
        try:
            check_fits(index, spec, split=split, domain=domain)
        except DataError as error:
            found.append(error.message)
    return tuple(found)
