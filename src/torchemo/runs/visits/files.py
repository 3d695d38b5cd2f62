"""The bytes of a store, in a folder or in an exported zip; everything is checked before it is used."""

import contextlib
import errno
import hashlib
import lzma
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

from torchemo.core.errors import CheckpointError, ConfigError, ResourceError
from torchemo.core.types import Params
from torchemo.runs.folder import LOCK, OWNER, lock
from torchemo.runs.storage import durable, tensorfile
from torchemo.runs.storage.manifest import SUFFIX
from torchemo.runs.visits.index import INDEX, KINDS, MAX_INDEX, Bytes, Index, Kind, Visit, parse

FOLDER = "visits"
_BAD_ZIP = (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, lzma.LZMAError)
"""What a damaged zip makes zipfile raise, beside errors of other kinds."""
_FILE = re.compile(rf"[0-9a-f]{{16}}\.({'|'.join(KINDS)}){re.escape(SUFFIX)}")


def file_name(visit: str, kind: Kind) -> str:
    """Return the name of a file of a visit within the store."""
    return f"{FOLDER}/{visit}.{kind}{SUFFIX}"


class Source(Protocol):
    """Where the bytes of a store come from."""

    @property
    def path(self) -> Path:
        """Return the folder or file."""
        ...

    def read(self, name: str, *, most: int) -> bytes:
        """Read a file of at most this size."""
        ...


@final
@dataclass(frozen=True)
class FolderSource:
    """A store in its folder."""

    path: Path

    def read(self, name: str, *, most: int) -> bytes:
        """Read a file of at most this size."""
        what = f"{name} of {self.path}"
        try:
            with durable.open_regular(self.path / name) as handle:
                size = os.fstat(handle).st_size
                if size > most:
                    raise CheckpointError(f"{what} is damaged (size {size}, at most {most}).")
                return b"".join(durable.chunks(handle))
        except FileNotFoundError as error:
            raise CheckpointError(f"{what} is missing.") from error
        except OSError as error:
            raise CheckpointError(f"{what} cannot be read: {error.strerror or error}.") from error


@final
@dataclass(frozen=True)
class ZipSource:
    """A store that was exported."""

    path: Path

    def read(self, name: str, *, most: int) -> bytes:
        """Read a member of at most this size."""
        what = f"{name} of {self.path}"
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(name) as member:
                data = member.read(most + 1)
        except KeyError as error:
            raise CheckpointError(f"{what} is missing.") from error
        except (*_BAD_ZIP, OSError, EOFError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{what} cannot be read: {error}.") from error
        if len(data) > most:
            raise CheckpointError(f"{what} is damaged (more than {most} bytes).")
        return data


def is_store(path: Path) -> bool:
    """Return whether a folder holds a store."""
    return (path / INDEX).is_file()


def source_of(path: Path) -> Source:
    """Open a store in a folder, or an exported one."""
    if path.is_file():
        return ZipSource(path)
    if not is_store(path):
        why = "it has no " + INDEX if path.is_dir() else "there is no such folder"
        raise ConfigError(
            f"{path} is not a store: {why}.",
            hint="A store is made by: torchemo adapt RUN --remember STORE ...",
        )
    return FolderSource(path)


def read_index(source: Source) -> Index:
    """Read the index of a store."""
    return parse(source.read(INDEX, most=MAX_INDEX), what=f"{INDEX} of {source.path}")


def read_bytes(source: Source, visit: Visit, kind: Kind) -> bytes:
    """Read a file of a visit, as it was written."""
    name, expected = file_name(visit.id, kind), visit.file(kind)
    data = source.read(name, most=expected.size)
    got = hashlib.sha256(data).hexdigest()
    if got != expected.sha256:
        raise CheckpointError(
            f"{name} of {source.path} is damaged (SHA-256 {got[:12]}..., expected"
            f" {expected.sha256[:12]}...).",
            hint=f"Drop this visit with: torchemo memory forget {source.path} --visits {visit.id}",
        )
    return data


def read_tensors(source: Source, visit: Visit, kind: Kind) -> Params:
    """Read the tensors of a visit."""
    what = f"{file_name(visit.id, kind)} of {source.path}"
    data = read_bytes(source, visit, kind)
    tensors = tensorfile.decode(data, what=what)
    tensorfile.check_finite(tensors, what=what)
    return tensors


# -- writing -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Be the only one who changes a store; refused at once where that is not possible."""
    _refuse_other_folders(path)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock(path))
        except ResourceError as error:
            raise ResourceError(
                error.message, hint="Wait until it has finished, stop it, or use another store."
            ) from error
        yield


