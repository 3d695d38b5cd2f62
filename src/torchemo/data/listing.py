"""What lies on disk, before anything is decoded: classes and where their images can be read."""

import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, final

from numpy.typing import NDArray

from torchemo.core.errors import DataError
from torchemo.core.workers import usable_cores
from torchemo.data.formats.images import (
    FORMATS,
    Box,
    PictureForm,
    PictureKind,
    Resample,
    decode,
    inspect,
)
from torchemo.data.index import ClassIndex

SPLIT_FOLDERS = {
    "train": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}
"""Folder names that mean a split."""

PICTURE_SUFFIXES = frozenset(
    (
        *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp"),
        *(".gif", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".ppm", ".pgm"),
    )
)
"""Names that promise an image; the ones we cannot read are listed too, to be named with the reason."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (images done, images in all)."""


Decoded: TypeAlias = NDArray[Any] | DataError
"""The pixels of an image, or what is wrong with it."""

WORTH_A_THREAD = 1 << 12
"""Bytes of an encoded image below which handing it to another thread costs more than decoding it."""
AHEAD = 4
"""Images in flight per core while others are decoded: enough to keep the cores busy, few in memory."""


class Picture(NamedTuple):
    """One image: its name for people, how to read it, and which part of it to keep."""

    name: str
    read: Callable[[], bytes | NDArray[Any]]
    box: Box | None = None


class BadPicture(NamedTuple):
    """An image that cannot be used, and why."""

    name: str
    reason: str


class ListedClass(NamedTuple):
    """One class: its images and, where the data says so, its split."""

    name: str
    pictures: Sequence[Picture]
    split: str | None
    domain: str


@final
@dataclass(frozen=True)
class Listing:
    """Classes found somewhere, in a fixed order.

    Args:
        classes: The classes.
        layout: What the data was recognised as.
        image_size: Side of the images in the published protocol of this layout, if it has one.
        channels: Channels in that protocol.
        invert: Whether that protocol swaps dark and light.
    """

    classes: Sequence[ListedClass]
    layout: str
    image_size: int | None = None
    channels: int | None = None
    invert: bool = False

    @property
    def total(self) -> int:
        """How many images there are."""
        return sum(len(c.pictures) for c in self.classes)


def listing_of(index: ClassIndex, *, name: str) -> Listing:
    """List an image set that is already in memory or packed, to pack, resize or check it."""
    return Listing(
        tuple(
            ListedClass(
                class_name,
                tuple(Picture(f"{name}[{row}]", partial(_row, index, int(row))) for row in rows),
                split,
                domain,
            )
            for class_name, split, domain, rows in zip(
                index.class_names,
                index.class_split,
                index.class_domain,
                map(index.images_of, range(len(index.class_names))),
                strict=True,
            )
        ),
        "image set",
    )


def join(listings: Sequence[Listing]) -> Listing:
    """Put several listings, for instance several domains, into one."""
    if not listings:
        raise DataError("there is nothing to join: no data was given.")
    first = listings[0]
    if len({listing.invert for listing in listings}) > 1:
        raise DataError(
            "some of the data is inverted by its protocol (dark ink on white) and some is not.",
            hint="Pack the two kinds separately.",
        )
    return Listing(
        tuple(c for listing in listings for c in listing.classes),
        " + ".join(dict.fromkeys(listing.layout for listing in listings)),
        first.image_size,
        first.channels,
        first.invert,
    )


def form_for(
    listing: Listing, *, image_size: int | None, channels: int | None, resample: Resample
) -> PictureForm:
    """Settle the form of all images; what is not asked for follows protocol, then the first image."""
    size = listing.image_size if image_size is None else image_size
    planes = listing.channels if channels is None else channels
    if size is not None and planes is not None:
        return PictureForm(size, size, planes, resample, invert=listing.invert)
    kind = _first_kind(listing)
    return PictureForm(
        kind.height if size is None else size,
        kind.width if size is None else size,
        kind.channels if planes is None else planes,
        resample,
        resize=size is not None,
        invert=listing.invert,
    )


def decode_all(
    listing: Listing, form: PictureForm, *, progress: Progress | None = None
) -> Iterator[tuple[int, Picture, Decoded]]:
    """Decode all images, in order: class number, image, and its pixels or what is wrong with it.

    Files are read one after another; the decoder, which releases the interpreter lock, runs on all cores
    where images are large enough.
    """
    total, cores = listing.total, usable_cores()
    pictures = ((number, p) for number, c in enumerate(listing.classes) for p in c.pictures)
    begun: deque[tuple[int, Picture, Future[Decoded] | Decoded]] = deque()
    with ThreadPoolExecutor(cores, thread_name_prefix="decode") as pool:
        for done in range(1, total + 1):
            while len(begun) < AHEAD * cores and (found := next(pictures, None)) is not None:
                begun.append((*found, _begin(pool, found[1], form)))
            number, picture, pixels = begun.popleft()
            yield number, picture, pixels.result() if isinstance(pixels, Future) else pixels
            if progress is not None:
                progress(done, total)


