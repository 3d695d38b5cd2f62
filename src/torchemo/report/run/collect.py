"""What a run folder holds, read and checked; what is missing or damaged becomes one plain sentence."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, final

import numpy as np
from jaxtyping import Float, Int

from torchemo.config.run import DataConfig, RunConfig
from torchemo.core.errors import CheckpointError, DataError
from torchemo.data.source import PROCEDURAL, REGRESSION
from torchemo.report.format import METRICS, Metric
from torchemo.runs import events as event_log
from torchemo.runs.compare import compare, read_result
from torchemo.runs.folder import RunFolder
from torchemo.runs.load import check_config, read_config
from torchemo.runs.storage import checkpoint
from torchemo.runs.storage.durable import read_regular
from torchemo.runs.storage.seal import without_digest


@final
@dataclass(frozen=True)
class Result:
    """One ``eval-*.json``: what every task scored after every inner step.

    Attributes:
        split: Which tasks: test or val.
        protocol: standard or paper.
        statistics: inductive or transductive.
        step: The checkpoint that was scored.
        metric: accuracy or mse.
        domains: Names that ``domain`` counts.
        domain: Domain of each task, -1 if unknown.
        per_task: Scores after 0, 1, ..., S inner steps.
        on: Name of the data, where it is not the run's own.
        recalled: Share of the tasks that use their recall; None if none may skip it.
        skips: Share of the tasks that skip recall, by domain; empty if that is not known.
    """

    split: str
    protocol: str
    statistics: str
    step: int
    metric: str
    domains: tuple[str, ...]
    domain: Int[np.ndarray, " task"]
    per_task: Float[np.ndarray, "task steps"]
    on: str | None = None
    recalled: float | None = None
    skips: Mapping[str, float] = field(default_factory=dict)

    @property
    def by_domain(self) -> dict[str, Float[np.ndarray, "tasks steps"]]:
        """Scores of the tasks of each domain that has any."""
        return {
            self.domains[d]: self.per_task[self.domain == d]
            for d in sorted(set(self.domain.tolist()))
            if d >= 0
        }


@final
@dataclass(frozen=True)
class RunFacts:
    """Everything a run folder says about itself without recomputing anything.

    Attributes:
        name: Name of the folder.
        config: The resolved configuration.
        config_text: The same as it lies on the disk.
        environment: What the run was computed with; empty if that is not known.
        events: The log.
        results: Test results.
        problems: Sentences about files that could not be used.
    """

    name: str
    config: RunConfig
    config_text: str
    environment: Mapping[str, Any]
    events: tuple[Mapping[str, Any], ...]
    results: tuple[Result, ...]
    problems: tuple[str, ...]


class Best(NamedTuple):
    """The best validation."""

    step: int
    score: float


class Curve(NamedTuple):
    """A logged number over outer steps; entries that are not finite are left out."""

    steps: list[int]
    values: list[float]


def collect(root: Path) -> RunFacts:
    """Read a run folder."""
    folder = RunFolder(root)
    config = read_config(root)
    problems: list[str] = []
    try:
        for path in checkpoint.published(root)[-1:]:
            check_config(root, config, checkpoint.read_manifest(path))
    except CheckpointError as error:
        problems.append(_local(error.message, root))
    return RunFacts(
        name=root.resolve().name,
        config=config,
        config_text=folder.config.read_text(),
        environment=_environment(folder, problems),
        events=_events(folder, problems),
        results=_results(root, problems),
        problems=tuple(problems),
    )


def curve(events: Sequence[Mapping[str, Any]], event: str, field: str) -> Curve:
    """Pick a number out of all events of a kind."""
    found = Curve([], [])
    for entry in events:
        value = entry.get(field)
        if entry["event"] == event and _is_number(value):
            found.steps.append(entry["step"])
            found.values.append(float(value))
    return found


def best_validation(events: Sequence[Mapping[str, Any]]) -> Best | None:
    """Return the first validation with the highest score, as the run itself chooses it."""
    scores = curve(events, "validation", "score")
    if not scores.values:
        return None
    best = scores.values.index(max(scores.values))
    return Best(scores.steps[best], scores.values[best])


def metric_in(config: RunConfig) -> Metric:
    """Return what a run is judged by."""
    regression = config.data.source[0].startswith(REGRESSION)
    return METRICS["mse" if regression else "accuracy"]


def is_synthetic(data: DataConfig) -> bool:
    """Return whether the tasks are drawn by formulas rather than photographed."""
    return data.source == (PROCEDURAL,) or data.source[0].startswith(REGRESSION)


def compare_runs(
    base: Sequence[Path],
    other: Sequence[Path],
    *,
    split: str = "test",
    protocol: str = "standard",
) -> dict[str, Any]:
    """Compare runs as `torchemo.runs.compare.compare` does, and note the protocol."""
    sides = [
        [read_result(path, split=split, protocol=protocol) for path in paths]
        for paths in (base, other)
    ]
    found = compare(*sides)
    found["protocol"] = sides[0][0]["protocol"]
    return found


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _environment(folder: RunFolder, problems: list[str]) -> Mapping[str, Any]:
    try:
        found = json.loads(read_regular(folder.environment))
        if isinstance(found, dict):
            return without_digest(found, what=folder.environment.name)
    except FileNotFoundError:
        return {}
    except DataError as error:
        problems.append(error.message)
        return {}
    except (OSError, ValueError, RecursionError):
        pass
    problems.append(f"{folder.environment.name} cannot be read.")
    return {}


def _events(folder: RunFolder, problems: list[str]) -> tuple[Mapping[str, Any], ...]:
    if not folder.events.exists():
        return ()
    try:
        return tuple(event_log.read(folder.events))
    except DataError as error:
        problems.append(f"The log is damaged: {_local(error.message, folder.root)}")
        return ()


def _results(root: Path, problems: list[str]) -> tuple[Result, ...]:
    found = []
    for path in sorted(root.glob("eval-*.json")):
        try:
            found.append(_result(read_result(path)))
        except DataError as error:
            problems.append(f"A result was left out: {_local(error.message, root)}")
        except (KeyError, ValueError, TypeError):
            problems.append(f"A result was left out: {path.name} is not a result file.")
    return tuple(found)


def _result(record: Mapping[str, Any]) -> Result:
    per_task = np.array(record["per_task"], dtype=np.float64)
    domain = np.array(record["domain"], dtype=np.int64)
    names = tuple(str(name) for name in record["domains"])
    fits = per_task.ndim == 2 and per_task.size > 0 and domain.shape == per_task.shape[:1]
    if record["metric"] not in METRICS:
        raise ValueError("an unknown metric")
    if not fits or not np.isfinite(per_task).all() or domain.max() >= len(names):
        raise ValueError("not the scores of tasks")
    recalled = record.get("recalled", record.get("familiar"))  # its name before
    return Result(
        split=str(record["protocol"]["split"]),
        protocol=_size(record["protocol"]) + str(record["protocol"]["name"]),
        statistics=str(record["protocol"]["statistics"]),
        on=None if record.get("on") is None else str(record["on"]),
        step=int(record["step"]),
        metric=str(record["metric"]),
        recalled=None if recalled is None else float(recalled),
        skips={str(name): float(share) for name, share in (record.get("skips") or {}).items()},
        domains=names,
        domain=domain,
        per_task=per_task,
    )


def _size(protocol: Mapping[str, Any]) -> str:
    """Say how many classes and shots tasks have, where these are not those of training."""
    return "".join(f"{protocol[n]}-{n} " for n in ("way", "shot") if protocol.get(n) is not None)


def _local(message: str, root: Path) -> str:
    """Name files as seen from the run: a report is shown to others."""
    return message.replace(f"{root}/", "")