def _refuse_other_folders(path: Path) -> None:
    """Refuse a folder that holds anything but a store, before anything is written into it."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is not a folder, and a store is one.")
    if not path.is_dir() or is_store(path):
        return
    known = {LOCK, OWNER, FOLDER}  # what an interrupted first visit leaves
    others = [n for n in sorted(os.listdir(path)) if n not in known and n[:5] != durable.TEMPORARY]
    if others:
        raise ConfigError(
            f"{path} is not a store: it holds {others[0]!r}.",
            hint="Name a new folder, or the folder of a store.",
        )


def sweep(path: Path, index: Index | None) -> None:
    """Delete what an interrupted writer left: files that the index does not name."""
    with changing(path):
        durable.make_folder(path / FOLDER)
        durable.sweep(path)
        durable.sweep(path / FOLDER)
        _remove_unnamed(path, index)


def _remove_unnamed(path: Path, index: Index | None) -> None:
    named = set() if index is None else {
        Path(file_name(visit.id, kind)).name for visit in index.visits for kind in KINDS
    }  # fmt: skip
    gone = [n for n in os.listdir(path / FOLDER) if _FILE.fullmatch(n) and n not in named]
    for name in gone:
        os.unlink(path / FOLDER / name)
    if gone:
        durable.sync_folder(path / FOLDER)


def write_file(path: Path, visit: str, kind: Kind, data: bytes) -> Bytes:
    """Write a file of a visit that no index names yet."""
    target = path / file_name(visit, kind)
    with changing(path):
        durable.require_space(target.parent, len(data))
        try:
            return Bytes(len(data), durable.write_new(target, data))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(target)
            raise


def commit(path: Path, index: Index) -> None:
    """Make ``index`` the state of the store, and delete the files that it does not name.

    Whenever the process dies, there is the old state or the new one. Files that only the old one named are
    gone when this returns.
    """
    with changing(path):
        durable.sync_folder(path / FOLDER)
        durable.replace_file(path / INDEX, index.to_bytes())
        _remove_unnamed(path, index)


def export(source: Source, index: Index, out: Path) -> None:
    """Write a store into one zip file, which appears when it is complete."""
    if out.exists():
        raise ConfigError(f"{out} exists already.", hint="Name another file.")
    temporary = out.with_name(f"{durable.TEMPORARY}{out.name}-{os.urandom(16).hex()}")
    with changing(out.parent), _removed_afterwards(temporary):
        with zipfile.ZipFile(temporary, "x", zipfile.ZIP_STORED) as archive:
            archive.writestr(_member(INDEX), index.to_bytes())
            for visit in index.visits:
                for kind in KINDS:
                    data = read_bytes(source, visit, kind)
                    archive.writestr(_member(file_name(visit.id, kind)), data)
        os.replace(temporary, out)
        durable.sync_folder(out.parent)


def _member(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name)  # without a date: equal stores give equal files
    member.external_attr = (stat.S_IFREG | 0o644) << 16
    return member


@contextlib.contextmanager
def _removed_afterwards(path: Path) -> Iterator[None]:
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def changing(path: Path) -> Iterator[None]:
    """Say in words why a store cannot be written."""
    try:
        yield
    except OSError as error:
        hints = {
            errno.ENOSPC: "Free some disk space and try again; the store is as it was.",
            errno.EDQUOT: "Your disk quota is used up; the store is as it was.",
        }
        raise ResourceError(
            f"cannot write {path}: {error.strerror or error}.",
            hint=hints.get(
                error.errno or 0, "Check that the folder may be written; the store is as it was."
            ),
        ) from error
