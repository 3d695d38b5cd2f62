"""What a run was computed with: enough to repeat it, nothing that names the machine or its user."""

import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch

from torchemo.core.errors import DataError
from torchemo.core.workers import usable_cores
from torchemo.models.fused import status
from torchemo.runs.storage.durable import read_regular
from torchemo.runs.storage.seal import without_digest
from torchemo.training.device import HERE, Place

PACKAGES = (
    "torchemo",
    "torch",
    "numpy",
    "safetensors",
    "pillow",
    "scipy",
    "tyro",
    "rich",
    "jaxtyping",
    "matplotlib",
    "jinja2",
    "tensorboard",
    "wandb",
    "faiss-cpu",
)
_BITS = (
    ("torch", "version"),
    ("torch", "capability"),
    ("cpu", "model"),
    ("convolutions",),
    ("place",),
)
_VERSIONS = (*_BITS, ("packages", "torchemo"))
"""What processes that train together must share."""
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def versions() -> dict[str, str]:
    """Return the versions that decide what a checkpoint means."""
    return {
        "torchemo": _version("torchemo") or "unknown",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "safetensors": safetensors.__version__,
    }


def environment(place: Place = HERE) -> dict[str, Any]:
    """Describe interpreter, torch build, device, threads, processor and packages, ready for JSON.

    Resuming is bitwise where `differences` finds none.
    """
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "byteorder": sys.byteorder,
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count(), "usable": usable_cores()},
        "torch": _torch_build(),
        "convolutions": status().build or "torch",
        "place": place.words,
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "commit": commit_of(Path(__file__).parent),
    }


def kinds(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of an environment that processes which train together must share."""
    return {".".join(path): _at(found, path) for path in _VERSIONS}


def _at(found: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    for part in path:
        found = found.get(part, {})
    return found


def since_the_start(file: Path, place: Place) -> str | None:
    """Say why a run may not continue bit for bit; None if it will, or if nobody can tell."""
    try:
        then = json.loads(read_regular(file))
        if not isinstance(then, dict):
            raise ValueError(f"it is a {type(then).__name__}")
        then = without_digest(then, what=file.name)
    except DataError as error:
        return error.message
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        return (
            f"{file.name} cannot be read ({why!s:.100}): whether bits stay the same is not known."
        )
    changed = differences(then, environment(place))
    return (
        f"continues, but not bit for bit as it was started: {'; '.join(changed)}"
        if changed
        else None
    )


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say in what two environments differ that may change the last bits of a result.

    Args:
        then: What `environment` returned when a run was started, perhaps by an older version.
        now: What it returns now.
    """
    found = []
    for *path, what in _BITS:
        old, new = then, now
        for part in path:
            old, new = (e.get(part, {}) if isinstance(e, Mapping) else {} for e in (old, new))
        if isinstance(old, Mapping) and what in old and old[what] != new[what]:
            found.append(f"{'.'.join((*path, what))} {old[what]} -> {new[what]}")
    return found


def commit_of(package: Path) -> str | None:
    """Return the git commit of the source tree that ``package`` lies in as ``src/<name>``.

    Only files are read and no program is started. An installed package has no commit, also when it is
    installed below somebody's repository.
    """
    root = package.parent.parent
    if package.parent.name != "src" or not (root / "pyproject.toml").is_file():
        return None
    git = root / ".git"
    pointer = _first_line(git) if git.is_file() else ""
    if pointer.startswith("gitdir: "):
        git = root / pointer.removeprefix("gitdir: ")
    head = _first_line(git / "HEAD")
    common = git / (_first_line(git / "commondir") or ".")
    found = _resolve(common, head.removeprefix("ref: ")) if head.startswith("ref: ") else head
    return found if _COMMIT.fullmatch(found) else None


def _resolve(git: Path, ref: str) -> str:
    """Look a branch up as a file of its own, then among the packed ones."""
    if not ref.startswith("refs/") or ".." in ref:
        return ""
    loose = _first_line(git / ref)
    if loose:
        return loose
    packed = git / "packed-refs"
    lines = packed.read_text(errors="replace").splitlines() if packed.is_file() else []
    return next((line.split(" ")[0] for line in lines if line.endswith(f" {ref}")), "")


def _first_line(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.readline(4096).strip()
    except OSError:
        return ""


def _torch_build() -> dict[str, Any]:
    return {
        "version": str(torch.__version__),
        "commit": torch.version.git_version,
        "cuda": torch.version.cuda,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _cpu_model() -> str:
    try:
        with Path("/proc/cpuinfo").open(errors="replace") as lines:
            found = next((line for line in lines if line.startswith("model name")), "")
    except OSError:
        found = ""
    return found.partition(":")[2].strip() or platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
