"""A run: train in a folder, validate, save, stop gracefully, resume bit for bit."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, final

from torchemo.config.run import RunConfig
from torchemo.config.toml import dumps
from torchemo.core.digest import digest_of
from torchemo.core.errors import ConfigError, DataError, Diverged, RunExists
from torchemo.core.types import Params
from torchemo.data.source import TaskSource, sent_to
from torchemo.runs import sinks
from torchemo.runs.environment import environment, since_the_start
from torchemo.runs.events import EventLog
from torchemo.runs.experiment import (
    Experiment,
    agree_on,
    complete,
    open_experiment,
    refuse_idle_ranks,
)
from torchemo.runs.folder import LOCK, OWNER, RunFolder, lock
from torchemo.runs.footprint import footprint, refuse_too_large
from torchemo.runs.load import check_config, config_hash, read_config, start_from
from torchemo.runs.storage import checkpoint, history, info, takeover, versions
from torchemo.runs.storage.durable import TEMPORARY
from torchemo.runs.storage.heartbeat import Beat
from torchemo.runs.storage.manifest import Manifest
from torchemo.runs.storage.seal import with_digest
from torchemo.training.dense.work import Work, work_of
from torchemo.training.device import HERE, Place
from torchemo.training.evaluate import Scores, batches, evaluate, judge_slots
from torchemo.training.feed import Feed
from torchemo.training.progress import Outcome, Progress, logged

VALIDATION_SEED = 0
"""Validation tasks are the same in every run."""


def _start(root: Path, config: RunConfig, place: Place) -> None:
    """Write the configuration of a new run; refuse to write over another run."""
    folder = RunFolder(root)
    _refuse_old(folder)
    folder.save(folder.config, dumps(complete(config)))
    folder.save(folder.environment, json.dumps(with_digest(environment(place)), indent=2) + "\n")


def _refuse_old(folder: RunFolder) -> None:
    there = set(folder.root.glob("*"))  # one look: another process may begin a run meanwhile
    if folder.config in there:
        raise RunExists(
            f"{folder.root} holds a run already.",
            hint=f"Continue it with: torchemo train --resume {folder.root};"
            " or choose another --out.",
        )
    if any(_is_foreign(path) for path in there):
        wrong = f"{folder.root} holds something that is not a run."
        raise ConfigError(wrong, hint="Choose another --out.")


def _is_foreign(path: Path) -> bool:
    """Return whether a file was left by something else than a run that never started."""
    return path.name not in (LOCK, OWNER) and not path.name.startswith(TEMPORARY)


def train_run(
    root: Path,
    config: RunConfig | None = None,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_event: Callable[[str, int, Mapping[str, Any]], None] = lambda event, step, fields: None,
    accept_new_data: bool = False,
    strict: bool = False,
    log: Sequence[str] = (),
    place: Place = HERE,
) -> Outcome:
    """Train in a folder; with ``config`` None, continue the run that is there.

    Args:
        root: The run folder.
        config: Configuration of a new run.
        should_stop: Asked after every step; the run is then saved and left.
        on_event: Told all that is logged.
        accept_new_data: Continue although the data have changed since the run was started.
        strict: Refuse data with images that cannot be read, instead of leaving these out.
        log: Where else events go: ``tensorboard``, ``wandb``.
        place: Where to compute, how precisely, and by how many threads.
    """
    # A run that cannot start must not leave a folder: everything is opened before anything is made.
    if config is not None:
        _refuse_old(RunFolder(root))
    sinks.require(log)
    team, chosen = place.team, read_config(root) if config is None else config
    on_event = on_event if team.rank == 0 else _silent  # rank 0 speaks for all
    tell = _telling(on_event, should_stop)
    experiment = team.together(lambda: _opened(chosen, strict, place, tell))
    with ExitStack() as held:
        agree_on(experiment, place)
        run = _Run(root, experiment, on_event, place)
        team.first(lambda: run.hold(config, held))
        if config is None:
            run.resume(accept_new_data=accept_new_data)
        if team.rank == 0:
            run.log = held.enter_context(sinks.open_log(root, copies=log))
        return run.loop(should_stop)


def _opened(
    config: RunConfig, strict: bool, place: Place, tell: Callable[[int, int], None]
) -> Experiment:
    """Open everything, and refuse what cannot work."""
    experiment = open_experiment(config, strict=strict, place=place, progress=tell)
    refuse_too_large(experiment.system, experiment.source.shape)
    refuse_idle_ranks(experiment, place)
    return experiment


def _silent(event: str, step: int, fields: Mapping[str, Any]) -> None:
    """Tell nobody."""


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
        place: Place,
    ) -> None:
        self.root = root
        self.place = place
        self.team = place.team
        self.experiment = experiment
        self.trainer = experiment.trainer
        self.on_event = on_event
        self.progress = Progress()
        self.saved_at: int | None = None
        self.log: EventLog | None = None
        self.beat: Beat | None = None
        self.fingerprint = experiment.source.fingerprint
        self.source = sent_to(experiment.source, place.device)
        self.feed = Feed(self._work_of, place.device)
        self.began = time.process_time()
        versions.own(self.trainer.memory, root, rank=self.team.rank)

    def hold(self, config: RunConfig | None, held: ExitStack) -> None:
        """Lock the folder, and write the configuration of a new run."""
        self.beat = held.enter_context(lock(self.root))
        history.sweep(self.root)
        if config is not None:
            _start(self.root, config, self.place)

    def resume(self, *, accept_new_data: bool) -> None:
        """Take over the newest checkpoint that verifies; later events are cut off."""
        path = self.team.first(lambda: takeover.newest(self.root, self.on_event))
        if path is None:
            return
        saved = info.check_run_state(checkpoint.load(path))
        check_config(self.root, self.experiment.config, saved.manifest)
        if saved.info.get("data") != self.fingerprint and not accept_new_data:
            raise DataError(
                f"{self.root}: the data differ from those the run was started with.",
                hint="Restore the data, or pass --accept-new-data to continue with these.",
            )
        with info.restoring(saved):
            self.trainer.load_state_dict({name: dict(g) for name, g in saved.groups.items()})
        self.progress = info.progress_of(saved.manifest)
        self.saved_at = saved.step
        self._forget_damaged_best()
        self._tell_differences()
        self.team.first(lambda: self._rewind(saved.manifest))

    def _rewind(self, saved: Manifest) -> None:
        history.rewind(self.root, saved.step)
        takeover.cut_log(self.root, saved.step, self.on_event, events=info.events_of(saved))

    def _forget_damaged_best(self) -> None:
        """Look at the best checkpoint while others are left; without it the best is sought anew."""
        step = self.progress.best_step
        if step is None or step == self.saved_at:
            return
        if not self.team.first(lambda: takeover.is_sound(self.root, step, self.on_event)):
            self.progress = replace(self.progress, best_step=None, best_score=None)

    def _tell_differences(self) -> None:
        """Report that the run continues where its bits may come out differently."""
        why = since_the_start(RunFolder(self.root).environment, self.place)
        if why:
            self.on_event("environment", self.trainer.iteration, {"why": why})

    def loop(self, should_stop: Callable[[], bool]) -> Outcome:
        """Train until done, early stop, or asked to stop."""
        train, steps = self.experiment.config.train, self.experiment.config.outer_steps
        if self.saved_at is None:
            start_from(self.experiment)
        self._announce()
        if train.validate_start and self.trainer.iteration == 0 and self.saved_at is None:
            self._validate()
            self._save()
        while self.trainer.iteration < steps:
            if self._exhausted() or self._no_slot_helps():
                return self._outcome("early")
            self._step()
            done = self.trainer.iteration
            if done % train.validate_every == 0 or done == steps:
                self._validate()
                self._compare_replicas()
                self._save()
            # Every rank leaves after the same step, whichever of them was asked to.
            if self.team.any(should_stop()) and done < steps:
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
        images = getattr(source, "source", source)  # a stream draws its tasks from another source
        if bad := getattr(images, "left_out", ()):
            fields["left_out"] = [one._asdict() for one in bad]
        if dropped := getattr(images, "dropped", 0):
            fields["dropped"] = dropped
        if classes := getattr(images, "class_names", {}):
            fields["classes"] = classes
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

    def _no_slot_helps(self) -> bool:
        """Return whether the slots have had half of their steps in vain, and say so."""
        turn, own = self.trainer.phases.turn, self.experiment.config.memory_steps or 0
        half = turn is not None and self.trainer.iteration - turn >= own / 2
        if half and self.progress.hopeless:
            why = "no slot helps on validation tasks: they are adapted without memory"
            self._emit("slots stopped", {"why": why})
        return half and self.progress.hopeless

    def _work_of(self, step: int) -> Work:
        train = self.experiment.config.train
        return work_of(self.source, train, self.trainer.phases, self.trainer.learner, step=step)

    def _step(self) -> None:
        iteration = self.trainer.iteration
        try:
            work = self.feed(iteration)
            report = self.trainer.step(work.tasks, images=work.images)
        except Diverged as error:
            self.trainer.skip()
            self.progress = self.progress.skip(iteration)
            self._emit("skipped", {"why": error.message})
            if self.progress.diverged:
                raise
            return
        self.progress = replace(self.progress, skipped_in_a_row=0)
        self._emit("step", logged(report, self.trainer))

    def _validate(self) -> None:
        scores = self._validation_scores()
        loss = float(scores.loss[:, -1].mean())
        accuracy = None if scores.accuracy is None else float(scores.accuracy[:, -1].mean())
        score = -loss if accuracy is None else accuracy
        self.progress = self.progress.scored(self.trainer.iteration, score)
        fields: dict[str, Any] = {"loss": loss, "accuracy": accuracy, "score": score}
        memory = self.trainer.memory
        if memory is not None and memory.skip_unhelpful is not None:
            failed = memory.failed_slots or []
            fields |= {"failed": failed, "none_helps": 0 < len(memory.store) <= len(failed)}
            self.progress = self.progress.judged(none_passed=fields["none_helps"])
        fields["cpu_seconds"] = round(time.process_time() - self.began, 2)
        self._emit("validation", fields)

    def _validation_scores(self) -> Scores:
        """Score the validation tasks; a memory that judges its slots does so by them first."""
        train, trainer = self.experiment.config.train, self.trainer
        episodes = batches(
            lambda start, count: self.source.sample(
                "val", seed=VALIDATION_SEED, start=start, count=count
            ),
            tasks=train.validation_tasks,
            size=train.tasks,
        )
        how: dict[str, Any] = {"batched": trainer.batched, "workers": trainer.workers}
        how["team"] = self.team
        memory, about = trainer.memory, (trainer.learner, trainer.params)
        if memory is not None and memory.skip_unhelpful is not None and len(memory.store):
            return judge_slots(*about, list(episodes), memory=memory, **how)
        return evaluate(*about, episodes, memory=memory, every_step=False, **how)

    def _compare_replicas(self) -> None:
        """Refuse ranks whose numbers have drifted apart, before they are saved."""
        if self.team.size > 1:
            digest = digest_of(versions.comparable(self.trainer.state_dict()))
            where = (
                f"their state after step {self.trainer.iteration}, computed at {self.place.words}"
            )
            self.team.agree(where, digest)

    def _save(self) -> None:
        step = self.trainer.iteration
        if self.saved_at == step:
            return
        groups = {name: group for name, group in self.trainer.state_dict().items() if group}
        _refuse_divergence(groups, step)
        if self.log is not None:
            self.log.flush()
        about = info.run_info(
            self.experiment.source,
            self.progress,
            data=self.fingerprint,
            config=dumps(complete(self.experiment.config)),
            events=0 if self.log is None else self.log.lines,
        )
        about |= versions.info(groups.get("memory", {}))
        digest = config_hash(self.experiment.config)
        best = [] if self.progress.best_step is None else [self.progress.best_step]

        def publish() -> None:
            if self.beat is not None:
                self.beat.check()
            checkpoint.publish(self.root, step, groups=groups, info=about, config_hash=digest)
            history.prune(self.root, keep_last=2, keep=best)
            versions.collect(self.root, versions.folder_of(self.experiment.config))

        self.team.first(publish)
        self.saved_at = step
        self.on_event("saved", step, {})

    def _emit(self, event: str, fields: Mapping[str, Any]) -> None:
        if self.beat is not None:
            self.beat.check()
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
