"""Fill a memory from the tasks or the slots of many runs; what it gives is a run.

The learner is frozen. Tasks are drawn from the training data of each run, and what is remembered of them is
what training would remember. The state of an unfinished build is in ``OUT/building``; ``OUT`` becomes a run
when all is written, so that `eval`, `adapt`, `serve` and ``train --resume`` work on it.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor

from torchemo.config.toml import dumps
from torchemo.core.errors import ConfigError, MemoryWriteError
from torchemo.core.types import Episode, Params
from torchemo.learners.learner import Scheduled
from torchemo.memory.inspection.slots import restored_memory
from torchemo.memory.interface import TaskMemory
from torchemo.memory.store import EpisodicMemory
from torchemo.runs import sinks
from torchemo.runs.building.plan import (
    SEED,
    Plan,
    tasks_from,
    unfinished,
    without_slots,
)
from torchemo.runs.environment import environment
from torchemo.runs.experiment import build_trainer
from torchemo.runs.folder import RunFolder, lock
from torchemo.runs.footprint import refuse_too_large
from torchemo.runs.load import config_hash
from torchemo.runs.storage import checkpoint, durable, history, versions
from torchemo.runs.storage.info import restoring
from torchemo.runs.storage.seal import with_digest
from torchemo.training.device import HERE, Place, to_device
from torchemo.training.step import outer_step

BUILDING = "building"
"""Folder of what is not finished."""
KEEP_EVERY = 1000
"""Tasks after which a build is saved, or a twentieth of all of them."""


class Built(NamedTuple):
    """What a build came to.

    Attributes:
        done: Tasks or slots that were gone through.
        total: How many there are.
        left_out: Of them, tasks whose gradient is not finite.
        filled: Slots that hold something.
    """

    done: int
    total: int
    left_out: int
    filled: int


def build(
    plan: Plan,
    out: Path,
    *,
    place: Place = HERE,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Built:
    """Build a memory in a folder, or continue a build that was left.

    Args:
        plan: What to build.
        out: The folder.
        place: Where to compute.
        should_stop: Asked after every batch; what is done is then saved.
        on_progress: Told how many of all tasks are done.
    """
    _refuse_other(out)
    with ExitStack() as held:
        work = _Build(plan, out, place)
        held.enter_context(lock(out))
        work.resume()
        while work.done < plan.total:
            work.some()
            on_progress(work.done, plan.total)
            if should_stop() and work.done < plan.total:
                work.save()
                return work.built
        work.finish()
        return work.built


def _refuse_other(out: Path) -> None:
    """Refuse a folder that holds something else than an unfinished build."""
    if (out / BUILDING).is_dir():
        return
    known = (".lock", ".owner", "values")
    others = [p.name for p in out.iterdir() if p.name not in known] if out.is_dir() else []
    if RunFolder(out).config.exists() or others:
        what = "a run" if RunFolder(out).config.exists() else f"{others[0]!r}"
        raise ConfigError(f"{out} holds {what} already.", hint="Choose another --out.")


@final
class _Build:
    """A build in progress."""

    def __init__(self, plan: Plan, out: Path, place: Place) -> None:
        self.plan, self.out, self.place = plan, out, place
        self.done = self.left_out = self.saved_at = 0
        self.values = versions.folder_of(plan.config)
        first = plan.givers[0]
        if self.values == (out / "values").resolve():
            durable.make_folder(self.values)
        self.trainer = build_trainer(plan.config, first.shape, place=place)
        if self.trainer.memory is None:
            raise ConfigError("there is no memory to build.")
        self.memory: TaskMemory = self.trainer.memory
        refuse_too_large(self.trainer.system, first.shape)
        empty = self.memory.state_dict()
        groups = {name: dict(group) for name, group in first.saved.groups.items()}
        groups.pop("emo", None)
        groups["memory"] = {**empty, **without_slots(first.memory)}
        with restoring(first.saved):
            self.trainer.load_state_dict(groups)
        versions.own(self.memory, out)
        self.sources: dict[int, Callable[[int, int], Episode]] = {}
        self.stores: dict[int, EpisodicMemory] = {}

    @property
    def built(self) -> Built:
        """What it came to so far."""
        return Built(self.done, self.plan.total, self.left_out, len(self.memory.store))

    # -- filling -------------------------------------------------------------------------------------

    def some(self) -> None:
        """Go through some batches, until it is time to save."""
        every = max(KEEP_EVERY, self.plan.total // 20)
        for run, first, count in self.plan.batches(self.done):
            try:
                self._add(run, first, count)
            except MemoryWriteError:  # a refused batch changes nothing
                self.left_out += count
            self.done += count
            break
        if self.done - self.saved_at >= every and self.done < self.plan.total:
            self.save()

    def _add(self, run: int, first: int, count: int) -> None:
        if self.plan.take == "slots":
            self._copy(run, first, count)
        else:
            self._remember(self._tasks(run, first, count))

    def _tasks(self, run: int, first: int, count: int) -> Episode:
        giver = self.plan.givers[run]
        if run not in self.sources:
            source, seed = tasks_from(giver), SEED + giver.config.train.seed
            self.sources[run] = lambda start, count: source.sample(
                "train", seed=seed, start=start, count=count
            )
        episode = self.sources[run](first, count)
        domain = episode.domain
        return episode if domain is None else replace(episode, domain=self._numbers(run)[domain])

    def _numbers(self, run: int) -> Tensor:
        """Return the number that each domain of a run has among those of all runs."""
        known = self.plan.domains
        own = [known.index(name) for name in self.plan.givers[run].domains]
        return torch.tensor(own, dtype=torch.int64, device="cpu")

    def _remember(self, episode: Episode) -> None:
        trainer, learner = self.trainer, self.trainer.learner
        if isinstance(learner, Scheduled):
            learner = learner.scheduled(trainer.iteration)
        found = outer_step(
            learner,
            trainer.params,
            to_device(episode, self.place.device),
            memory=self.memory,
            batched=trainer.batched,
            workers=trainer.workers,
        )
        if found.recall is not None:
            self.memory.remember(found.recall, found.values, params=trainer.params)

    def _copy(self, run: int, first: int, count: int) -> None:
        """Copy slots of a run, the oldest first."""
        giver = self.plan.givers[run]
        if run not in self.stores:
            dtype = getattr(torch, giver.config.memory.options["value_dtype"])
            folder = versions.folder_of(giver.config)
            self.stores[run] = restored_memory(giver.memory, value_dtype=dtype, values_dir=folder)
        old, store = self.stores[run], self.memory.store
        slots = old.ledger.written[: len(old)].argsort(stable=True)[first : first + count]
        values = {name: value[0] for name, value in old.read(slots[None]).items()}
        notes = {name: note[0] for name, note in old.read_notes(slots[None]).items()}
        if "domain" in notes:
            notes["domain"] = self._numbers(run)[notes["domain"]]
        store.write(old.keys[slots].to(store.keys), values, notes=notes)
        store.end_batch()
        self.memory.retrieval.learn(store)

    # -- saving --------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Go on where a build was left."""
        folder = self.out / BUILDING
        history.sweep(folder)
        path = history.latest(folder).path
        if path is None:
            return
        saved = checkpoint.load(path)
        unfinished(folder, saved.info.get("plan", {}), self.plan)
        with restoring(saved):
            self.memory.load_state_dict(saved.groups["memory"])
            self.left_out = int(saved.info["left_out"])
        self.done = self.saved_at = saved.step

    def save(self) -> None:
        """Save how far it is; whenever the process dies, the last state that was saved is there."""
        if self.saved_at == self.done:
            return
        state = self._state()
        info = {"plan": self.plan.plain, "left_out": self.left_out, **versions.info(state)}
        folder = self.out / BUILDING
        checkpoint.publish(folder, self.done, groups={"memory": state}, info=info)
        history.prune(folder, keep_last=2)
        self._collect()
        self.saved_at = self.done

    def finish(self) -> None:
        """Make the folder a run, and delete what the build needed."""
        first, folder = self.plan.givers[0], RunFolder(self.out)
        step, groups = self.trainer.iteration, self.trainer.state_dict()
        folder.save(folder.config, dumps(self.plan.config))
        about = json.dumps(with_digest(environment(self.place)), indent=2) + "\n"
        folder.save(folder.environment, about)
        if not checkpoint.step_folder(self.out, step).exists():
            self._log(step)
            progress = dict(first.saved.info["progress"])
            progress["best_step"] = None if progress["best_score"] is None else step
            info = {**first.saved.info, "config": dumps(self.plan.config), "progress": progress}
            info |= {"domains": list(self.plan.domains), "built_from": self.plan.plain["runs"]}
            info.pop(versions.VALUES, None)
            checkpoint.publish(
                self.out,
                step,
                groups={name: group for name, group in groups.items() if group},
                info={**info, **versions.info(groups["memory"])},
                config_hash=config_hash(self.plan.config),
            )
        if (self.out / BUILDING).exists():
            durable.remove(self.out / BUILDING)
        self._collect()

    def _log(self, step: int) -> None:
        with sinks.open_log(self.out) as log:
            log.emit("built", step, fields=self.built._asdict())

    def _state(self) -> Params:
        state = self.memory.state_dict()
        return {name: t.detach().to("cpu", copy=True) for name, t in state.items()}

    def _collect(self) -> None:
        versions.collect(self.out, self.values, also=(self.out / BUILDING,))
