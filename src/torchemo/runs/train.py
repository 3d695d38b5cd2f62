"""A run: train in a folder, validate, save, stop gracefully, resume bit for bit."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

from torchemo.config.run import RunConfig
from torchemo.config.toml import dumps
from torchemo.core.errors import CheckpointError, ConfigError, DataError, Diverged, ResourceError
from torchemo.core.types import Params
from torchemo.data.source import TaskSource
from torchemo.runs.environment import differences, environment
from torchemo.runs.events import EventLog, JsonLines, truncate_after
from torchemo.runs.experiment import Experiment, complete, open_experiment
from torchemo.runs.folder import LOCK, RunFolder, lock
from torchemo.runs.footprint import footprint
from torchemo.runs.load import read_config
from torchemo.runs.storage import checkpoint, history
from torchemo.runs.storage.durable import TEMPORARY, megabytes
from torchemo.training.evaluate import Scores, batches, evaluate, judge_slots
from torchemo.training.trainer import StepReport, Trainer

VALIDATION_SEED = 0
"""Validation tasks are the same in every run."""


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        iteration: Outer steps done.
        best_step: The checkpoint with the best validation score.
        best_score: That score: accuracy, or minus the squared error.
        ended: All steps done, early stop, or asked to stop.
    """

    iteration: int
    best_step: int | None
    best_score: float | None
    ended: Literal["finished", "early", "stopped"]


@final
@dataclass(frozen=True)
class Progress:
    """What a run knows besides its tensors; saved with every checkpoint."""

    best_step: int | None = None
    best_score: float | None = None
    validations_since_best: int = 0
    skipped_in_a_row: int = 0
    skipped: tuple[int, ...] = ()

    def scored(self, step: int, score: float) -> "Progress":
        """Note a validation; a score that is not finite is never the best."""
        better = self.best_score is None or score > self.best_score
        if better and math.isfinite(score):
            return replace(self, best_step=step, best_score=score, validations_since_best=0)
        return replace(self, validations_since_best=self.validations_since_best + 1)

    def skip(self, step: int) -> "Progress":
        """Note a step that was left out because its numbers were not finite."""
        recent = tuple(s for s in self.skipped if s > step - 1000)
        return replace(self, skipped_in_a_row=self.skipped_in_a_row + 1, skipped=(*recent, step))

    @property
    def diverged(self) -> bool:
        """Ten steps in a row, or more than one in a hundred of the last thousand."""
        return self.skipped_in_a_row >= 10 or len(self.skipped) > 10


def config_hash(config: RunConfig) -> str:
    """Digest of everything that decides a run."""
    return hashlib.sha256(dumps(complete(config)).encode()).hexdigest()


def _start(root: Path, config: RunConfig) -> None:
    """Write the configuration of a new run; refuse to write over another run."""
    folder = RunFolder(root)
    _refuse_old(folder)
    folder.save(folder.config, dumps(complete(config)))
    folder.save(folder.environment, json.dumps(environment(), indent=2) + "\n")


def _refuse_too_large(experiment: Experiment) -> None:
    """Refuse a memory that this machine cannot hold before its first slot is touched."""
    memory = experiment.trainer.memory
    size = footprint(experiment.system, experiment.source.shape)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory is None or memory.store.values_dir is not None or size.memory_bytes <= machine:
        return
    raise ResourceError(
        f"a memory of {size.slots} slots takes {megabytes(size.memory_bytes)}, this machine has"
        f" {megabytes(machine)}.",
        hint="Use fewer slots (memory.capacity), or keep values in files (memory.values_dir).",
    )


def _refuse_old(folder: RunFolder) -> None:
    if folder.config.exists():
        raise ConfigError(
            f"{folder.root} holds a run already.",
            hint=f"Continue it with: torchemo train --resume {folder.root};"
            " or choose another --out.",
        )
    if folder.root.is_dir() and any(_is_foreign(path) for path in folder.root.iterdir()):
        raise ConfigError(
            f"{folder.root} holds something that is not a run.", hint="Choose another --out."
        )


def _is_foreign(path: Path) -> bool:
    """Return whether a file was left by something else than a run that never started."""
    return path.name != LOCK and not path.name.startswith(TEMPORARY)


