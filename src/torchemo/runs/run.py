"""The front door: train a run, open it again, evaluate it, adapt it to images, compare runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

from torchemo.config.run import DataConfig, RunConfig
from torchemo.core.errors import ConfigError
from torchemo.core.types import Episode, Statistics
from torchemo.memory.interface import TaskMemory
from torchemo.runs.adapt import Adapted, adapt
from torchemo.runs.choices import SHORT, Choices
from torchemo.runs.compare import compare as compare_results
from torchemo.runs.compare import read_result
from torchemo.runs.load import Trained, load_best, load_trained, read_config
from torchemo.runs.score import Protocol, score_run
from torchemo.runs.train import train_run
from torchemo.training.predict import Prediction

PathLike: TypeAlias = str | Path


def train(
    preset: str | None = None,
    *,
    out: PathLike,
    data: PathLike | Sequence[PathLike] = (),
    config: PathLike | None = None,
    options: Mapping[str, Any] | Sequence[str] = (),
    on_event: Callable[[str, int, Mapping[str, Any]], None] | None = None,
    workers: int = 1,
    **short: Any,
) -> "Run":
    """Train a run in a folder and open it; the same job as ``torchemo train``.

    Args:
        preset: Name of a preset, such as ``maml-emo``; None starts from the defaults.
        out: Folder of the new run.
        data: Image sets (folders, zips, npz), ``procedural``, or ``regression:hsml4``.
        config: A TOML file with options.
        options: Any options, ``{"memory.capacity": 16}`` or ``["memory.capacity=16"]``.
        on_event: Called with (event, step, fields) for everything that is logged.
        workers: Threads that share the tasks of a step; results do not depend on it.
        short: ``model``, ``steps``, ``seed``, ``size``, ``way``, ``shot``, ``splits``, ``scheme``.

    Example:
        >>> import tempfile
        >>> run = train("maml", data="regression:sinusoid", out=tempfile.mkdtemp() + "/a", steps=2, shot=5)
        >>> run
        Run(MAML on regression:sinusoid, step 2 of 2)
    """
    chosen = Choices(
        preset,
        None if config is None else Path(config),
        _sources(data),
        _short(short),
        _options(options),
    )
    tell = on_event or (lambda event, step, fields: None)
    train_run(Path(out), chosen.resolved(), on_event=tell, workers=workers)
    return load(out)


def resume(
    run: PathLike,
    *,
    on_event: Callable[[str, int, Mapping[str, Any]], None] | None = None,
    workers: int = 1,
) -> "Run":
    """Continue a run where it was left, bit for bit, and open it."""
    train_run(Path(run), on_event=on_event or (lambda event, step, fields: None), workers=workers)
    return load(run)


def load(run: PathLike, *, step: int | None = None) -> "Run":
    """Open a trained run.

    Args:
        run: Its folder.
        step: Checkpoint to open; the best on validation tasks by default.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/a"
        >>> _ = train("maml", data="regression:sinusoid", out=folder, steps=2, shot=5)
        >>> load(folder).evaluate(tasks=4)["metric"]
        'mse'
    """
    return Run(Path(run), read_config(Path(run)), step)


def compare(
    base: "Run | PathLike | Sequence[Run | PathLike]",
    other: "Run | PathLike | Sequence[Run | PathLike]",
    *,
    split: Literal["test", "val"] = "test",
    protocol: Literal["standard", "paper"] = "standard",
    statistics: Statistics = "inductive",
) -> dict[str, Any]:
    """Compare two methods on the tasks they were evaluated on, paired task by task: ``other - base``.

    Args:
        base: A run, or one run per training seed. Evaluate it first.
        other: A run, or as many in the same order.
        split: Which results.
        protocol: Which results.
        statistics: Which results; those of earlier versions are transductive.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> some = {"data": "regression:sinusoid", "steps": 2, "shot": 5}
        >>> runs = [train(name, out=f"{folder}/{name}", **some) for name in ("maml", "anil")]
        >>> results = [run.evaluate(tasks=4) for run in runs]
        >>> compare(*runs)["tasks"]
        4
    """
    which = {"split": split, "protocol": protocol, "statistics": statistics}
    first, second = ([read_result(_root(r), **which) for r in _each(s)] for s in (base, other))
    return compare_results(first, second)


@final
@dataclass(frozen=True)
class Run:
    """A trained run.

    Attributes:
        root: Its folder.
        config: Its configuration, complete.
        step: Checkpoint that is used; None is the best on validation tasks.
    """

    root: Path
    config: RunConfig
    step: int | None = None

    @cached_property
    def trained(self) -> Trained:
        """Learner, parameters and memory; the run's data are not opened."""
        return load_trained(self.root, step=self.step)

    @property
    def memory(self) -> TaskMemory | None:
        """What the run remembers; None for a base learner."""
        return self.trained.system.memory

    def predict(self, episode: Episode, *, steps: int | None = None) -> Prediction:
        """Adapt to support sets and answer queries, each by itself, after every inner step."""
        return self.trained.system.predict(episode, steps=steps)

    def evaluate(
        self,
        *,
        tasks: int = 600,
        protocol: Literal["standard", "paper"] = "standard",
        split: Literal["test", "val"] = "test",
        statistics: Statistics = "inductive",
        data: PathLike | Sequence[PathLike] = (),
        workers: int = 1,
    ) -> dict[str, Any]:
        """Score fixed test tasks, write the result beside the run, and return it."""
        opened = load_best(
            self.root, step=self.step, workers=workers, data=self._data(data), needed=(split,)
        )
        on = "+".join(Path(name).stem for name in _sources(data)) or None
        chosen = Protocol(protocol, tasks, split=split, statistics=statistics)
        return score_run(self.root, opened, chosen, on=on)

    def adapt(
        self, support: PathLike, *, steps: int | None = None, invert: bool = False
    ) -> Adapted:
        """Fit the run to a folder of class folders; ``.predict(query)`` then answers images.

        Args:
            support: Folder with one folder of images per class.
            steps: Inner steps; those of training by default.
            invert: Swap dark and light in all images.
        """
        return adapt(self.trained, Path(support), steps=steps, invert=invert)

    def _data(self, data: PathLike | Sequence[PathLike]) -> DataConfig | None:
        sources = _sources(data)
        if not sources:
            return None
        return replace(self.config.data, source=sources, splits=None, scheme=None)

    def __repr__(self) -> str:
        system, sources = self.trained.system, ", ".join(self.config.data.source)
        done = f"step {system.iteration} of {self.config.outer_steps}"
        return f"Run({system.title} on {sources}, {done})"

    def _repr_html_(self) -> str:
        system, config = self.trained.system, self.config
        rows = {
            "method": system.title,
            "data": ", ".join(config.data.source),
            "outer steps": f"{system.iteration:,} of {config.outer_steps:,}",
            "folder": str(self.root),
        }
        if system.memory is not None:
            store = system.memory.store
            rows["memory"] = f"{len(store)} of {store.capacity} slots filled"
        lines = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(value)}</td></tr>"
            for name, value in rows.items()
        )
        return f"<table>{lines}</table>"


def _sources(data: PathLike | Sequence[PathLike]) -> tuple[str, ...]:
    given = (data,) if isinstance(data, str | Path) else tuple(data)
    return tuple(str(source) for source in given)


def _options(options: Mapping[str, Any] | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(options, Mapping):
        return tuple(options)
    return tuple(f"{name}={_written(value)}" for name, value in options.items())


def _written(value: Any) -> str:
    """Write a value as TOML reads it."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(_written(v) for v in value)}]"
    return f'"{value}"' if isinstance(value, str | Path) else repr(value)


def _short(given: Mapping[str, Any]) -> Mapping[str, Any]:
    unknown = [name for name in given if name not in SHORT]
    if unknown:
        raise ConfigError(
            f"train() has no argument '{unknown[0]}'.",
            hint=f"It takes {', '.join(SHORT)}; everything else goes into options={{...}}.",
        )
    return {n: str(v) if isinstance(v, Path) else v for n, v in given.items()}


def _each(side: "Run | PathLike | Sequence[Run | PathLike]") -> "Sequence[Run | PathLike]":
    return [side] if isinstance(side, Run | str | Path) else side


def _root(run: "Run | PathLike") -> Path:
    return run.root if isinstance(run, Run) else Path(run)
