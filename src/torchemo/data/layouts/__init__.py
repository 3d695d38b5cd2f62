"""Image sets as their authors publish them, recognised from what lies on disk.

Every reader returns None where a folder is not of its layout. Layouts that are plain class folders (DTD,
FGVCx Fungi, miniImageNet folders) need no reader of their own.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from torchemo.core.errors import DataError
from torchemo.data.formats.folder import list_folder, picture_file
from torchemo.data.formats.images import Box
from torchemo.data.formats.matlab import read_numbers
from torchemo.data.layouts.arrays import mini_imagenet_cache, split_pickles, tiered_imagenet
from torchemo.data.listing import ListedClass, Listing, Picture, arrange

Reader: TypeAlias = Callable[[Path, str], Listing | None]
"""``(folder, domain) -> listing``, or None where the folder is of another layout."""

BTAF = ("CUB_Bird", "DTD_Texture", "FGVC_Aircraft", "FGVCx_Fungi")
"""The four domains of Meta-Dataset-BTAF, in the order of its tables."""

_MANY = 40


def recognise(path: Path, *, domain: str) -> Listing | None:
    """Return the listing of a published layout, at a folder or up to two folders below it.

    Raises:
        DataError: There are several; or a file of the layout cannot be read.
    """
    level = [path]
    for _ in range(3):
        found = [(f, listing) for f in level if (listing := _read(f, domain)) is not None]
        if len(found) > 1:
            names = ", ".join(f"{listing.layout} in {folder}" for folder, listing in found)
            raise DataError(f"{path}: holds several image sets: {names}.", hint="Give one of them.")
        if found:
            return found[0][1]
        level = [inner for folder in level for inner in _inner_folders(folder)]
    return None


def btaf(root: Path, domain: str) -> Listing | None:
    """Read ``<domain>/<split>/<class>/*.jpg`` of Plain-Multi and Art-Multi (84 pixels)."""
    if not all((root / name).is_dir() for name in BTAF):
        return None
    pictures, empty = list_folder(root)
    classes = arrange(pictures, empty=empty, domain=domain, where=str(root))
    art = any(c.domain not in BTAF for c in classes)
    return Listing(classes, "Art-Multi" if art else "Meta-Dataset-BTAF", image_size=84)


def omniglot(root: Path, domain: str) -> Listing | None:
    """Read ``images_background|images_evaluation/<alphabet>/<character>/*.png``.

    Published protocol: 28 pixels, grey, inverted (ink = 255). Without other splits the background set
    is for training and the evaluation set for testing.
    """
    classes: list[ListedClass] = []
    for folder, split in (("images_background", "train"), ("images_evaluation", "test")):
        if not (root / folder).is_dir():
            continue
        held: dict[str, list[Picture]] = defaultdict(list)
        for parts, picture in list_folder(root / folder)[0]:
            if len(parts) < 2:
                raise DataError(f"{picture.name}: lies outside any folder of a character.")
            held["/".join(parts[-2:])].append(picture)
        classes += (ListedClass(name, held[name], split, domain) for name in sorted(held))
    if not classes:
        return None
    return Listing(tuple(classes), "Omniglot", image_size=28, channels=1, invert=True)


def mini_imagenet_csv(root: Path, domain: str) -> Listing | None:
    """Read ``{train,val,test}.csv`` (filename, label) beside ``images/``."""
    if not (root / "images").is_dir() or not (root / "train.csv").is_file():
        return None
    classes: list[ListedClass] = []
    for split in ("train", "val", "test"):
        path = root / f"{split}.csv"
        if not path.is_file():
            continue
        held: dict[str, list[Picture]] = defaultdict(list)
        for row in _csv_rows(path):
            held[row["label"]].append(picture_file(_below(root / "images", row["filename"], path)))
        classes += (ListedClass(name, held[name], split, domain) for name in sorted(held))
    return Listing(tuple(classes), "miniImageNet CSV")


def cifar_fs_folders(root: Path, domain: str) -> Listing | None:
    """Read ``data/<class>/*.png`` with lists of classes in ``splits/<scheme>/{train,val,test}.txt``."""
    schemes = sorted(path.parent for path in root.glob("splits/*/train.txt"))
    if not schemes or not (root / "data").is_dir():
        return None
    chosen = next((s for s in schemes if s.name == "bertinetto"), schemes[0])
    split_of = {
        name: split
        for split in ("train", "val", "test")
        for name in _lines(chosen / f"{split}.txt", missing_ok=True)
    }
    pictures, empty = list_folder(root / "data")
    classes = arrange(pictures, empty=empty, domain=domain, where=str(root / "data"))
    found = tuple(c._replace(split=split_of[c.name]) for c in classes if c.name in split_of)
    return Listing(found, f"CIFAR-FS folders ({chosen.name})")


