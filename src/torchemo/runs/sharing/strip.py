"""A run as others may have it: weights and memory, without images or places on this machine."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchemo.config.run import RunConfig
from torchemo.config.toml import UNSET, dumps
from torchemo.core.errors import CheckpointError, ConfigError
from torchemo.core.types import Params
from torchemo.memory.scale.segments import FileRows
from torchemo.runs.experiment import complete
from torchemo.runs.folder import RunFolder
from torchemo.runs.load import best_checkpoint, check_config, config_hash, read_config
from torchemo.runs.storage import checkpoint, versions

SHARED = ("params", "memory", "emo", "progress")
"""What a shared checkpoint holds. The others serve training alone, and one of them keeps support images."""
IMAGES = "support_x"
"""Note of a memory that computes its keys again from support images."""


def write_stripped(run: Path, out: Path, *, step: int | None = None) -> checkpoint.Checkpoint:
    """Write the best checkpoint of a run, or that of ``step``, and its configuration into another folder.

    The folder is a run that `torchemo.load` opens. Places of data and weights are reduced to names.

    Returns:
        The checkpoint of the run.

    Raises:
        CheckpointError: Its memory keeps support images.
        ConfigError: The folder holds another run.
    """
    config, saved = read_config(run), best_checkpoint(run, step=step)
    check_config(run, config, saved.manifest)
    _refuse_images(run, saved.groups.get("memory", {}))
    if checkpoint.published(out):
        raise ConfigError(f"{out} holds a run already.", hint="Choose another folder.")
    nameless = without_places(config)
    info: dict[str, Any] = {**saved.info, "config": dumps(complete(nameless))}
    info["progress"] = {**info["progress"], "best_step": saved.step}
    folder = RunFolder(out)
    folder.save(folder.config, dumps(complete(nameless)))
    groups = {name: group for name, group in saved.groups.items() if name in SHARED}
    if (values := versions.named(groups.get("memory", {}))) is not None:
        groups["memory"] = _with_values(groups["memory"], values, config)
        del info[versions.VALUES]
    checkpoint.publish(
        out,
        saved.step,
        groups=groups,
        info=info,
        config_hash=config_hash(nameless),
    )
    return saved


def without_places(config: RunConfig) -> RunConfig:
    """Return a configuration that names files without their folders."""
    data, model = config.data, config.model
    named = replace(
        data,
        source=tuple(Path(source).name for source in data.source),
        splits=None if data.splits is None else Path(data.splits).name,
    )
    memory = config.memory
    if versions.folder_of(config) is not None:
        memory = memory.set(values_dir=UNSET)
    weights = model.options.get("weights")
    if isinstance(weights, str):
        model = model.set(weights=Path(weights).name)
    return replace(config, data=named, model=model, memory=memory)


def _with_values(memory: Params, version: str, config: RunConfig) -> Params:
    """Return the state of a memory with its values in it, which were in files."""
    rows = FileRows.opened(Path(config.memory.options["values_dir"]), version)
    kept = {name: tensor for name, tensor in memory.items() if name != versions.NAME}
    return kept | {f"store.values.{name}": tensor for name, tensor in rows.tensors().items()}


def _refuse_images(run: Path, memory: Mapping[str, Any]) -> None:
    if any(name.endswith(IMAGES) for name in memory):
        raise CheckpointError(
            f"{run}: its memory keeps support images, which may not be yours to give away.",
            hint="Share a run whose memory does not compute its keys again.",
        )
