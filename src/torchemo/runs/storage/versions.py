"""Values in files that checkpoints name: which versions are still named, and which may go."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from torchemo.config.run import RunConfig
from torchemo.config.toml import UNSET
from torchemo.core.errors import CheckpointError
from torchemo.memory.interface import TaskMemory
from torchemo.memory.scale import version
from torchemo.runs.storage import checkpoint
from torchemo.runs.storage.durable import StrPath

NAME = "store.version"
"""Tensor in the state of a memory that keeps its values in files: the name of their version."""
VALUES = "values"
"""Field of a checkpoint with the same name, so that it is known without reading tensors."""


def owner_of(run: StrPath) -> str:
    """Return under which name a run keeps versions: a copied run leaves those of the other alone."""
    return str(Path(run).resolve())


def own(memory: TaskMemory | None, run: StrPath, *, rank: int = 0) -> None:
    """Let a run own the versions of its memory; checkpoints name those of rank 0."""
    if memory is not None:
        memory.store.owner = owner_of(run) if rank == 0 else None


def named(memory: Mapping[str, Tensor]) -> str | None:
    """Return the version that the state of a memory names; None if it holds its values."""
    found = memory.get(NAME)
    return None if found is None else bytes(found.tolist()).decode("ascii", "replace")


def info(memory: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what a checkpoint says of the version that its memory names."""
    name = named(memory)
    return {} if name is None else {VALUES: name}


def folder_of(config: RunConfig) -> Path | None:
    """Return where a run keeps its values; None if they are in its checkpoints."""
    place = config.memory.options.get("values_dir")
    return None if place in (None, UNSET) else Path(str(place))


def comparable(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a state that is equal in all ranks: the name of a version begins with a digest of its values."""
    named = {f"{group}/{n}": t for group, part in state.items() for n, t in part.items()}
    cut = version.DIGEST_ENDS
    return {n: t[:cut] if n.endswith(f"/{NAME}") else t for n, t in named.items()}


def collect(run: StrPath, folder: Path | None, *, also: Sequence[Path] = ()) -> list[str]:
    """Delete the versions of a run that none of its checkpoints names, also none that was put aside.

    While a checkpoint cannot be read, nothing is deleted.

    Args:
        run: The run.
        folder: Where its values are; None is nowhere.
        also: Other folders with checkpoints of the same owner.
    """
    if folder is None:
        return []
    keep = set()
    places = (checkpoint.folder_of(one) for one in (run, *also))
    for path in (path for place in places for path in place.glob("*step-*")):
        try:
            keep.add(str(checkpoint.read_manifest(path).info.get(VALUES)))
        except CheckpointError:
            return []
    return version.collect(folder, owner_of(run), keep=keep)
