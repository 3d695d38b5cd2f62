"""The manifest of a checkpoint: what its files must be, byte for byte, sealed against damage."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torchemo.core.errors import CheckpointError
from torchemo.runs.storage.seal import seal, unseal

MANIFEST = "manifest.json"
FORMAT = "torchemo checkpoint"
FORMAT_VERSION = 1
"""Version of the layout that is written here. Every version up to it can be read, for ever."""

MAX_MANIFEST = 1 << 20
"""Bytes of the largest manifest that is read: whatever they say, it takes less than a second."""

SUFFIX = ".safetensors"
_GROUP = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_STEP = 10**15


@final
@dataclass(frozen=True)
class FileEntry:
    """What one file must be: bytes, SHA-256, and ``{tensor name: 'dtype[shape]'}`` in saved order."""

    size: int
    sha256: str
    tensors: Mapping[str, str]


@final
@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        step: Outer steps done when it was saved.
        config_hash: Fingerprint of the configuration it belongs to; empty if none was given.
        versions: Which software wrote it.
        info: Whatever else the writer wanted to find again, as JSON.
        groups: One file of tensors per group.
    """

    step: int
    config_hash: str
    versions: Mapping[str, str]
    info: Mapping[str, Any]
    groups: Mapping[str, FileEntry]

    @property
    def size(self) -> int:
        """Bytes of all files of tensors."""
        return sum(entry.size for entry in self.groups.values())

    def to_bytes(self) -> bytes:
        """Write the sealed JSON text. It holds no wall-clock: equal states have equal manifests."""
        files = {
            group + SUFFIX: {
                "size": entry.size,
                "sha256": entry.sha256,
                "tensors": dict(entry.tensors),
            }
            for group, entry in self.groups.items()
        }
        return seal(
            {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "step": self.step,
                "config_hash": self.config_hash,
                "versions": dict(self.versions),
                "info": dict(self.info),
                "files": files,
            }
        )


def check_group(group: str) -> None:
    """Raise `CheckpointError` unless ``group`` can be the name of a file everywhere."""
    if not _GROUP.fullmatch(group):
        raise CheckpointError(
            f"a group of tensors cannot be named {group!r}.",
            hint="Use a short word of a-z, 0-9 and _, such as 'state' or 'memory'.",
        )


def check_step(step: int) -> None:
    """Raise `CheckpointError` unless ``step`` can be the step of a checkpoint."""
    if not 0 <= step < _MAX_STEP:
        raise CheckpointError(f"a step should lie in 0..{_MAX_STEP - 1}, got {step}.")


def check_info(info: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` unless ``info`` comes back from JSON exactly as it is."""
    try:
        back = json.loads(json.dumps(info, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"info cannot be saved as JSON: {error}.") from error
    for name, value in info.items():
        if name not in back or back[name] != value:
            raise CheckpointError(
                f"info {name!r} would come back from JSON as something else than {value!r:.100}.",
                hint="Use str keys, lists instead of tuples, and plain numbers.",
            )


def parse(raw: bytes, *, what: str) -> Manifest:
    """Read a manifest with distrust; ``what`` names it in the error."""
    body = unseal(raw, what=what)
    try:
        version = _natural(body["format_version"], most=_MAX_STEP)
        versions = _texts(body["versions"])
        if body["format"] != FORMAT or version == 0:
            raise ValueError(f"format {body['format']!r} {version}")
        if version <= FORMAT_VERSION:
            return _manifest(body, versions)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{what} is not the manifest of a torchemo checkpoint ({error!r:.200})."
        ) from error
    raise CheckpointError(
        f"{what} has format {version}, written by torchemo {versions.get('torchemo', '?')!r:.40};"
        f" this torchemo reads formats up to {FORMAT_VERSION}.",
        hint="Upgrade torchemo to open it.",
    )


def is_newer(raw: bytes) -> bool:
    """Say whether these bytes are an undamaged manifest of a format that is newer than ours."""
    try:
        body = unseal(raw, what=MANIFEST)
    except CheckpointError:
        return False
    version = body.get("format_version")
    return body.get("format") == FORMAT and type(version) is int and version > FORMAT_VERSION


def _manifest(body: Mapping[str, Any], versions: Mapping[str, str]) -> Manifest:
    step, info = _natural(body["step"], most=_MAX_STEP - 1), body["info"]
    if not isinstance(info, dict):
        raise TypeError("info should be an object")
    groups = {}
    for name, entry in body["files"].items():
        group = name.removesuffix(SUFFIX)
        sha256 = _text(entry["sha256"])
        if group + SUFFIX != name or not _GROUP.fullmatch(group) or not _SHA256.fullmatch(sha256):
            raise ValueError(f"file {name!r}")
        groups[group] = FileEntry(
            _natural(entry["size"], most=2**63), sha256, _texts(entry["tensors"])
        )
    return Manifest(step, _text(body["config_hash"]), versions, info, groups)


def _natural(value: object, *, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} should be a whole number in 0..{most}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} should be text")
    return value


def _texts(value: Mapping[str, object]) -> dict[str, str]:
    return {name: _text(text) for name, text in value.items()}
