"""Trained runs opened again: their configuration, their checkpoints, and the learner they hold."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, final

from torchemo.config.run import DataConfig, RunConfig
from torchemo.config.toml import from_dict, merged, read, to_dict
from torchemo.core.errors import CheckpointError, ConfigError, DataError
from torchemo.core.types import TaskShape
from torchemo.data.index import SPLITS
from torchemo.data.source import TaskSource
from torchemo.models import FrozenNetwork, frozen_network
from torchemo.runs.experiment import build_system, complete, open_tasks
from torchemo.runs.folder import RunFolder
from torchemo.runs.storage import checkpoint, history
from torchemo.runs.upgrade import is_old, upgraded
from torchemo.training.system import System


def read_config(root: Path) -> RunConfig:
    """Read the configuration of a run, complete; one of an earlier version gets the names of today."""
    path = RunFolder(root).config
    if not path.is_file():
        raise ConfigError(f"{root} is not a run: it has no {path.name}.")
    return complete(load_config(path))


def load_config(path: Path, *, base: RunConfig | None = None) -> RunConfig:
    """Read a configuration file; options that are not given keep those of ``base``."""
    given = read(path)
    plain = upgraded(given, where=str(path), base=base)
    if is_old(given):
        kind = plain["memory"]["name"]
        today = "" if kind == "none" else f"; its memory is what is called '{kind}' now"
        warnings.warn(f"{path} is of an earlier version{today}.", stacklevel=2)
    whole = plain if base is None else merged(to_dict(base), plain)
    config = from_dict(whole, RunConfig, where=str(path))
    try:
        complete(config)  # checks the options of parts
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint) from error
    return config


class Opened(NamedTuple):
    """A trained run with tasks to evaluate it on."""

    config: RunConfig
    source: TaskSource
    system: System


@final
@dataclass(frozen=True)
class Trained:
    """A run as it was saved, ready for tasks of the user's own; its data are not opened.

    Attributes:
        config: Its configuration.
        system: Learner, parameters and memory.
        shape: What the tasks looked like.
        domains: Names of the domains that remembered tasks came from.
    """

    config: RunConfig
    system: System
    shape: TaskShape
    domains: tuple[str, ...]

    @cached_property
    def network(self) -> FrozenNetwork | None:
        """The pretrained network that images go through first; None if there is none."""
        return frozen_network(self.config.model)


def load_best(
    root: Path,
    *,
    step: int | None = None,
    workers: int = 1,
    data: DataConfig | None = None,
    needed: Sequence[str] = SPLITS,
) -> Opened:
    """Open a run at its best checkpoint, with its data or others.

    Args:
        root: The run folder.
        step: Open the checkpoint of this step instead.
        workers: Threads that share the tasks of a step; results do not depend on it.
        data: Tasks of the same shape from elsewhere; the run's own by default.
        needed: Splits that tasks will be drawn from.
    """
    config = read_config(root)
    saved = best_checkpoint(root, step=step)
    config = config if data is None else replace(config, data=data)
    source = open_tasks(config, needed=needed)
    known, _ = _saved_tasks(saved)
    if data is None and saved.info.get("data") not in (None, source.fingerprint):
        raise DataError(
            f"{root}: the data differ from those the run was trained on, and with them its split into"
            " training and test classes.",
            hint="Restore the data; or name them with --data, if none of their test classes was trained on.",
        )
    if replace(source.shape, n_query=known.n_query) != known:
        raise ConfigError(
            f"{root} was trained on {_tasks(known)}, these data give {_tasks(source.shape)}."
        )
    return Opened(config, source, build_system(config, source.shape, saved.groups, workers=workers))


def load_trained(root: Path, *, step: int | None = None) -> Trained:
    """Open a run without its data at its best checkpoint, or at the one of ``step``."""
    config = read_config(root)
    saved = best_checkpoint(root, step=step)
    shape, domains = _saved_tasks(saved)
    return Trained(config, build_system(config, shape, saved.groups), shape, domains)


def best_checkpoint(root: Path, *, step: int | None = None) -> checkpoint.Checkpoint:
    """Read the checkpoint with the best validation score, or that of ``step``."""
    if step is None:
        newest = history.latest(root).path
        if newest is None:
            raise CheckpointError(
                f"{root} has no checkpoint that can be read.",
                hint=f"See what is wrong with: torchemo checkpoint verify {root}",
            )
        step = checkpoint.read_manifest(newest).info["progress"]["best_step"]
        if step is None:
            return checkpoint.load(newest)
    return checkpoint.load(saved_checkpoints(root, step=step)[0])


def saved_checkpoints(root: Path, *, step: int | None = None) -> list[Path]:
    """List the checkpoints of a run, or that of ``step``, without looking into them."""
    paths = checkpoint.published(root)
    chosen = [path for path in paths if step in (None, checkpoint.step_of(path))]
    if not chosen:
        known = ", ".join(str(checkpoint.step_of(path)) for path in paths) or "none"
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{root} has {what}.", hint=f"Saved steps: {known}.")
    return chosen


def _saved_tasks(saved: checkpoint.Checkpoint) -> tuple[TaskShape, tuple[str, ...]]:
    """Return what the tasks of a run look like, and the names of their domains."""
    try:
        tasks = saved.info["tasks"]
        shape = TaskShape(**{**tasks, "x": tuple(tasks["x"])})
        return shape, tuple(str(name) for name in saved.info["domains"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{saved.path} does not say which tasks it is for.") from error


def _tasks(shape: TaskShape) -> str:
    if shape.kind == "regression":
        return f"{shape.n_shot}-point regression tasks with {shape.x[0]} input(s)"
    size = " x ".join(map(str, shape.x))
    return f"{shape.n_out}-way {shape.n_shot}-shot tasks of {size} images"
