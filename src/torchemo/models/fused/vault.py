"""Compiled code at rest: kept and loaded only where nobody else can write, and only as it was compiled.

A library's name ends in the SHA-256 of its bytes. Owner, permissions and bytes are checked on the open
descriptor, and the bytes that were checked are what is loaded. So a file that is swapped, cut short or
flipped is never run, and a page that is missing never kills the process.
"""

import contextlib
import ctypes
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".so"
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def private_folder(path: Path) -> Path:
    """Return a folder, made if needed, that only this user can fill; links are resolved.

    Raises:
        PermissionError: Somebody else can write it, or put another one into its place.
    """
    if not path.is_absolute():
        raise PermissionError(f"{path} is relative to the current folder")
    place = Path(os.path.realpath(path))
    for folder in reversed((place, *place.parents)):
        if not folder.is_dir():
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)  # with its parents, which the umask would open otherwise
    for folder in (place, *place.parents):
        about = folder.stat()
        # In a sticky folder, such as /tmp, nobody can rename what is another's.
        sticky = folder != place and about.st_mode & stat.S_ISVTX
        if not _owned(about, root_too=folder != place) or (about.st_mode & _OTHERS and not sticky):
            raise PermissionError(f"{folder} can be written by others")
    return place


def keep(folder: Path, key: str, code: bytes) -> Path:
    """Store a library under a key so that it survives a crash whole or not at all."""
    path = folder / f"{key}-{hashlib.sha256(code).hexdigest()}{SUFFIX}"
    temporary = folder / f"{path.name}.{os.getpid()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
    handle = os.open(temporary, flags, 0o600)
    try:
        with open(handle, "wb") as stream:
            stream.write(code)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(folder)
    return path


def find(folder: Path, key: str) -> Path | None:
    """Return the stored library of a key; what is damaged or not ours is removed."""
    for path in sorted(folder.glob(f"{key}-*{SUFFIX}")):
        try:
            with _checked(path):
                return path
        except OSError:
            path.unlink(missing_ok=True)
    return None


def load(path: Path) -> ctypes.CDLL:
    """Load a stored library.

    Raises:
        OSError: It is damaged, not ours, or no library.
    """
    with _checked(path) as code:
        held = _copied(code)
        if held is None:
            return ctypes.CDLL(str(path))
        try:
            # The loader knows libraries by name: the number must not come back while one is loaded by it.
            return ctypes.CDLL(f"/proc/self/fd/{held}")
        except OSError:
            os.close(held)
            raise


def _copied(code: bytes) -> int | None:
    """Put code where no file can be cut short under it; None where the system has no such place."""
    if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
        return None
    handle = os.memfd_create("torchemo-kernels", os.MFD_CLOEXEC)
    with open(handle, "wb", closefd=False) as stream:
        stream.write(code)
    return handle


@contextlib.contextmanager
def _checked(path: Path) -> Iterator[bytes]:
    """Give the bytes of a library that is ours and as it was stored, while it is open."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or not _owned(about) or about.st_mode & _OTHERS:
            raise PermissionError(f"{path} can be written by others")
        with open(handle, "rb", closefd=False) as stream:
            code = stream.read()
        if not path.stem.endswith(f"-{hashlib.sha256(code).hexdigest()}"):
            raise OSError(f"{path} is damaged")
        yield code
    finally:
        os.close(handle)


def _owned(about: os.stat_result, *, root_too: bool = False) -> bool:
    if not hasattr(os, "getuid"):  # Windows: other users' rights are not in the mode
        return True
    return about.st_uid == os.getuid() or (root_too and about.st_uid == 0)


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every system can sync a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