def decode_some(
    pictures: Sequence[Picture], form: PictureForm, *, strict: bool = False
) -> tuple[list[tuple[Picture, NDArray[Any]]], tuple[BadPicture, ...]]:
    """Decode images that belong to no set; return the good ones with their pixels, and the bad ones.

    Raises:
        DataError: An image is bad, and ``strict`` asks for all of them.
    """
    listing = Listing((ListedClass("", pictures, None, ""),), "images")
    good, bad = [], []
    for _, picture, pixels in decode_all(listing, form):
        if not isinstance(pixels, DataError):
            good.append((picture, pixels))
        elif strict:
            raise pixels
        else:
            bad.append(bad_picture(picture, pixels))
    return good, tuple(bad)


def bad_picture(picture: Picture, error: DataError) -> BadPicture:
    """Name an image and what is wrong with it; a hint that helps to read it is part of the reason."""
    reason = error.message.removeprefix(f"{picture.name}: ")
    return BadPicture(picture.name, f"{reason} {error.hint}" if error.hint else reason)


def arrange(
    pictures: Iterable[tuple[tuple[str, ...], Picture]],
    *,
    empty: Iterable[tuple[str, ...]] = (),
    domain: str,
    where: str,
) -> tuple[ListedClass, ...]:
    """Sort images into classes by the folders they lie in.

    Understood are ``class/image``, ``split/class/image`` and ``domain/split/class/image``, inside
    any number of folders that hold nothing else. Names of folders are compared in Unicode form C.
    """
    held: dict[tuple[str, ...], list[Picture]] = {}
    for folders, picture in pictures:
        held.setdefault(tuple(unicodedata.normalize("NFC", f) for f in folders), []).append(picture)
    depth = _common_depth(held, where=where)
    for folders in empty:
        if len(folders) == depth:
            held.setdefault(tuple(unicodedata.normalize("NFC", f) for f in folders), [])
    meaning = _meanings(list(held), where=where)
    classes = [
        ListedClass(name, sorted(held[folders], key=lambda p: p.name), split, own or domain)
        for folders, (own, split, name) in meaning.items()
    ]
    return tuple(sorted(classes, key=lambda c: (c.domain, c.name, c.split or "")))


def _row(index: ClassIndex, row: int) -> NDArray[Any]:
    pixels: NDArray[Any] = index.images[row].transpose(1, 2, 0)
    return pixels


def _begin(
    pool: ThreadPoolExecutor, picture: Picture, form: PictureForm
) -> Future[Decoded] | Decoded:
    """Read an image here, and have it decoded by the pool where there is much to decode."""
    try:
        source = picture.read()
    except DataError as error:
        return error
    if isinstance(source, bytes) and len(source) >= WORTH_A_THREAD:
        return pool.submit(_attempt, source, picture, form)
    return _attempt(source, picture, form)


def _attempt(source: bytes | NDArray[Any], picture: Picture, form: PictureForm) -> Decoded:
    try:
        return decode(source, form, name=picture.name, box=picture.box)
    except DataError as error:
        return error


def _first_kind(listing: Listing) -> PictureKind:
    trouble = DataError("there are no images.")
    for listed in listing.classes:
        for picture in listed.pictures:
            try:
                return inspect(picture.read(), name=picture.name)
            except DataError as error:
                trouble = error
    raise trouble


def _common_depth(held: dict[tuple[str, ...], list[Picture]], *, where: str) -> int:
    if not held:
        raise DataError(
            f"{where}: there are no images in it.",
            hint=f"Expected one folder per class, with images ({', '.join(FORMATS)} or HEIC).",
        )
    by_depth = {len(folders): pictures[0].name for folders, pictures in held.items()}
    if 0 in by_depth:
        raise DataError(
            f"{where}: image {by_depth[0]} lies outside any class folder.",
            hint="Put every image into the folder of its class.",
        )
    if len(by_depth) > 1:
        raise DataError(
            f"{where}: images lie at different depths: {' and '.join(by_depth.values())}.",
            hint="Use class/image, split/class/image or domain/split/class/image throughout.",
        )
    return next(iter(by_depth))


def _meanings(
    folders: list[tuple[str, ...]], *, where: str
) -> dict[tuple[str, ...], tuple[str | None, str | None, str]]:
    """Say for each folder which domain, split and class it is."""
    inner = folders
    while True:
        if len(inner[0]) == 1:
            return {f: (None, None, i[0]) for f, i in zip(folders, inner, strict=True)}
        if len(inner[0]) in (2, 3) and all(i[-2].lower() in SPLIT_FOLDERS for i in inner):
            return {
                f: (i[0] if len(i) == 3 else None, SPLIT_FOLDERS[i[-2].lower()], i[-1])
                for f, i in zip(folders, inner, strict=True)
            }
        tops = {i[0] for i in inner}
        if len(tops) > 1:
            raise DataError(
                f"{where}: cannot tell classes from other folders: {'/'.join(folders[0])}"
                f" and {len(folders) - 1} more.",
                hint="Use class/image, split/class/image or domain/split/class/image.",
            )
        inner = [i[1:] for i in inner]
