"""The data sets of a study by name, each decoded once into a packed set that all runs share."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from torchemo.core.errors import DataError
from torchemo.data.index import ClassIndex
from torchemo.data.listing import Listing, listing_of
from torchemo.data.load import find
from torchemo.data.packed import is_packed, pack
from torchemo.data.source import REGRESSION
from torchemo.data.splits import SplitFile
from torchemo.data.synthetic.pictures import procedural

SYNTHETIC = "synthetic-"
"""Begin of the names of the embedded image sets."""

_SYNTHETIC_CLASSES = 15
_FORMS = (".zip", ".npz", "")


def prepare(
    names: Iterable[str],
    *,
    data: Path | None,
    out: Path,
    image_size: int,
    packed: bool = True,
    progress: Callable[[str], None] = lambda name: None,
) -> dict[str, str]:
    """Return what stands in ``data.source`` for every named set; pack those that are not packed yet.

    Args:
        names: ``regression:GROUP``, the name of an embedded set, or a file or folder below ``data``
            without its ending; ``name#scheme`` chooses among several splits.
        data: Folder of image sets.
        out: Folder for packed sets.
        image_size: Side of the images.
        packed: Pack them at this size; otherwise they are used as they lie there.
        progress: Called with the name of every set that is being packed.
    """
    found = {}
    for name in dict.fromkeys(names):
        if name.startswith(REGRESSION):
            found[name] = name
            continue
        if not packed:
            found[name] = str(_place(name, data).resolve())
            continue
        place = packed_place(name, out, image_size)
        if not is_packed(place):
            progress(name)
            listing = _listing(name, data, image_size)
            place.parent.mkdir(parents=True, exist_ok=True)
            pack(listing, place, image_size=image_size, channels=3)
        found[name] = str(place.resolve())
    return found


def scheme_of(name: str) -> str | None:
    """Return which of several splits a name ``set#scheme`` chooses."""
    return name.partition("#")[2] or None


def packed_place(name: str, out: Path, image_size: int) -> Path:
    """Return where a set is packed; runs are named by the last part of it."""
    return out / f"{re.sub('[^A-Za-z0-9_.-]+', '-', name)}-{image_size}px"


def _listing(name: str, data: Path | None, image_size: int) -> Listing:
    if name.startswith(SYNTHETIC):
        return listing_of(_synthetic(name, image_size), name=name)
    place, scheme = _place(name, data), scheme_of(name)
    splits = SplitFile(place.parent / "splits.json", scheme) if scheme else None
    return find(place, splits=splits)


def _place(name: str, data: Path | None) -> Path:
    """Return where a set lies below the folder of sets."""
    stem = name.partition("#")[0]
    if data is None:
        raise DataError(
            f"the study needs the image set '{stem}' and no folder of image sets was given.",
            hint="Pass --data FOLDER, or set TORCHEMO_DATA.",
        )
    places = [data / f"{stem}{form}" for form in _FORMS]
    place = next((place for place in places if place.exists()), None)
    if place is None:
        raise DataError(
            f"{data} has no image set '{stem}' (.zip, .npz or folder).",
            hint="See what is there with: torchemo data list --data FOLDER",
        )
    return place


def _synthetic(domain: str, image_size: int) -> ClassIndex:
    drawn = procedural(image_size=image_size, classes_per_family=_SYNTHETIC_CLASSES)
    return drawn.subset(domain=domain)
