"""Trained runs opened again: their configuration, their checkpoints, and the learner they hold."""

import hashlib
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, final

import tomli_w

from torchemo.config.run import DataConfig, RunConfig
from torchemo.config.toml import dumps, from_dict, merged, read, to_dict
from torchemo.core.errors import CheckpointError, ConfigError, DataError
from torchemo.core.types import TaskShape
from torchemo.data.index import SPLITS
from torchemo.data.source import TaskSource
from torchemo.models import FrozenNetwork, frozen_network
from torchemo.runs.experiment import Experiment, build_system, complete, open_tasks
from torchemo.runs.folder import RunFolder
from torchemo.runs.storage import checkpoint, history
from torchemo.runs.storage.info import check_run_state, progress_of, restoring, tasks_of
from torchemo.runs.storage.manifest import Manifest
from torchemo.runs.upgrade import is_old, upgraded
from torchemo.training.classes import for_classes
from torchemo.training.device import HERE, Place
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
    return _checked(plain if base is None else merged(to_dict(base), plain), where=str(path))


def _checked(plain: Mapping[str, Any], *, where: str) -> RunConfig:
    """Make a configuration of plain values, and check the options of its parts."""
    config = from_dict(plain, RunConfig, where=where)
    try:
        complete(config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from error
    return config


# -- is config.toml the one that the run was trained with? ---------------------------------------------


_PLACES = ("data.source", "data.splits", "memory.values_dir", "train.start_from")
"""Data may be moved: what they hold is compared by its fingerprint, and values by checksums. What a run
started from, it has."""


def config_hash(config: RunConfig) -> str:
    """Digest of everything that decides a run."""
    return _digest(dumps(complete(config)))


def check_config(root: Path, config: RunConfig, saved: Manifest) -> None:
    """Refuse a configuration that was changed after the checkpoint was saved, unless it was accepted.

    Args:
        root: The run folder.
        config: What its config.toml says now.
        saved: The manifest of the checkpoint.
    """
    changes = config_changes(root, config, saved)
    if changes:
        raise CheckpointError(
            f"{RunFolder(root).config} was changed after step {saved.step} was saved: {changes}.",
            hint="Undo the change; or, if it is meant, accept it with:"
            f" torchemo checkpoint accept-config {root}",
        )


def config_changes(root: Path, config: RunConfig, saved: Manifest) -> str:
    """Say which options of a run are not those of a checkpoint; empty if none, or if they were accepted."""
    changes = _differences(root, config, saved)
    if not changes:
        return ""
    try:
        accepted = _checked(read(RunFolder(root).accepted), where="accepted.toml")
    except ConfigError:  # there is none, or it is damaged
        return changes
    return changes if _changes(accepted, config) else ""


def accept_config(root: Path) -> list[str]:
    """Accept config.toml as it is now for all checkpoints of a run; return what was changed."""
    config = read_config(root)
    manifests = [checkpoint.read_manifest(path) for path in saved_checkpoints(root)]
    changes = {_differences(root, config, saved) for saved in manifests} - {""}
    if changes:
        folder = RunFolder(root)
        folder.save(folder.accepted, dumps(config))
    return sorted(changes)


def _differences(root: Path, config: RunConfig, saved: Manifest) -> str:
    if "config" in saved.info:
        where = f"the configuration in step {saved.step}"
        try:
            plain = tomllib.loads(saved.info["config"])
            then = _checked(upgraded(plain, where=where), where=where)
        except (tomllib.TOMLDecodeError, AttributeError, TypeError, ConfigError) as error:
            raise CheckpointError(f"{where} is none ({error!s:.200}).") from error
        return _changes(then, config)
    # A checkpoint of an earlier version knows only a digest: of the file, or of options as they were called.
    text = tomli_w.dumps(read(RunFolder(root).config))
    known = saved.config_hash in ("", _digest(text), config_hash(config))
    return "" if known else "it does not have the digest that the checkpoint has"


def _changes(old: RunConfig, new: RunConfig) -> str:
    then, now = (dict(_leaves(to_dict(complete(config)))) for config in (old, new))
    return "; ".join(
        f"{name} is {now.get(name, 'absent')}, was {then.get(name, 'absent')}"
        for name in sorted({**then, **now})
        if name not in _PLACES and repr(then.get(name)) != repr(now.get(name))
    )


def _leaves(plain: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in plain.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# -- opening -------------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """A trained run with tasks to evaluate it on."""

    config: RunConfig
    source: TaskSource
    system: System
    place: Place = HERE


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
    place: Place = HERE,
    data: DataConfig | None = None,
    needed: Sequence[str] = SPLITS,
    way: int | None = None,
    shot: int | None = None,
    allow_leak: bool = False,
) -> Opened:
    """Open a run at its best checkpoint, with its data or others.

    Args:
        root: The run folder.
        step: Open the checkpoint of this step instead.
        place: Where to compute; a checkpoint opens on any device.
        data: Tasks of the same shape from elsewhere; the run's own by default.
        needed: Splits that tasks will be drawn from.
        way: Classes of a task; as many as in training by default.
        shot: Support examples per class; as many as in training by default.
        allow_leak: Accept test classes that a pretrained network was trained on.
    """
    config = read_config(root)
    saved = best_checkpoint(root, step=step)
    check_config(root, config, saved.manifest)
    config = config if data is None else replace(config, data=data)
    config = replace(config, data=_sized(config.data, way, shot))
    source = open_tasks(config, needed=needed, allow_leak=allow_leak)
    if data is None and saved.info.get("data") not in (None, source.fingerprint):
        raise DataError(
            f"{root}: the data differ from those the run was trained on, and with them its split into"
            " training and test classes.",
            hint="Restore the data; or name them with --data, if none of their test classes was trained on.",
        )
    return Opened(config, source, _system_for(root, config, source.shape, saved, place), place)


def _sized(data: DataConfig, way: int | None, shot: int | None) -> DataConfig:
    """Return data whose tasks have other numbers of classes and shots, where these are given."""
    asked = data if way is None else replace(data, n_way=way)
    return asked if shot is None else replace(asked, n_shot=shot)


def _system_for(
    root: Path, config: RunConfig, shape: TaskShape, saved: checkpoint.Checkpoint, place: Place
) -> System:
    """Make what answers tasks of a shape, which may have other numbers of classes and shots."""
    known, _ = tasks_of(saved.manifest)
    if (shape.kind, shape.x) != (known.kind, known.x):
        raise ConfigError(
            f"{root} was trained on {_tasks(known)}, these data give {_tasks(shape)}."
        )
    whole = replace(known, n_query=shape.n_query)
    with restoring(saved):
        system = build_system(config, whole, saved.groups, place=place)
    return system if shape.n_out == known.n_out else for_classes(system, shape.n_out)


def load_trained(root: Path, *, step: int | None = None, place: Place = HERE) -> Trained:
    """Open a run without its data at its best checkpoint, or at the one of ``step``, on any device."""
    config = read_config(root)
    saved = best_checkpoint(root, step=step)
    check_config(root, config, saved.manifest)
    shape, domains = tasks_of(saved.manifest)
    with restoring(saved):
        system = build_system(config, shape, saved.groups, place=place)
    return Trained(config, system, shape, domains)


def best_checkpoint(root: Path, *, step: int | None = None) -> checkpoint.Checkpoint:
    """Read the checkpoint with the best validation score, or that of ``step``."""
    if step is None:
        newest = history.latest(root).path
        if newest is None:
            raise CheckpointError(
                f"{root} has no checkpoint that can be read.",
                hint=f"See what is wrong with: torchemo checkpoint verify {root}",
            )
        step = progress_of(checkpoint.read_manifest(newest)).best_step
        if step is None:
            return check_run_state(checkpoint.load(newest))
    return check_run_state(checkpoint.load(saved_checkpoints(root, step=step)[0]))


def start_from(experiment: Experiment) -> None:
    """Begin training with the network of another run, if the configuration names one.

    Raises:
        DataError: That run has seen other data, so that its training classes may be test classes here.
    """
    place = experiment.config.train.start_from
    if place is None:
        return
    saved, data = best_checkpoint(Path(place)), experiment.source.fingerprint
    if saved.info.get("data") != data:
        raise DataError(
            f"train.start_from: {place} was trained on other data, or on another split of them.",
            hint="Start from a run of the same data and splits: its network must not know test classes.",
        )
    with restoring(saved):
        experiment.trainer.begin_with({n: dict(g) for n, g in saved.groups.items()}, where=place)


def saved_checkpoints(root: Path, *, step: int | None = None) -> list[Path]:
    """List the checkpoints of a run, or that of ``step``, without looking into them."""
    paths = checkpoint.published(root)
    chosen = [path for path in paths if step in (None, checkpoint.step_of(path))]
    if not chosen:
        known = ", ".join(str(checkpoint.step_of(path)) for path in paths) or "none"
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{root} has {what}.", hint=f"Saved steps: {known}.")
    return chosen


def _tasks(shape: TaskShape) -> str:
    if shape.kind == "regression":
        return f"{shape.n_shot}-point regression tasks with {shape.x[0]} input(s)"
    size = " x ".join(map(str, shape.x))
    return f"{shape.n_out}-way {shape.n_shot}-shot tasks of {size} images"
