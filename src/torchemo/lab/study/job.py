"""One run of a study: train it unless it is there, then score it and look at its recalls."""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, final

from torchemo.config.machine import CPU_ALONE, Machine
from torchemo.config.run import RunConfig
from torchemo.config.toml import loads
from torchemo.core.errors import DataError, Diverged, RunExists, RunInUse, TorchemoError
from torchemo.lab.study.cost import measure_cost
from torchemo.lab.study.diagnosis import diagnose
from torchemo.lab.study.streams.visits import Asked
from torchemo.runs.events import plain
from torchemo.runs.folder import RunFolder
from torchemo.runs.load import Opened, load_best, read_config
from torchemo.runs.score import Protocol, score_tasks
from torchemo.runs.train import train_run
from torchemo.training.device import place_of

Tell: TypeAlias = Callable[[int], None]
"""Called with the number of outer steps of a job that are done."""


class Scoring(NamedTuple):
    """Test tasks for a run.

    Attributes:
        file: The file beside the run.
        protocol: Which tasks.
        source: Other data than its own, if any.
        every_step: Score after every inner step, or after the last alone, which takes less time.
        asked: What is asked of tasks that come back; they take the place of the protocol's.
        scheme: Which splits of the other data, where they have several.
    """

    file: str
    protocol: Protocol
    source: tuple[str, ...] | None = None
    every_step: bool = True
    asked: Asked | None = None
    scheme: str | None = None


@final
@dataclass(frozen=True)
class Job:
    """One run and what to do with it; plain enough to be sent to another process.

    Attributes:
        run: Name of the run.
        root: Its folder.
        config: Its configuration as TOML.
        steps: Its outer steps.
        scorings: Test tasks to score.
        diagnosed: Tasks on which its recalls are looked at; 0 for none.
        cost: Measure what a step costs instead of training.
        machine: Where to compute; it is no part of the run's name.
    """

    run: str
    root: Path
    config: str
    steps: int
    scorings: tuple[Scoring, ...] = ()
    diagnosed: int = 0
    cost: bool = False
    machine: Machine = CPU_ALONE


class Ended(NamedTuple):
    """How a job ended; ``why`` is for people. One that is busy is being done by another process."""

    run: str
    how: Literal["done", "diverged", "stopped", "failed", "busy"]
    why: str = ""


def unite(jobs: Sequence[Job]) -> list[Job]:
    """Return one job per run that does all that is asked: cells that share a run may test it differently."""
    united: dict[str, Job] = {}
    for job in jobs:
        known = united.get(job.run, job)
        united[job.run] = replace(
            known,
            scorings=tuple(dict.fromkeys((*known.scorings, *job.scorings))),
            diagnosed=max(known.diagnosed, job.diagnosed),
        )
    return list(united.values())


def is_done(job: Job) -> bool:
    """Return whether everything a job would leave behind is there."""
    if job.cost:
        return (job.root / "cost.json").is_file()
    ended = read_json(job.root / "done.json")
    if ended is None:
        return False
    if ended["ended"] == "diverged":
        return True
    if not job.scorings and ended.get("restored") and "best_score" not in ended:
        return False  # it is of a grid, and of its validation score nothing was recorded
    wanted = [scoring.file for scoring in job.scorings]
    wanted += ["recall.json"] if job.diagnosed else []
    return all((job.root / name).is_file() for name in wanted)


