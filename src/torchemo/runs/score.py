"""Test results of a run: every task's score on fixed tasks, in a file beside the run."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch

from torchemo.core.errors import ConfigError, DataError
from torchemo.core.stats import mean_interval, summarise_by_group
from torchemo.core.types import Episode
from torchemo.learners import BMG, Learner, TaskGated
from torchemo.memory.emo import EMO
from torchemo.runs.experiment import Experiment
from torchemo.runs.folder import RunFolder
from torchemo.training.evaluate import Scores, batches, evaluate
from torchemo.training.step import look_up
from torchemo.training.trainer import Trainer


@final
@dataclass(frozen=True)
class Protocol:
    """Which test tasks: ``standard`` has 15 queries per class, ``paper`` K (A14)."""

    name: Literal["standard", "paper"] = "standard"
    tasks: int = 600
    seed: int = 0
    split: Literal["train", "val", "test"] = "test"
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.tasks < 1:
            raise ConfigError(f"at least one test task is needed, got {self.tasks}.")

    def queries(self, n_shot: int, *, regression: bool) -> int | None:
        """Queries per class."""
        if regression:
            return None
        return 15 if self.name == "standard" else n_shot


def memory_digest(emo: EMO | None) -> str:
    """Digest of a memory and everything that belongs to it; evaluation must not change it."""
    digest = hashlib.sha256()
    if emo is not None:
        for name, tensor in sorted(emo.state_dict().items()):
            digest.update(
                name.encode()
                + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()


def score_run(
    root: Path,
    experiment: Experiment,
    protocol: Protocol,
    *,
    on: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Evaluate a run on its test tasks and write the result beside it.

    Args:
        root: Folder of the run.
        experiment: The run.
        protocol: Which tasks.
        on: Name of the data where they are not those of the run; the result is kept beside its own.
        progress: Called with (tasks done, tasks in all).

    Returns:
        The record: protocol, fingerprint of the data, and per task its episode number, domain, loss and
        accuracy after every inner step; with means and intervals, the share of tasks that are evaluated with
        their recall, if the memory may keep silent (`memory.familiarity`, `memory.trust`), and
        the slots that it does not trust, if it judges them.
    """
    record = {"run": str(root), "on": on, **score_tasks(experiment, protocol, progress=progress)}
    RunFolder(root).save(result_file(root, protocol, on=on), json.dumps(record) + "\n")
    return record


def score_tasks(
    experiment: Experiment,
    protocol: Protocol,
    *,
    every_step: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Evaluate a run on test tasks and return the record that `score_run` writes, without its place.

    Args:
        experiment: The run.
        protocol: Which tasks.
        every_step: Score after every inner step; else after the last alone, in one column.
        progress: Called with (tasks done, tasks in all).
    """
    emo = experiment.trainer.emo
    before = memory_digest(emo)
    scores = _scores(experiment, protocol, every_step, progress)
    familiar = _familiar(experiment, protocol)
    if memory_digest(emo) != before:
        raise DataError("evaluation changed the memory; the result is not valid.")
    record = _record(experiment, protocol, scores)
    doubted = None if emo is None or emo.trust is None else emo.trust.doubted.nonzero().flatten()
    slots = None if doubted is None else doubted.tolist()
    return {"memory_sha256": before, "familiar": familiar, "doubted": slots, **record}


def result_file(root: Path, protocol: Protocol, *, on: str | None = None) -> Path:
    """Return where a result is kept; names of data that are no names of files are spelt out."""
    where = "" if on is None else "-" + re.sub(r"[^\w.+-]", "_", on)
    return root / f"eval-{protocol.split}-{protocol.name}{where}.json"


def _scores(
    experiment: Experiment,
    protocol: Protocol,
    every_step: bool,
    progress: Callable[[int, int], None],
) -> Scores:
    trainer = experiment.trainer

    def sample(start: int, count: int) -> Episode:
        progress(start, protocol.tasks)
        return _sample(experiment, protocol, start, count)

    return evaluate(
        trainer.learner,
        trainer.params,
        batches(sample, tasks=protocol.tasks),
        emo=trainer.emo,
        steps=protocol.steps,
        every_step=every_step,
        batched=trainer.batched,
        workers=trainer.workers,
    )


def _sample(
    experiment: Experiment, protocol: Protocol, start: int, count: int, *, answered: bool = True
) -> Episode:
    """Draw test tasks; those that are not answered get few queries, and have the same support sets."""
    source = experiment.source
    regression = source.shape.kind == "regression"
    queries = protocol.queries(source.shape.n_shot, regression=regression)
    if not answered and not regression:
        queries = 1
    return source.sample(
        protocol.split, seed=protocol.seed, start=start, count=count, n_query=queries
    )


def _familiar(experiment: Experiment, protocol: Protocol) -> float | None:
    """Return the share of tasks that are evaluated with their recall; None if the memory always recalls."""
    trainer = experiment.trainer
    if trainer.emo is None or (trainer.emo.familiarity is None and trainer.emo.trust is None):
        return None
    training = trainer.emo.training
    trainer.emo.eval()
    try:
        active = [
            look_up(trainer.learner, trainer.params, episode, emo=trainer.emo).active
            for episode in batches(
                lambda start, count: _sample(experiment, protocol, start, count, answered=False),
                tasks=protocol.tasks,
            )
        ]
    finally:
        trainer.emo.train(training)
    return float(torch.cat(active).double().mean())


def _record(experiment: Experiment, protocol: Protocol, scores: Scores) -> dict[str, Any]:
    trainer, source = experiment.trainer, experiment.source
    values = scores.loss if scores.accuracy is None else scores.accuracy
    return {
        "method": method_name(trainer),
        "seed": experiment.config.train.seed,
        "step": trainer.iteration,
        "protocol": asdict(protocol),
        "data": source.fingerprint,
        "domains": list(source.domains),
        "metric": "mse" if scores.accuracy is None else "accuracy",
        "episode": scores.episode.tolist(),
        "domain": scores.domain.tolist(),
        "per_task": [[round(float(v), 7) for v in row] for row in values],
        "summary": _summary(values, scores.domain, source.domains),
    }


def method_name(trainer: Trainer) -> str:
    """Name the learner and how it remembers."""
    learner = _learner_name(trainer.learner)
    return learner if trainer.emo is None else f"{learner} + EMO"


def _learner_name(learner: Learner) -> str:
    if isinstance(learner, TaskGated):
        return type(learner.reader).__name__
    if isinstance(learner, BMG):
        under = _learner_name(learner.base)
        return "BMG" if under == "MAML" else f"BMG over {under}"
    if learner.loop.adapts != "all":
        return {"head": "ANIL", "body": "BOIL"}[learner.loop.adapts]
    return type(learner).__name__


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
