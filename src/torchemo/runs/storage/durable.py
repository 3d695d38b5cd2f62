"""Files that are on the disk when we say so: write, sync, read back, replace, remove."""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

from torchemo.core.errors import ResourceError

StrPath: TypeAlias = str | os.PathLike[str]

TEMPORARY = ".tmp-"
"""How the name of everything unfinished or about to be deleted begins."""

_CHUNK = 1 << 20
# Systems without one of these have no links, pipes or text mode that it would guard against.
NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)
BINARY = getattr(os, "O_BINARY", 0)
_LEFTOVER = re.compile(r"\.tmp-.+-[0-9a-f]{32}")


def write_new(path: Path, data: bytes) -> str:
    """Create ``path`` with ``data``, force it to the disk, read it back, and return its SHA-256.

    The file gets the permissions of the umask, so that a group can share a run folder.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS | BINARY, 0o666)
    try:
        written = 0
        while written < len(data):
            written += os.write(handle, memoryview(data)[written:])
        os.fsync(handle)
        _forget_cached(handle)
    finally:
        os.close(handle)
    return _read_back(path, data)


def _forget_cached(handle: int) -> None:
    """Ask, where one can, that what is read back comes from the device and not from the page cache."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _read_back(path: Path, data: bytes) -> str:
    digest, at = hashlib.sha256(), 0
    with open_regular(path) as handle:
        for chunk in chunks(handle):
            if data[at : at + len(chunk)] != chunk:
                break
            digest.update(chunk)
            at += len(chunk)
        else:
            if at == len(data):
                return digest.hexdigest()
    raise OSError(errno.EIO, f"the disk gave back other bytes than were written, from byte {at} on")


def sync_folder(path: Path) -> None:
    """Force the names inside a folder to the disk."""
    if os.name == "nt":  # Windows opens no folders
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot sync a folder say EINVAL
            raise
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Create a folder and its parents so that they survive a power cut; existing ones are kept."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    sync_folder(path.parent)


def replace_file(path: StrPath, data: bytes) -> None:
    """Write a file so that a reader, or a crash, meets the old content or the new, never a mixture."""
    target = Path(path)
    temporary = target.with_name(f"{TEMPORARY}{target.name}-{uuid4().hex}")
    try:
        write_new(temporary, data)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(target.parent)


@contextlib.contextmanager
def publishing(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to fill with `write_new`; on leaving, publish it as ``folder``.

    The order is what makes it safe: files are synced when they are written, then the temporary folder is
    synced, renamed, and its parent synced. After an error nothing of the folder is left.
    """
    temporary = folder.with_name(f"{TEMPORARY}{folder.name}-{uuid4().hex}")
    try:
        os.mkdir(temporary)
        yield temporary
        sync_folder(temporary)
        os.rename(temporary, folder)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(temporary)
        raise
    try:
        sync_folder(folder.parent)
    except OSError:
        # Unsynced, the new name may vanish in a power cut: what cannot be promised is withdrawn.
        with contextlib.suppress(OSError):
            unpublish([folder])
        raise


def unpublish(folders: Sequence[Path]) -> None:
    """Delete published folders of one parent; each loses its name before it loses its first file."""
    trash = []
    for folder in folders:
        trash.append(folder.with_name(f"{TEMPORARY}trash-{uuid4().hex}"))
        os.rename(folder, trash[-1])
    if folders:
        # Without it a power cut could bring the name back without the files.
        sync_folder(folders[0].parent)
    for path in trash:
        remove(path)


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a regular file for reading; pipes and devices, which could block, are refused."""
    if not _AT_ONCE and not stat.S_ISREG(os.stat(path).st_mode):  # opening would wait
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    handle = os.open(path, os.O_RDONLY | _AT_ONCE | BINARY)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield handle
    finally:
        os.close(handle)


def read_regular(path: Path) -> bytes:
    """Read a whole regular file; pipes and devices, which could block, are refused."""
    with open_regular(path) as handle:
        return b"".join(chunks(handle))


def read_at(handle: int, count: int, place: int) -> bytes:
    """Read bytes at a place of an open file, and leave the handle where it stands."""
    if hasattr(os, "pread"):
        return os.pread(handle, count, place)
    here = os.lseek(handle, 0, os.SEEK_CUR)
    os.lseek(handle, place, os.SEEK_SET)
    try:
        return os.read(handle, count)
    finally:
        os.lseek(handle, here, os.SEEK_SET)


def chunks(handle: int) -> Iterator[bytes]:
    """Read on from where ``handle`` stands, piece by piece, to the end of the file."""
    while chunk := os.read(handle, _CHUNK):
        yield chunk


def remove(path: Path) -> None:
    """Delete a file or a whole folder; a symbolic link is deleted, what it points to is not."""
    if path.is_symlink() or not path.is_dir():
        os.unlink(path)
    else:
        _remove_folder(path)


def _remove_folder(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        # A Ctrl-C right after rmtree closed a descriptor makes it close that twice, and report the second
        # closing in place of the Ctrl-C.
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


def sweep(folder: Path) -> list[Path]:
    """Delete what an interrupted process left unfinished in ``folder``; return what was deleted.

    Only for the one writer of the folder: the temporaries of a living process look the same.
    """
    if not folder.is_dir():
        return []
    leftovers = sorted(path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name))
    for path in leftovers:
        remove(path)
    return leftovers


def require_space(folder: StrPath, needed: int, *, times: int = 1) -> None:
    """Raise `ResourceError` unless ``times`` x ``needed`` bytes are free where ``folder`` is, or will be.

    A run starts only with three times the size of a checkpoint: two that are kept and one in the making.
    """
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < times * needed:
        raise ResourceError(
            f"not enough disk space at {folder}: {times} x {megabytes(needed)} needed,"
            f" {megabytes(free)} free.",
            hint="Free some space, or put the run on another disk.",
        )


def megabytes(size: int) -> str:
    """Write a number of bytes for people."""
    return f"{size} bytes" if size < 10_000 else f"{size / 1e6:.2f} MB"