def cub(root: Path, domain: str) -> Listing | None:
    """Read CUB-200-2011: ``images/<class>/*.jpg``, cut to ``bounding_boxes.txt``."""
    boxes, numbers = root / "bounding_boxes.txt", root / "images.txt"
    if not (boxes.is_file() and numbers.is_file() and (root / "images").is_dir()):
        return None
    name_of = _pairs(numbers)
    box_of: dict[str, Box] = {}
    for line in _lines(boxes):
        number, *sides = line.split()
        left, upper, width, height = _numbers(sides, 4, path=boxes)
        box_of[name_of.get(number, "")] = (left, upper, left + width, upper + height)
    pictures = [
        (parts, p._replace(box=box_of.get("/".join([*parts, Path(p.name).name]))))
        for parts, p in list_folder(root / "images")[0]
    ]
    classes = arrange(pictures, domain=domain, where=str(root))
    return Listing(classes, "CUB-200-2011, cut to its boxes")


def fgvc_aircraft(root: Path, domain: str) -> Listing | None:
    """Read FGVC-Aircraft: ``images/*.jpg`` by variant, cut to ``images_box.txt`` where it is there.

    The boxes also leave out the line of text at the bottom of every picture.
    """
    lists = sorted(root.glob("images_variant_*.txt"))
    if not lists or not (root / "images").is_dir():
        return None
    variant_of = {number: variant for path in lists for number, variant in _pairs(path).items()}
    box_of: dict[str, Box] = {}
    for line in _lines(root / "images_box.txt", missing_ok=True):
        number, *sides = line.split()
        left, upper, right, lower = _numbers(sides, 4, path=root / "images_box.txt")
        # Boxes count pixels from 1 and include their last one.
        box_of[number] = (left - 1, upper - 1, right, lower)
    held: dict[str, list[Picture]] = defaultdict(list)
    for number, variant in sorted(variant_of.items()):
        path = _below(root / "images", f"{number}.jpg", root)
        held[variant].append(picture_file(path)._replace(box=box_of.get(number)))
    return Listing(_classes(held, domain), "FGVC-Aircraft variants, cut to their boxes")


def flowers(root: Path, domain: str) -> Listing | None:
    """Read Flowers-102: ``jpg/image_*.jpg`` with the class of each in ``imagelabels.mat``."""
    labels = root / "imagelabels.mat"
    if not labels.is_file() or not (root / "jpg").is_dir():
        return None
    numbers = [int(number) for number in read_numbers(labels, "labels")]
    pictures = [picture for parts, picture in list_folder(root / "jpg")[0] if not parts]
    if len(pictures) != len(numbers):
        raise DataError(f"{labels}: has {len(numbers)} labels for {len(pictures)} pictures in jpg.")
    held: dict[str, list[Picture]] = defaultdict(list)
    for number, picture in zip(numbers, pictures, strict=True):
        held[f"{number:03d}"].append(picture)
    return Listing(_classes(held, domain), "Flowers-102")


LAYOUTS: dict[str, Reader] = {
    "btaf": btaf,
    "omniglot": omniglot,
    "mini-imagenet-cache": mini_imagenet_cache,
    "mini-imagenet-csv": mini_imagenet_csv,
    "tiered-imagenet": tiered_imagenet,
    "split-pickles": split_pickles,
    "cifar-fs-folders": cifar_fs_folders,
    "cub": cub,
    "fgvc-aircraft": fgvc_aircraft,
    "flowers": flowers,
}


def _read(folder: Path, domain: str) -> Listing | None:
    try:
        return next((r for reader in LAYOUTS.values() if (r := reader(folder, domain))), None)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}).") from error


def _inner_folders(folder: Path) -> list[Path]:
    """Return the folders inside a folder, if they are few: data in its wrapping, not classes."""
    try:
        inner = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror}).") from error
    return inner if len(inner) <= _MANY else []


def _classes(held: Mapping[str, list[Picture]], domain: str) -> tuple[ListedClass, ...]:
    return tuple(ListedClass(name, held[name], None, domain) for name in sorted(held))


def _lines(path: Path, *, missing_ok: bool = False) -> list[str]:
    if missing_ok and not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error
    return [line.strip() for line in lines if line.strip()]


def _pairs(path: Path) -> dict[str, str]:
    """Read lines of a key and, after a space, a value."""
    pairs = [line.split(maxsplit=1) for line in _lines(path)]
    short = [pair for pair in pairs if len(pair) != 2]
    if short:
        raise DataError(f"{path}: expected a number and a name in every line, got {short[0]}.")
    return dict(pairs)


def _csv_rows(path: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader(_lines(path)))
    for row in rows:
        if not row.get("filename") or not row.get("label"):
            raise DataError(f"{path}: every row needs a filename and a label, got {row}.")
    return rows


def _numbers(texts: list[str], count: int, *, path: Path) -> list[int]:
    try:
        numbers = [round(float(text)) for text in texts]
    except (ValueError, OverflowError) as error:
        raise DataError(f"{path}: expected numbers, got {texts}.") from error
    if len(numbers) != count:
        raise DataError(f"{path}: expected {count} numbers, got {texts}.")
    return numbers


def _below(folder: Path, name: str, listed_in: Path) -> Path:
    """Join a name from a list to a folder, unless it leads elsewhere."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DataError(f"{listed_in}: names a picture outside its folder: {name!r}.")
    return folder / name
