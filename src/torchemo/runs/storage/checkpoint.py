"""Checkpoints that are safe to use: published whole or not at all, verified before they are used.

A checkpoint is ``run/checkpoints/step-<N>/``: one safetensors file per group of tensors, and a sealed
manifest. It exists if and only if its folder has its final name. There is no pointer to the latest one:
the latest is the highest step that verifies. All functions that change something are for the one writer
that holds the lock of the run (`torchemo.runs.folder`).
"""

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

from torch import Tensor

from torchemo.core.errors import CheckpointError, ResourceError
from torchemo.core.machine import physical_memory
from torchemo.runs.environment import versions
from torchemo.runs.storage import durable, manifest, tensorfile
from torchemo.runs.storage.durable import StrPath
from torchemo.runs.storage.manifest import MANIFEST, SUFFIX, FileEntry, Manifest

Groups: TypeAlias = Mapping[str, Mapping[str, Tensor]]
"""Named groups of named tensors: ``{"state": {name: tensor}, "memory": {name: tensor}}``."""

_STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,14})")


@final
@dataclass(frozen=True)
class Checkpoint:
    """A verified state: its manifest, and its tensors in the order in which they were saved."""

    path: Path
    manifest: Manifest
    groups: dict[str, dict[str, Tensor]]

    @property
    def step(self) -> int:
        """Outer steps done when it was saved."""
        return self.manifest.step

    @property
    def info(self) -> Mapping[str, Any]:
        """What the writer saved beside the tensors."""
        return self.manifest.info


def folder_of(run: StrPath) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(run) / "checkpoints"