def train_run(
    root: Path,
    config: RunConfig | None = None,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_event: Callable[[str, int, Mapping[str, Any]], None] = lambda event, step, fields: None,
    accept_new_data: bool = False,
    workers: int = 1,
) -> Outcome:
    """Train in a folder; with ``config`` None, continue the run that is there.

    Args:
        root: The run folder.
        config: Configuration of a new run.
        should_stop: Asked after every outer step; the run is then saved and left.
        on_event: Told everything that is logged.
        accept_new_data: Continue although the data have changed since the run was started.
        workers: Threads that share the tasks of a step; results do not depend on it.
    """
    # A run that cannot start must not leave a folder: everything is opened before anything is made.
    if config is not None:
        _refuse_old(RunFolder(root))
    experiment = open_experiment(
        read_config(root) if config is None else config,
        workers=workers,
        progress=_telling(on_event, should_stop),
    )
    _refuse_too_large(experiment)
    with lock(root):
        history.sweep(root)
        if config is not None:
            _start(root, config)
        run = _Run(root, experiment, on_event)
        if config is None:
            run.resume(accept_new_data=accept_new_data)
        with EventLog(JsonLines(RunFolder(root).events)) as log:
            run.log = log
            return run.loop(should_stop)


def _telling(
    on_event: Callable[[str, int, Mapping[str, Any]], None], should_stop: Callable[[], bool]
) -> Callable[[int, int], None]:
    """Report how many features are computed; stop between two images when asked to."""

    def tell(done: int, total: int) -> None:
        on_event("features", 0, {"done": done, "total": total})
        if should_stop():
            raise KeyboardInterrupt

    return tell


@final
class _Run:
    """The state of a run in progress."""

    def __init__(
        self,
        root: Path,
        experiment: Experiment,
        on_event: Callable[[str, int, Mapping[str, Any]], None],
    ) -> None:
        self.root = root
        self.experiment = experiment
        self.trainer = experiment.trainer
        self.on_event = on_event
        self.progress = Progress()
        self.saved_at: int | None = None
        self.log: EventLog | None = None
        self.fingerprint = experiment.source.fingerprint

    def resume(self, *, accept_new_data: bool) -> None:
        """Take over the newest checkpoint that verifies; later events are cut off."""
        found = history.latest(self.root)
        for damaged in found.skipped:
            self.on_event("damaged", 0, {"path": str(damaged.path), "why": damaged.reason})
        if found.path is None and found.skipped:
            raise CheckpointError(
                f"{self.root} has no checkpoint that can be read.",
                hint=f"See what is wrong with: torchemo checkpoint verify {self.root};"
                " or start anew with another --out.",
            )
        if found.path is None:
            truncate_after(RunFolder(self.root).events, -1)
            return
        saved = checkpoint.load(found.path)
        if saved.info.get("data") != self.fingerprint and not accept_new_data:
            raise DataError(
                f"{self.root}: the data differ from those the run was started with.",
                hint="Restore the data, or pass --accept-new-data to continue with these.",
            )
        self.trainer.load_state_dict({name: dict(g) for name, g in saved.groups.items()})
        known = saved.info["progress"]
        self.progress = Progress(**{**known, "skipped": tuple(known["skipped"])})
        self.saved_at = saved.step
        self._tell_differences()
        history.rewind(self.root, saved.step)
        truncate_after(RunFolder(self.root).events, saved.step)

    def _tell_differences(self) -> None:
        """Report that the run continues where its bits may come out differently."""
        try:
            then = json.loads(RunFolder(self.root).environment.read_text())
        except (OSError, ValueError):
            return  # the report says that it cannot be read
        changed = differences(then, environment()) if isinstance(then, dict) else []
        if changed:
            why = f"continues, but not bit for bit as it was started: {'; '.join(changed)}"
            self.on_event("environment", self.trainer.iteration, {"why": why})

    def loop(self, should_stop: Callable[[], bool]) -> Outcome:
        """Train until done, early stop, or asked to stop."""
        train, steps = self.experiment.config.train, self.experiment.config.outer_steps
        self._announce()
        while self.trainer.iteration < steps:
            if self._exhausted():
                return self._outcome("early")
            self._step()
            done = self.trainer.iteration
            if done % train.validate_every == 0 or done == steps:
                self._validate()
                self._save()
            if should_stop() and done < steps:
                self._save()
                return self._outcome("stopped")
        return self._outcome("finished")

    def _announce(self) -> None:
        """Say how large the run is, before its first step."""
        config, source = self.experiment.config, self.experiment.source
        size = footprint(self.experiment.system, source.shape)
        memory = self.trainer.memory
        fields = {
            "method": self.experiment.system.title,
            "data": _tasks(source),
            "steps": config.outer_steps,
            "seeded_at": None if memory is None else memory.seeded_at,
            "domains": list(source.domains),
            **size._asdict(),
            "memory_bytes": size.memory_bytes,
        }
        if self.trainer.phases.turn is not None:
            fields["turn"] = self.trainer.phases.turn
        if self.trainer.iteration == 0:
            self._emit("start", fields)
        else:  # it is in the log already
            self.on_event("start", self.trainer.iteration, fields)

    def _exhausted(self) -> bool:
        train = self.experiment.config.train
        if train.patience is None or self.progress.validations_since_best < train.patience:
            return False
        # A memory that trains after the learner is given as much time.
        begun = self.trainer.phases.turn or 0
        return self.trainer.iteration - begun >= train.patience * train.validate_every

    def _step(self) -> None:
        train, iteration = self.experiment.config.train, self.trainer.iteration
        episode = self.experiment.source.sample(
            "train", seed=train.seed, start=iteration * train.tasks, count=train.tasks
        )
        try:
            report = self.trainer.step(episode)
        except Diverged as error:
            self.trainer.skip()
            self.progress = self.progress.skip(iteration)
            self._emit("skipped", {"why": error.message})
            if self.progress.diverged:
                raise
            return
        self.progress = replace(self.progress, skipped_in_a_row=0)
        self._emit("step", _fields(report, self.trainer))

    def _validate(self) -> None:
        scores = self._validation_scores()
        loss = float(scores.loss[:, -1].mean())
        accuracy = None if scores.accuracy is None else float(scores.accuracy[:, -1].mean())
        score = -loss if accuracy is None else accuracy
        self.progress = self.progress.scored(self.trainer.iteration, score)
        fields: dict[str, Any] = {"loss": loss, "accuracy": accuracy, "score": score}
        memory = self.trainer.memory
        if memory is not None and memory.skip_unhelpful is not None:
            fields["failed"] = memory.failed_slots
        self._emit("validation", fields)

    def _validation_scores(self) -> Scores:
        """Score the validation tasks; a memory that judges its slots does so by them first."""
        train, trainer = self.experiment.config.train, self.trainer
        episodes = batches(
            lambda start, count: self.experiment.source.sample(
                "val", seed=VALIDATION_SEED, start=start, count=count
            ),
            tasks=train.validation_tasks,
            size=train.tasks,
        )
        how: dict[str, Any] = {"batched": trainer.batched, "workers": trainer.workers}
        memory, about = trainer.memory, (trainer.learner, trainer.params)
        if memory is not None and memory.skip_unhelpful is not None and len(memory.store):
            return judge_slots(*about, list(episodes), memory=memory, **how)
        return evaluate(*about, episodes, memory=memory, every_step=False, **how)

    def _save(self) -> None:
        step = self.trainer.iteration
        if self.saved_at == step:
            return
        groups = {name: group for name, group in self.trainer.state_dict().items() if group}
        _refuse_divergence(groups, step)
        if self.log is not None:
            self.log.flush()
        source = self.experiment.source
        shape = {**asdict(source.shape), "x": list(source.shape.x)}
        info = {
            "data": self.fingerprint,
            "domains": list(source.domains),
            "tasks": shape,
            "progress": _plain(self.progress),
        }
        checkpoint.publish(
            self.root,
            step,
            groups=groups,
            info=info,
            config_hash=config_hash(self.experiment.config),
        )
        self.saved_at = step
        best = [] if self.progress.best_step is None else [self.progress.best_step]
        history.prune(self.root, keep_last=2, keep=best)
        self.on_event("saved", step, {})

    def _emit(self, event: str, fields: Mapping[str, Any]) -> None:
        if self.log is not None:
            self.log.emit(event, self.trainer.iteration, fields=fields)
        self.on_event(event, self.trainer.iteration, fields)

    def _outcome(self, ended: Literal["finished", "early", "stopped"]) -> Outcome:
        best = self.progress
        return Outcome(self.trainer.iteration, best.best_step, best.best_score, ended)


