"""Folders of class folders, the form most people have."""

import os
import stat
from functools import partial
from pathlib import Path

from torchemo.core.errors import DataError
from torchemo.data.formats.archive import is_picture
from torchemo.data.listing import Picture

MAX_DEPTH = 6
MAX_FILE_BYTES = 1 << 27


def list_folder(
    root: Path,
) -> tuple[list[tuple[tuple[str, ...], Picture]], list[tuple[str, ...]]]:
    """List the images below a folder, and the folders without anything below them.

    Hidden files and files that do not promise to be images are passed over. Links are followed, down
    to a limited depth, so that a circle of links ends.

    Returns:
        Folders above each image with the image, in sorted order; and the empty folders.
    """
    pictures: list[tuple[tuple[str, ...], Picture]] = []
    empty: list[tuple[str, ...]] = []
    for place, folders, files in os.walk(root, followlinks=True, onerror=_refuse):
        parts = Path(place).relative_to(root).parts
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__MACOSX")
        if len(parts) >= MAX_DEPTH:
            folders.clear()
        found = sorted(file for file in files if is_picture((file,)))
        pictures += ((parts, picture_file(Path(place, file))) for file in found)
        if not found and not folders and parts:
            empty.append(parts)
    return pictures, empty


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
