"""Folders of class folders, the form most people have."""

import os
import stat
from functools import partial
from pathlib import Path

from torchemo.core.errors import DataError
from torchemo.data.formats.archive import is_picture
from torchemo.data.listing import Picture

MAX_DEPTH = 6
MAX_FOLDERS = 200_000
MAX_FILE_BYTES = 1 << 27


def list_folder(
    root: Path,
) -> tuple[list[tuple[tuple[str, ...], Picture]], list[tuple[str, ...]]]:
    """List the images below a folder, and the folders without anything below them.

    Hidden files and files that do not promise to be images are passed over. Links are followed, but for
    those that lead back to a folder they lie in; so a circle of links ends.

    Returns:
        Folders above each image with the image, in sorted order; and the empty folders.
    """
    pictures: list[tuple[tuple[str, ...], Picture]] = []
    empty: list[tuple[str, ...]] = []
    above = {str(root): frozenset((_identity(root),))}
    walk = os.walk(root, followlinks=True, onerror=_refuse)
    for visited, (place, folders, files) in enumerate(walk, start=1):
        parts = Path(place).relative_to(root).parts
        inner = sorted(f for f in folders if not f.startswith(".") and f != "__MACOSX")
        folders.clear()
        ways = above.pop(place)
        for name in inner if len(parts) < MAX_DEPTH else ():
            path = os.path.join(place, name)
            if (known := _identity(path)) not in ways:
                above[path] = ways | {known}
                folders.append(name)
        if visited > MAX_FOLDERS:
            raise DataError(f"{root}: has more than {MAX_FOLDERS} folders in it.")
        found = sorted(file for file in files if is_picture((file,)))
        pictures += ((parts, picture_file(Path(place, file))) for file in found)
        if not found and not folders and parts:
            empty.append(parts)
    return pictures, empty


def _identity(path: Path | str) -> tuple[int, int]:
    try:
        about = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    return about.st_dev, about.st_ino


def picture_file(path: Path) -> Picture:
    """Name an image file and say how to read it."""
    return Picture(str(path), partial(_read, path))


def _read(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path}: is no ordinary file.")
        if status.st_size > MAX_FILE_BYTES:
            raise DataError(f"{path}: has {status.st_size} bytes, too many for an image.")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be listed ({error.strerror}).") from error
