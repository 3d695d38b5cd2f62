"""One door for every form of image data: recognise it, list it, read it."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from torchemo.core.errors import ConfigError, DataError, ResourceError
from torchemo.data.formats.archive import list_zip
from torchemo.data.formats.folder import list_folder
from torchemo.data.formats.images import Resample
from torchemo.data.formats.npz import list_npz
from torchemo.data.index import ClassIndex
from torchemo.data.layouts import recognise
from torchemo.data.listing import (
    BadPicture,
    Listing,
    Progress,
    arrange,
    bad_picture,
    decode_all,
    form_for,
    listing_of,
)
from torchemo.data.packed import is_packed, open_packed
from torchemo.data.splits import (
    Proportions,
    SplitFile,
    Splits,
    assign,
    read_split_file,
    schemes_for,
)


def load(
    path: Path | str,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    splits: Splits | None = None,
    domain: str | None = None,
    boxes: bool = True,
    resample: Resample = "lanczos",
    by_set: bool = False,
    on_bad: Callable[[BadPicture], None] | None = None,
    progress: Progress | None = None,
) -> ClassIndex:
    """Read an image set into memory, whatever its form.

    Args:
        path: A folder of class folders, a zip archive of one, an ``.npz``, a packed set (opened as a
            memory map where nothing else is asked for), or a published layout.
        image_size: Side of the images; by default the size they have, which must then be the same.
        channels: 1 or 3; by default that of the first image.
        splits: Where the splits come from; by default see `find`.
        domain: Name of the domain; by default that of the file or folder.
        boxes: Cut images to the bounding boxes that come with them (CUB, FGVC-Aircraft).
        resample: How images are resized.
        by_set: As in `find`.
        on_bad: Called for every image that cannot be read, which is then left out; None stops at the first.
        progress: Called with (images done, images in all).

    Raises:
        DataError: Something cannot be read, by name and with the reason.
    """
    form = {"image_size": image_size, "channels": channels}
    if is_packed(Path(path)):  # it stays on disk if it is wanted as it is
        index = open_packed(Path(path))
        if index.holds_features:  # of any size and colour: a network has seen the images
            return with_listed_splits(index, find(path, splits=splits, domain=domain))
        if splits is None and domain is None and _has_form(index, **form):
            return index
    listing = find(path, splits=splits, domain=domain, boxes=boxes, by_set=by_set)
    return read(listing, **form, resample=resample, on_bad=on_bad, progress=progress)


def find(
    path: Path | str,
    *,
    splits: Splits | None = None,
    domain: str | None = None,
    boxes: bool = True,
    by_set: bool = False,
) -> Listing:
    """Recognise what lies at a path and list its classes; no image is decoded.

    Splits come from ``splits``; else from a ``splits.json`` beside or inside the data that speaks of it;
    else from the data (folders ``train``, ``val``, ``test``, or a ``class_split``); else the sorted class
    names are cut 64 : 16 : 20 with seed 0. With ``by_set`` the name of the file or folder enters that
    draw, as in earlier versions.
    """
    path = _there(path)
    listing = _recognise(path, domain or path.stem)
    chosen = splits if splits is not None else _splits_beside(path)
    if isinstance(chosen, SplitFile):
        chosen = read_split_file(chosen, data_name=path.name)
    classes = assign(listing.classes, chosen, by_set=by_set)
    if not boxes:
        classes = tuple(
            c._replace(pictures=[p._replace(box=None) for p in c.pictures]) for c in classes
        )
    return replace(listing, classes=classes)


def splits_for(
    paths: Sequence[Path | str], *, file: Path | None = None, scheme: str | None = None
) -> list[SplitFile | Proportions | None]:
    """Return which splits each of several image sets takes, None for those it would take anyway.

    Args:
        paths: The image sets.
        file: Where splits are listed, or proportions such as ``64:16:20`` to draw them; by default the
            ``splits.json`` inside or beside each set.
        scheme: Which splits to take where several are listed. One name may serve several sets: those
            that do not list it need no choice, or are refused when they are read.
    """
    drawn = None if file is None else Proportions.read(str(file))
    if drawn is not None:
        return [drawn for _ in paths]
    if file is not None and not file.is_file():
        raise ConfigError(f"{file}: there is no such file of splits.", hint="Check --splits.")
    files = [_split_file(_there(path)) if file is None else file for path in paths]
    offers = [
        list(schemes_for(listed, data_name=Path(path).name)) if listed is not None else []
        for path, listed in zip(paths, files, strict=True)
    ]
    if scheme is not None and not any(scheme in names for names in offers):
        raise _no_scheme(paths, scheme, sorted({name for names in offers for name in names}))
    return [
        None if listed is None or (file is None and scheme not in names)
        else SplitFile(listed, scheme if scheme in names else None)
        for listed, names in zip(files, offers, strict=True)
    ]  # fmt: skip


def with_listed_splits(index: ClassIndex, listing: Listing) -> ClassIndex:
    """Give the classes of an image set the splits and domains that they have in a listing."""
    return index.with_splits(
        [str(c.split) for c in listing.classes], domains=[c.domain for c in listing.classes]
    )


def read(
    listing: Listing,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    resample: Resample = "lanczos",
    on_bad: Callable[[BadPicture], None] | None = None,
    progress: Progress | None = None,
) -> ClassIndex:
    """Decode listed images into memory; arguments as in `load`."""
    form = form_for(listing, image_size=image_size, channels=channels, resample=resample)
    shape = (listing.total, form.channels, form.height, form.width)
    # All at once: images collected in a list would need their memory twice.
    try:
        images, label = np.empty(shape, np.uint8), np.empty(listing.total, np.int64)
    except MemoryError as error:
        raise ResourceError(
            f"images of shape {list(shape)} do not fit into memory.",
            hint="Pack the data once (torchemo data pack) and use the packed set.",
        ) from error
    filled = 0
    for number, picture, pixels in decode_all(listing, form, progress=progress):
        if isinstance(pixels, DataError):
            if on_bad is None:
                raise pixels
            on_bad(bad_picture(picture, pixels))
            continue
        images[filled], label[filled] = pixels, number
        filled += 1
    return ClassIndex(
        images[:filled],
        label[:filled],
        [c.name for c in listing.classes],
        [str(c.split) for c in listing.classes],
        [c.domain for c in listing.classes],
    )


def _has_form(index: ClassIndex, *, image_size: int | None, channels: int | None) -> bool:
    """Return whether images have the size and channels that are asked for, if any."""
    size = (image_size,) * 2 if image_size is not None else index.shape[1:]
    planes = index.shape[0] if channels is None else channels
    return index.shape == (planes, *size)


def _recognise(path: Path, domain: str) -> Listing:
    if is_packed(path):
        return listing_of(open_packed(path), name=path.name)
    if path.is_dir():
        published = recognise(path, domain=domain)
        if published is not None:
            return published
        pictures, empty = list_folder(path)
        classes = arrange(pictures, empty=empty, domain=domain, where=str(path))
        return Listing(classes, "class folders")
    if path.suffix == ".npz":
        return Listing(list_npz(path, domain=domain), "npz")
    if path.suffix == ".zip":
        return Listing(
            arrange(list_zip(path), domain=domain, where=str(path)), "zip of class folders"
        )
    raise DataError(
        f"{path}: is no form of image data that is known here.",
        hint="Give a folder of class folders, a .zip of one, or an .npz.",
    )


def _there(path: Path | str) -> Path:
    place = Path(path)
    if not place.exists():
        here = f"It was looked for in {Path.cwd()}; a run keeps the paths it was trained with."
        raise DataError(
            f"{path}: there is no such file or folder.", hint=None if place.is_absolute() else here
        )
    return place


def _splits_beside(path: Path) -> SplitFile | None:
    file = _split_file(path)
    if file is None or (file.parent != path and not schemes_for(file, data_name=path.name)):
        return None
    return SplitFile(file)


def _split_file(path: Path) -> Path | None:
    """Return the ``splits.json`` inside or beside an image set."""
    places = [path / "splits.json"] if path.is_dir() else []
    return next((f for f in (*places, path.parent / "splits.json") if f.is_file()), None)


def _no_scheme(paths: Sequence[Path | str], scheme: str, known: list[str]) -> DataError:
    names = ", ".join(Path(path).name for path in paths)
    near = difflib.get_close_matches(scheme, known, n=1)
    hint = (
        f"Did you mean '{near[0]}'?"
        if near
        else f"There are: {', '.join(known)}."
        if known
        else "No splits are listed for it: leave the scheme out, or name a file with --splits."
    )
    return DataError(f"{names}: has no splits called {scheme!r}.", hint=hint)