def _refuse_divergence(groups: Mapping[str, Params], step: int) -> None:
    """Say that training diverged where a step left numbers that no checkpoint may hold."""
    for group in groups.values():
        for name, tensor in group.items():
            if not bool(tensor.isfinite().all()):
                raise Diverged(
                    f"outer step {step}: '{name}' is not finite any more.",
                    hint="Lower the outer rate, or set outer.clip.",
                )


def _tasks(source: TaskSource) -> str:
    """Say what tasks a run is trained on."""
    shape, names = source.shape, ", ".join(source.domains)
    if shape.kind == "regression":
        return f"{names}, {shape.n_shot} points"
    return f"{names}, {shape.n_out}-way {shape.n_shot}-shot"


def _plain(progress: Progress) -> dict[str, Any]:
    return {**vars(progress), "skipped": list(progress.skipped)}


def _fields(report: StepReport, trainer: Trainer) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "loss": float(report.losses.mean()),
        "gradient_norm": report.gradient_norm,
    }
    if report.recognition_loss is not None:
        fields["recognition_loss"] = report.recognition_loss
    if report.statistics is not None and trainer.memory is not None:
        fields["filled"] = len(trainer.memory.store)
        for name in ("age", "distance", "same_domain"):
            value = getattr(report.statistics, name)
            if value is not None:
                fields[name] = value
    return fields
