"""Test results of a run: every task's score on fixed tasks, in a file beside the run."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch

from torchemo.core.digest import digest_of
from torchemo.core.errors import ConfigError, DataError
from torchemo.core.stats import mean_interval, summarise_by_group
from torchemo.core.types import Episode, Statistics
from torchemo.data.source import sent_to
from torchemo.memory.interface import TaskMemory
from torchemo.runs.events import cpu_seconds, read
from torchemo.runs.folder import RunFolder
from torchemo.runs.load import Opened
from torchemo.runs.storage.seal import with_digest
from torchemo.training.evaluate import Scores, batches


@final
@dataclass(frozen=True)
class Protocol:
    """Which test tasks, and how their queries are answered.

    Attributes:
        name: ``standard`` has 15 queries per class, ``paper`` K (A14).
        tasks: How many tasks.
        seed: Of the tasks.
        split: Classes they are drawn from.
        steps: Inner steps; None takes those of training.
        statistics: Each query is answered by itself (``inductive``), or all of a task together, as the
            network normalises what it is given at once (``transductive``, the habit of MAML's papers).
        way: Classes of a task; None takes those of training.
        shot: Support examples per class; None takes those of training.
    """

    name: Literal["standard", "paper"] = "standard"
    tasks: int = 600
    seed: int = 0
    split: Literal["train", "val", "test"] = "test"
    steps: int | None = None
    statistics: Statistics = "inductive"
    way: int | None = None
    shot: int | None = None

    def __post_init__(self) -> None:
        if self.tasks < 1:
            raise ConfigError(f"at least one test task is needed, got {self.tasks}.")
        if self.shot is not None and self.shot < 1:
            raise ConfigError(f"classes need a support image or more, got {self.shot}.")
        if self.steps is not None and self.steps < 0:
            raise ConfigError(f"inner steps should be 0 or more, got {self.steps}.")

    def to_dict(self) -> dict[str, Any]:
        """Return what it says; classes and shots of training are not named, as in earlier versions."""
        plain = asdict(self)
        return {n: v for n, v in plain.items() if v is not None or n not in ("way", "shot")}

    def queries(self, n_shot: int, *, regression: bool) -> int | None:
        """Queries per class."""
        if regression:
            return None
        return 15 if self.name == "standard" else n_shot


def memory_digest(memory: TaskMemory | None) -> str:
    """Digest of a memory and everything that belongs to it; evaluation must not change it."""
    return digest_of({} if memory is None else dict(memory.state_dict()))


def score_run(
    root: Path,
    opened: Opened,
    protocol: Protocol,
    *,
    on: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Evaluate a run on its test tasks and write the result beside it.

    Args:
        root: Folder of the run.
        opened: The run.
        protocol: Which tasks.
        on: Name of the data where they are not those of the run; the result is kept beside its own.
        progress: Called with (tasks done, tasks in all).

    Returns:
        The record: protocol, fingerprint of the data, and per task its episode number, domain, loss and
        accuracy after every inner step; with means and intervals, the share of tasks that use their recall,
        if some may skip it (`torchemo.memory.selective`), and the slots that failed validation, if they
        were judged.
    """
    record = scored(root, opened, protocol, on=on, progress=progress)
    file = result_file(root, protocol, on=on)
    opened.place.team.first(lambda: save_result(record, file))
    return record


def _training_seconds(root: Path) -> float | None:
    """Return what the training took; None where its log does not say."""
    try:
        return cpu_seconds(read(RunFolder(root).events))
    except (OSError, DataError):  # a result does not depend on the log
        return None


def scored(
    root: Path,
    opened: Opened,
    protocol: Protocol,
    *,
    on: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Return the record of `score_run` without writing it."""
    found = score_tasks(opened, protocol, progress=progress)
    return {"run": str(root), "on": on, **found, "cpu_seconds": _training_seconds(root)}


def save_result(record: dict[str, Any], path: Path) -> None:
    """Write a result with a digest of itself."""
    RunFolder(path.parent).save(path, json.dumps(with_digest(record)) + "\n")


def score_tasks(
    opened: Opened,
    protocol: Protocol,
    *,
    every_step: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Evaluate a run on test tasks and return the record that `score_run` writes, without its place.

    Args:
        opened: The run.
        protocol: Which tasks.
        every_step: Score after every inner step; else after the last alone, in one column.
        progress: Called with (tasks done, tasks in all).
    """
    memory = opened.system.memory
    before = memory_digest(memory)
    scores = _scores(opened, protocol, every_step, progress)
    if memory_digest(memory) != before:
        raise DataError("evaluation changed the memory; the result is not valid.")
    about = {
        "memory_sha256": before,
        "recalled": _recalled(memory, scores),
        "skips": _skips(opened, scores),
        "failed": None if memory is None else memory.failed_slots,
    }
    return {**about, **_record(opened, protocol, scores)}


def _recalled(memory: TaskMemory | None, scores: Scores) -> float | None:
    """Return the share of tasks that used their recall; None if none may skip it."""
    if memory is None or scores.recalled is None:
        return None
    return float(scores.recalled.double().mean()) if memory.may_skip else None


def _skips(opened: Opened, scores: Scores) -> dict[str, float] | None:
    """Return the share of tasks that skip recall, by domain; None if none may skip it."""
    if _recalled(opened.system.memory, scores) is None or scores.recalled is None:
        return None
    skips, names = ~scores.recalled, opened.source.domains
    return {
        names[d]: round(float(skips[scores.domain == d].double().mean()), 4)
        for d in sorted(set(scores.domain.tolist()))
        if d >= 0
    }


def result_file(root: Path, protocol: Protocol, *, on: str | None = None) -> Path:
    """Return where a result is kept; names of data that are no names of files are spelt out."""
    where = "" if on is None else "-" + re.sub(r"[^\w.+-]", "_", on)
    how = "" if protocol.statistics == "inductive" else f"-{protocol.statistics}"
    size = task_size(protocol.way, protocol.shot)
    return root / f"eval-{protocol.split}-{protocol.name}{how}{size}{where}.json"


def task_size(way: int | None, shot: int | None) -> str:
    """Return what a file's name says of tasks of another size than in training: "-20way-5shot"."""
    return "".join(f"-{n}{what}" for n, what in ((way, "way"), (shot, "shot")) if n is not None)


def _scores(
    opened: Opened,
    protocol: Protocol,
    every_step: bool,
    progress: Callable[[int, int], None],
) -> Scores:
    source = sent_to(opened.source, opened.place.device)
    regression = source.shape.kind == "regression"
    if regression and protocol.way is not None:
        raise ConfigError("regression tasks have no classes.", hint="Leave out --way.")
    queries = protocol.queries(source.shape.n_shot, regression=regression)

    def sample(start: int, count: int) -> Episode:
        progress(start, protocol.tasks)
        return source.sample(
            protocol.split, seed=protocol.seed, start=start, count=count, n_query=queries
        )

    tasks = batches(sample, tasks=protocol.tasks)
    return opened.system.evaluate(
        tasks, steps=protocol.steps, every_step=every_step, statistics=protocol.statistics
    )


def _record(opened: Opened, protocol: Protocol, scores: Scores) -> dict[str, Any]:
    system, source = opened.system, opened.source
    values = scores.loss if scores.accuracy is None else scores.accuracy
    return {
        "method": system.title,
        "seed": opened.config.train.seed,
        "step": system.iteration,
        "outer_steps": opened.config.outer_steps,
        "protocol": protocol.to_dict(),
        "place": opened.place.words,
        "data": source.fingerprint,
        "domains": list(source.domains),
        "metric": "mse" if scores.accuracy is None else "accuracy",
        "episode": scores.episode.tolist(),
        "domain": scores.domain.tolist(),
        "per_task": [[round(float(v), 7) for v in row] for row in values],
        "summary": _summary(values, scores.domain, source.domains),
    }


def _summary(values: torch.Tensor, domain: torch.Tensor, names: tuple[str, ...]) -> dict[str, Any]:
    last = values[:, -1].double().numpy()
    known = sorted({int(d) for d in domain if d >= 0})
    per_domain: dict[str, Any] = {}
    if known:
        table = summarise_by_group(last, domain.numpy(), names=list(names))
        per_domain = table.to_dict()
    return {
        "per_step": [float(v) for v in values.double().mean(0)],
        "last": mean_interval(last).to_dict(),
        "per_domain": per_domain,
    }
