"""Zip archives of images, read member by member and never unpacked to disk."""

import stat
import struct
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO, final

from torchemo.core.errors import DataError
from torchemo.data.listing import PICTURE_SUFFIXES, Picture

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY_BYTES = 46


@final
@dataclass(frozen=True)
class Caps:
    """What an archive may be at most; more is refused before anything is read."""

    members: int = 500_000
    directory_bytes: int = 1 << 27
    member_bytes: int = 1 << 27
    total_bytes: int = 1 << 37
    ratio: int = 200
    """Unpacked to packed size, for members above one megabyte."""


def list_zip(path: Path, *, caps: Caps | None = None) -> list[tuple[tuple[str, ...], Picture]]:
    """List the images of a zip archive: folders above each image, and the image.

    The archive stays open as long as one of the images is in use.
    """
    archive, members = open_zip(path, caps=caps)
    found = []
    for member in members:
        place = PurePosixPath(member.filename)
        if is_picture(place.parts):
            picture = Picture(
                f"{path.name}:{member.filename}", partial(_read, archive, member, path)
            )
            found.append((place.parts[:-1], picture))
    return found


def is_zip(path: Path) -> bool:
    """Say whether a path is a file that goes by the name of a zip archive."""
    return path.is_file() and path.suffix.lower() == ".zip"


def list_part(path: Path, part: str) -> list[tuple[tuple[str, ...], Picture]]:
    """List the images of an archive: all of them, or one part of what the web page saved.

    The page saves ``support`` and ``query`` in one archive; ``part`` is one of the two.
    """
    found = list_zip(path)
    if {folders[:1] for folders, _ in found} <= {("support",), ("query",)}:
        return [(folders[1:], picture) for folders, picture in found if folders[0] == part]
    return found


def open_zip(
    path: Path, *, caps: Caps | None = None
) -> tuple[zipfile.ZipFile, list[zipfile.ZipInfo]]:
    """Open an archive and return it with its files, every one of them checked."""
    caps = caps or Caps()
    try:
        with path.open("rb") as stream:
            _check_directory(stream, caps, name=path.name)
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
        raise DataError(f"{path}: is no readable zip archive ({error}).") from error
    try:
        _check_members(archive.infolist(), caps, name=path.name)
    except DataError:
        archive.close()
        raise
    return archive, [member for member in archive.infolist() if not member.is_dir()]


def is_picture(parts: tuple[str, ...]) -> bool:
    """Say whether a path, in parts, names an image and not a hidden or system file."""
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in parts)
    return not hidden and PurePosixPath(parts[-1]).suffix.lower() in PICTURE_SUFFIXES


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> bytes:
    try:
        # Asking for a number of bytes bounds what a member that lies about its size can unpack.
        with archive.open(member) as stream:
            return stream.read(member.file_size + 1)
    except Exception as error:
        # Damaged members surface as many kinds of error; whatever it is, this member caused it.
        raise DataError(
            f"{path.name}:{member.filename}: cannot be read from the archive ({error})."
        ) from error


def _check_directory(stream: BinaryIO, caps: Caps, *, name: str) -> None:
    """Bound the table of contents before `zipfile` reads all of it into memory."""
    size = stream.seek(0, 2)
    tail_at = max(0, size - _END.size - 0xFFFF - _END64_LOCATOR.size)
    stream.seek(tail_at)
    tail = stream.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0:
        raise zipfile.BadZipFile("no end of table of contents")
    directory_bytes = _END.unpack_from(tail, at)[5]
    if at >= _END64_LOCATOR.size:
        magic, _, offset, _ = _END64_LOCATOR.unpack_from(tail, at - _END64_LOCATOR.size)
        if magic == b"PK\x06\x07":
            stream.seek(offset)
            directory_bytes = _END64.unpack(stream.read(_END64.size))[8]
    if directory_bytes > caps.directory_bytes or directory_bytes // _ENTRY_BYTES > 2 * caps.members:
        raise DataError(
            f"{name}: its table of contents has {directory_bytes} bytes, too many members.",
            hint="Unpack the archive yourself and use the folder.",
        )


def _check_members(members: list[zipfile.ZipInfo], caps: Caps, *, name: str) -> None:
    if len(members) > caps.members:
        raise DataError(f"{name}: has {len(members)} members, at most {caps.members} are read.")
    total = sum(member.file_size for member in members)
    if total > caps.total_bytes:
        raise DataError(f"{name}: unpacks to {total} bytes, at most {caps.total_bytes} are read.")
    seen: set[str] = set()
    for member in members:
        reason = _objection(member, caps)
        if member.filename in seen:
            reason = "is there twice"
        if reason is not None:
            raise DataError(
                f"{name}: refused because of its member {member.filename!r}, which {reason}.",
                hint="Use archives you trust, or unpack it yourself and use the folder.",
            )
        seen.add(member.filename)


def _objection(member: zipfile.ZipInfo, caps: Caps) -> str | None:
    name = member.filename
    parts = PurePosixPath(name).parts
    kind = stat.S_IFMT(member.external_attr >> 16)
    if not parts or name.startswith("/") or "\\" in name or parts[0][1:2] == ":":
        return "is not a plain relative path"
    if ".." in parts:
        return "points outside the archive"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a link or a device"
    if member.flag_bits & 0x1:
        return "is encrypted"
    if name.lower().endswith((".zip", ".tar", ".gz", ".7z", ".rar")):
        return "is an archive itself"
    if member.file_size > caps.member_bytes:
        return f"unpacks to {member.file_size} bytes"
    if member.file_size > max(1 << 20, caps.ratio * member.compress_size):
        return f"unpacks {member.file_size / max(1, member.compress_size):.0f}-fold"
    return None
