"""The front door: train a run, open it again, evaluate it, adapt it to images, compare runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

from torchemo.config.machine import Precision
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
from torchemo.runs.visits.returning import adapt_again, check_steps
from torchemo.training.device import HERE, Place, open_place
from torchemo.training.predict import Prediction

PathLike: TypeAlias = str | Path
OnEvent: TypeAlias = Callable[[str, int, Mapping[str, Any]], None]


def train(
    preset: str | None = None,
    *,
    out: PathLike,
    data: PathLike | Sequence[PathLike] = (),
    config: PathLike | None = None,
    options: Mapping[str, Any] | Sequence[str] = (),
    on_event: OnEvent | None = None,
    log: str | Sequence[str] = (),
    strict: bool = False,
    workers: int = 1,
    device: str = "cpu",
    precision: Precision = "float32",
    **short: Any,
) -> "Run":
    """Train a run in a folder and open it; the same job as ``torchemo train``.

    Args:
        preset: Name of a preset, such as ``maml-emo``; None starts from the defaults.
        out: Folder of the new run.
        data: Image sets (folders, zips, npz), ``procedural``, or ``regression:hsml4``.
        config: A TOML file with options.
        options: Any options, ``{"memory.capacity": 16}`` or ``["memory.capacity=16"]``.
        on_event: Called with (event, step, fields) for all that is logged.
        log: Where else the numbers go: ``tensorboard``, ``wandb``, or both.
        strict: Refuse images that cannot be read, instead of leaving these out.
        workers: Threads that share the tasks of a step; results do not depend on it.
        device: Where to compute: ``cpu``, ``cuda``, ``cuda:1``, ``mps``, ``xpu``, ``auto``.
        precision: Products of the network: ``float32``, ``tf32`` or ``bf16``.
        short: ``model``, ``steps``, ``seed``, ``size``, ``way``, ``shot``, and what else `SHORT` names.

    Example:
        >>> import tempfile
        >>> train("maml", data="regression:sinusoid", out=tempfile.mkdtemp() + "/a", steps=2, shot=5)
        Run(MAML on regression:sinusoid, step 2 of 2)
    """
    file = None if config is None else Path(config)
    chosen = Choices(preset, file, _sources(data), _short(short), _options(options)).resolved()
    place = open_place(device=device, precision=precision, workers=workers)
    return _trained(Path(out), place, on_event, config=chosen, log=log, strict=strict)


def resume(
    run: PathLike,
    *,
    on_event: OnEvent | None = None,
    workers: int = 1,
    device: str = "cpu",
    precision: Precision = "float32",
) -> "Run":
    """Continue a run where it was left, bit for bit, and open it."""
    place = open_place(device=device, precision=precision, workers=workers)
    return _trained(Path(run), place, on_event)


def load(
    run: PathLike,
    *,
    step: int | None = None,
    device: str = "cpu",
    precision: Precision = "float32",
) -> "Run":
    """Open a trained run.

    Args:
        run: Its folder.
        step: Checkpoint to open; the best on validation tasks by default.
        device: Where to compute, wherever it was trained.
        precision: Products of the network: ``float32``, ``tf32`` or ``bf16``.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/a"
        >>> _ = train("maml", data="regression:sinusoid", out=folder, steps=2, shot=5)
        >>> load(folder).evaluate(tasks=4)["metric"]
        'mse'
    """
    place = open_place(device=device, precision=precision)
    return Run(Path(run), read_config(Path(run)), step, place)


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
        place: Where it computes.
    """

    root: Path
    config: RunConfig
    step: int | None = None
    place: Place = HERE

    @cached_property
    def trained(self) -> Trained:
        """Learner, parameters and memory; the run's data are not opened."""
        return load_trained(self.root, step=self.step, place=self.place)

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
        way: int | None = None,
        shot: int | None = None,
        data: PathLike | Sequence[PathLike] = (),
        workers: int = 1,
    ) -> dict[str, Any]:
        """Score fixed test tasks, write the result beside the run, and return it.

        Args:
            tasks: How many.
            protocol: ``standard`` has 15 queries per class, ``paper`` as many as shots.
            split: Classes they are drawn from.
            statistics: Answer each query by itself, or all queries of a task together.
            way: Classes of a task; as many as in training by default.
            shot: Support examples per class; as many as in training by default.
            data: Other data to draw tasks from; those of the run by default.
            workers: Threads that share the tasks; results do not depend on it.
        """
        size: dict[str, Any] = {"way": way, "shot": shot}
        chosen = Protocol(protocol, tasks, split=split, statistics=statistics, **size)
        how: dict[str, Any] = {"data": self._data(data), "needed": (split,), **size}
        place = self.place._replace(workers=workers)
        opened = load_best(self.root, step=self.step, place=place, **how)
        on = "+".join(Path(name).stem for name in _sources(data)) or None
        return score_run(self.root, opened, chosen, on=on)

    def adapt(
        self,
        support: PathLike,
        *,
        steps: int | None = None,
        invert: bool = False,
        remember: PathLike | None = None,
    ) -> Adapted:
        """Fit the run to a folder of class folders; ``.predict(query)`` then answers images.

        Args:
            support: Folder with one folder of images per class.
            steps: Inner steps; those of training by default.
            invert: Swap dark and light in all images.
            remember: Folder of a store of your own tasks. Classes that come back are recognised, their past
                visits help, and this visit is kept: gradients and class means, never an image.
        """
        if remember is None:
            return adapt(self.trained, Path(support), steps=steps, invert=invert)
        check_steps(steps)
        given = (self.trained, Path(support), Path(remember))
        return adapt_again(*given, run=self.root, invert=invert)[0]

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


def _trained(
    root: Path,
    place: Place,
    on_event: OnEvent | None,
    *,
    log: str | Sequence[str] = (),
    **how: Any,
) -> Run:
    tell, logs = (
        on_event or (lambda event, step, fields: None),
        (log,) if isinstance(log, str) else log,
    )
    train_run(root, on_event=tell, place=place, log=logs, **how)
    return Run(root, read_config(root), place=place)


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