def step_folder(run: StrPath, step: int) -> Path:
    """Return where the checkpoint of ``step`` is, or would be."""
    return folder_of(run) / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step that a published folder is named after."""
    return int(path.name.removeprefix("step-"))


def published(run: StrPath) -> list[Path]:
    """List the checkpoints of a run by step, lowest first, without looking into them."""
    try:
        names = os.listdir(folder_of(run))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder_of(run)} cannot be read: {error.strerror}.") from error
    paths = [folder_of(run) / name for name in names if _STEP.fullmatch(name)]
    return sorted(paths, key=step_of)


def size_of(groups: Groups) -> int:
    """Return the bytes of all tensors: what a checkpoint of them takes on the disk, nearly."""
    return sum(t.numel() * t.element_size() for group in groups.values() for t in group.values())


# -- saving ------------------------------------------------------------------------------------------


def publish(
    run: StrPath,
    step: int,
    *,
    groups: Groups,
    info: Mapping[str, Any] | None = None,
    config_hash: str = "",
    nonfinite_ok: Collection[str] = (),
) -> Path:
    """Save ``groups`` and ``info`` as the checkpoint of ``step``; return its folder when it is on the disk.

    Whenever the process dies or the power fails, there is the old state or the new one
    (`durable.publishing`).

    Args:
        run: Folder of the run.
        step: Outer steps done. A step is never overwritten.
        groups: Named groups of dense tensors; one file each.
        info: Anything JSON holds exactly.
        config_hash: Fingerprint of the configuration this state belongs to.
        nonfinite_ok: Groups that may hold NaN or infinity. Elsewhere they are refused: a diverged state
            must not take the place of the last finite one.
    """
    details = dict(info or {})
    manifest.check_info(details)
    _check_groups(groups, step, nonfinite_ok=nonfinite_ok)
    final_path = _free_folder(run, step)
    try:
        durable.make_folder(final_path.parent)
        durable.require_space(final_path.parent, size_of(groups))
        with durable.publishing(final_path) as folder:
            _write_files(folder, step, groups, details, config_hash)
    except OSError as error:
        raise _cannot_save(run, step, error) from error
    return final_path


def _free_folder(run: StrPath, step: int) -> Path:
    manifest.check_step(step)
    path = step_folder(run, step)
    if os.path.lexists(path):
        raise CheckpointError(
            f"step {step} is saved already: {path}.",
            hint="A step is never overwritten; to continue from an earlier one, rewind the run first.",
        )
    return path


def _check_groups(groups: Groups, step: int, *, nonfinite_ok: Collection[str]) -> None:
    for group, tensors in groups.items():
        manifest.check_group(group)
        what = f"cannot save step {step}, group '{group}'"
        tensorfile.check_encodable(tensors, what=what)
        if group not in nonfinite_ok:
            tensorfile.check_finite(tensors, what=what)


def _write_files(
    folder: Path, step: int, groups: Groups, info: Mapping[str, Any], config_hash: str
) -> None:
    entries = {name: _write_group(folder, name, tensors) for name, tensors in groups.items()}
    text = Manifest(step, config_hash, versions(), info, entries).to_bytes()
    if len(text) > manifest.MAX_MANIFEST:
        raise CheckpointError(
            f"cannot save step {step}: its manifest takes {durable.megabytes(len(text))},"
            f" at most {durable.megabytes(manifest.MAX_MANIFEST)} can be read back.",
            hint="Put large things into tensors instead of info.",
        )
    durable.write_new(folder / MANIFEST, text)


def _write_group(folder: Path, group: str, tensors: Mapping[str, Tensor]) -> FileEntry:
    data = tensorfile.encode(tensors)
    header = int.from_bytes(data[:8], "little")
    if header > tensorfile.MAX_HEADER:
        raise CheckpointError(
            f"cannot save group '{group}': the names and shapes of its {len(tensors)} tensors take"
            f" {durable.megabytes(header)}, at most"
            f" {durable.megabytes(tensorfile.MAX_HEADER)} can be read back.",
            hint="Stack tensors of the same shape.",
        )
    sha256 = durable.write_new(folder / (group + SUFFIX), data)
    return FileEntry(len(data), sha256, tensorfile.specs_of(tensors))


def _cannot_save(run: StrPath, step: int, error: OSError) -> ResourceError:
    hints = {
        errno.ENOSPC: "Free some disk space, then resume the run.",
        errno.EDQUOT: "Your disk quota is used up: free some space, then resume the run.",
        errno.EFBIG: "The file would be larger than allowed here (see ulimit -f).",
        errno.EACCES: "Check that you may write to this folder.",
        errno.EROFS: "This file system is read-only: put the run elsewhere.",
    }
    good = "none"
    with contextlib.suppress(CheckpointError):
        good = next((path.name for path in reversed(published(run)) if is_sound(path)), good)
    return ResourceError(
        f"cannot save step {step} in {folder_of(run)}: {error.strerror or error}; last good: {good}.",
        hint=hints.get(error.errno or 0, "Check the disk, then resume the run."),
    )


# -- reading -----------------------------------------------------------------------------------------


def read_manifest(path: StrPath) -> Manifest:
    """Read and check the manifest of one checkpoint; tensors are not looked at."""
    place = Path(path)
    what = f"{MANIFEST} of {place.name}"
    found = manifest.parse(_manifest_bytes(place, what), what=what)
    if _STEP.fullmatch(place.name) and step_of(place) != found.step:
        raise CheckpointError(f"{place.name} holds step {found.step}: the folder was renamed.")
    return found


def _manifest_bytes(place: Path, what: str) -> bytes:
    with _readable(what), durable.open_regular(place / MANIFEST) as handle:
        size = os.fstat(handle).st_size
        if size <= manifest.MAX_MANIFEST:
            return b"".join(durable.chunks(handle))
    raise CheckpointError(
        f"{what} should have at most {manifest.MAX_MANIFEST} bytes, got {size}: it was not opened."
    )


def is_newer(path: StrPath) -> bool:
    """Say whether a checkpoint is undamaged, as far as its manifest goes, but of a newer format."""
    try:
        return manifest.is_newer(_manifest_bytes(Path(path), MANIFEST))
    except CheckpointError:
        return False


def is_sound(path: StrPath) -> bool:
    """Check manifest, sizes and headers of a checkpoint, which is quick, but not every byte."""
    try:
        for group, entry in read_manifest(path).groups.items():
            with _opened(Path(path), group, entry):
                pass
    except CheckpointError:
        return False
    return True


def verify(path: StrPath) -> Manifest:
    """Check every byte of a checkpoint against its manifest, in little memory; return the manifest."""
    found = read_manifest(path)
    for group, entry in found.groups.items():
        with _opened(Path(path), group, entry) as handle:
            digest = hashlib.sha256()
            for chunk in durable.chunks(handle):
                digest.update(chunk)
            _check_digest(digest.hexdigest(), entry, what=_name(Path(path), group))
    return found


def load(
    path: StrPath, *, like: Groups | None = None, nonfinite_ok: Collection[str] = ()
) -> Checkpoint:
    """Read a checkpoint; everything is checked before it is used.

    Args:
        path: Folder of the checkpoint.
        like: Groups whose tensors must be saved with the same names, dtypes and shapes as these; asked
            of the manifest, before any tensor is read. Other groups may hold anything.
        nonfinite_ok: Groups that may hold NaN or infinity.

    Raises:
        CheckpointError: It is damaged, of a newer format, not finite, or does not fit ``like``.
        ResourceError: It is larger than the memory of this machine.
    """
    place = Path(path)
    found = read_manifest(place)
    _check_like(found, like or {}, what=place.name)
    _require_memory(found.size, what=place.name)
    groups = {}
    for group, entry in found.groups.items():
        groups[group] = _load_group(place, group, entry)
        if group not in nonfinite_ok:
            tensorfile.check_finite(groups[group], what=_name(place, group))
    return Checkpoint(place, found, groups)


def _load_group(place: Path, group: str, entry: FileEntry) -> dict[str, Tensor]:
    what = _name(place, group)
    with _opened(place, group, entry) as handle, open(handle, "rb", closefd=False) as file:
        data = file.read()
    # The bytes that are hashed are the bytes that are used: the file is not opened again.
    _check_digest(hashlib.sha256(data).hexdigest(), entry, what=what)
    tensors = tensorfile.decode(data, what=what)
    return {name: tensors[name] for name in entry.tensors}


def _name(place: Path, group: str) -> str:
    return f"{group}{SUFFIX} of {place.name}"


@contextlib.contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{what} is missing.") from error
    except OSError as error:
        raise CheckpointError(f"{what} cannot be read: {error.strerror or error}.") from error


@contextlib.contextmanager
def _opened(place: Path, group: str, entry: FileEntry) -> Iterator[int]:
    """Open the file of a group after checking its size and its header."""
    what = _name(place, group)
    with _readable(what), durable.open_regular(place / (group + SUFFIX)) as handle:
        size = os.fstat(handle).st_size
        if size != entry.size:
            raise CheckpointError(f"{what} is damaged (size {size}, expected {entry.size}).")
        _check_specs(
            tensorfile.read_specs(handle, size, what=what), entry.tensors, what=f"{what} is damaged"
        )
        yield handle


def _check_specs(got: Mapping[str, str], expected: Mapping[str, str], *, what: str) -> None:
    for name in [*expected, *got]:
        if got.get(name) != expected.get(name):
            raise CheckpointError(
                f"{what}: tensor {name!r:.100} should be {expected.get(name, 'absent'):.100},"
                f" got {got.get(name, 'nothing'):.100}."
            )


def _check_digest(got: str, entry: FileEntry, *, what: str) -> None:
    if got != entry.sha256:
        raise CheckpointError(
            f"{what} is damaged (SHA-256 {got[:12]}..., expected {entry.sha256[:12]}...)."
        )


def _check_like(found: Manifest, like: Groups, *, what: str) -> None:
    for group, tensors in like.items():
        if group not in found.groups:
            raise CheckpointError(
                f"{what} should have a group '{group}', got {', '.join(found.groups):.200}."
            )
        _check_specs(
            found.groups[group].tensors,
            tensorfile.specs_of(tensors),
            what=f"{what} belongs to something else, group '{group}'",
        )


def _require_memory(size: int, *, what: str) -> None:
    machine = physical_memory()
    if machine is not None and size > machine:
        raise ResourceError(
            f"{what} holds {durable.megabytes(size)} of tensors,"
            f" this machine has {durable.megabytes(machine)} of memory."
        )
