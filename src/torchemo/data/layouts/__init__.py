"""Image sets as their authors publish them, recognised from what lies on disk.

A layout is a function ``(folder, domain) -> Listing``, or None where a folder is of another layout: one file,
one line here. Layouts that are plain class folders (DTD, FGVCx Fungi, miniImageNet folders) need no reader.
"""

from pathlib import Path

from torchemo.config.registry import Registry
from torchemo.core.errors import DataError
from torchemo.data.listing import Listing

LAYOUTS = Registry(
    "data layout",
    "data.source",
    {
        "btaf": "torchemo.data.layouts.btaf:btaf",
        "omniglot": "torchemo.data.layouts.omniglot:omniglot",
        "mini-imagenet-cache": "torchemo.data.layouts.arrays:mini_imagenet_cache",
        "mini-imagenet-csv": "torchemo.data.layouts.mini_imagenet:mini_imagenet_csv",
        "tiered-imagenet": "torchemo.data.layouts.arrays:tiered_imagenet",
        "split-pickles": "torchemo.data.layouts.arrays:split_pickles",
        "cifar-fs-folders": "torchemo.data.layouts.cifar_fs:cifar_fs_folders",
        "cub": "torchemo.data.layouts.cub:cub",
        "fgvc-aircraft": "torchemo.data.layouts.fgvc_aircraft:fgvc_aircraft",
        "flowers": "torchemo.data.layouts.flowers102:flowers",
    },
    group="torchemo.layouts",
)

_MANY = 40


def recognise(path: Path, *, domain: str) -> Listing | None:
    """Return the listing of a published layout, at a folder or up to two folders below it."""
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