def work(job: Job, *, tell: Tell, should_stop: Callable[[], bool]) -> Ended:
    """Do a job as far as it is not done; an error ends this job alone."""
    try:
        return _work(job, tell, should_stop)
    except Diverged as error:
        _save(job.root, "done.json", {"ended": "diverged", "why": error.message})
        return Ended(job.run, "diverged", error.message)
    except (RunInUse, RunExists) as error:  # another worker has it, or has just begun it
        return Ended(job.run, "busy", error.message)
    except TorchemoError as error:
        return Ended(job.run, "failed", str(error))
    except (OSError, MemoryError, RuntimeError, ValueError) as error:
        return Ended(job.run, "failed", f"{type(error).__name__}: {error}")


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a file that may not be there."""
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _work(job: Job, tell: Tell, should_stop: Callable[[], bool]) -> Ended:
    config = loads(job.config, RunConfig, where=f"run {job.run}")
    if job.cost:
        _save(job.root, "cost.json", measure_cost(config, place_of(job.machine)))
        return Ended(job.run, "done")
    ended = read_json(job.root / "done.json")
    if ended is not None and ended.get("restored"):
        # What was recorded of a run is not the run: asked for more than that, it is trained anew.
        shutil.rmtree(job.root)
        ended = None
    if ended is None:
        ended = _train(job, config, tell, should_stop)
        if ended is None:
            return Ended(job.run, "stopped")
    if ended["ended"] == "diverged":
        return Ended(job.run, "diverged", ended["why"])
    tell(job.steps)
    _score_streams(job)
    for scoring in job.scorings:
        if should_stop():
            return Ended(job.run, "stopped")
        if not (job.root / scoring.file).is_file():
            _score(job, scoring)
    if job.diagnosed and not (job.root / "recall.json").is_file():
        _save(job.root, "recall.json", diagnose(_opened(job), tasks=job.diagnosed))
    return Ended(job.run, "done")


def _train(
    job: Job, config: RunConfig, tell: Tell, should_stop: Callable[[], bool]
) -> dict[str, Any] | None:
    """Train, from where it was left if it was; return how it ended, or None if it was stopped."""

    def on_event(event: str, step: int, fields: Mapping[str, Any]) -> None:
        if event == "step":
            tell(step)

    resumed = RunFolder(job.root).config.exists()
    cost = read_json(job.root / "cost.json")
    if cost is not None and not resumed:
        shutil.rmtree(
            job.root
        )  # it was measured without a run, and a run begins in a place of its own
    began = time.process_time()
    outcome = train_run(
        job.root,
        None if resumed else config,
        should_stop=should_stop,
        on_event=on_event,
        place=place_of(job.machine),
    )
    if outcome.ended == "stopped":
        return None
    # Only an unbroken run knows what it cost.
    seconds = None if resumed else round(time.process_time() - began, 2)
    ended = {**outcome._asdict(), "cpu_seconds": seconds}
    _save(job.root, "done.json", ended)
    if cost is not None:
        _save(job.root, "cost.json", cost)
    return ended


def _score(job: Job, scoring: Scoring) -> None:
    opened = _opened(job, scoring.source, scoring.scheme)
    try:
        record = score_tasks(opened, scoring.protocol, every_step=scoring.every_step)
    except DataError as error:  # a score that is not finite is a result too, of these tasks alone
        record = {"diverged": error.message}
    _save(job.root, scoring.file, {"run": job.run, **record})


def _score_streams(job: Job) -> None:
    """Score all kinds of memory on tasks that come back, in one pass over these."""
    from torchemo.lab.study.streams.scored import score_streams

    missing = [
        (scoring.file, scoring.asked)
        for scoring in job.scorings
        if scoring.asked is not None and not (job.root / scoring.file).is_file()
    ]
    if missing:
        records = score_streams(_opened(job), [asked for _, asked in missing])
        for (file, _), record in zip(missing, records, strict=True):
            _save(job.root, file, {"run": job.run, **record})


def _opened(job: Job, source: tuple[str, ...] | None = None, scheme: str | None = None) -> Opened:
    """Open a run with its own data, or with others that are only tested on."""
    place = place_of(job.machine)
    if source is None:
        return load_best(job.root, place=place)
    data = replace(read_config(job.root).data, source=source, scheme=scheme)
    return load_best(job.root, data=data, needed=("test",), place=place)


def _save(root: Path, name: str, content: Mapping[str, Any]) -> None:
    RunFolder(root).save(root / name, json.dumps(plain(content)) + "\n")
