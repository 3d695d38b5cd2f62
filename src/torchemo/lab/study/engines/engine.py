"""What carries jobs to other processes and machines, and what a worker there does with one."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Protocol, final

import torch

from torchemo.core.allocator import keep_memory, wanted
from torchemo.core.errors import ConfigError
from torchemo.lab.study.job import Ended, Job, work
from torchemo.runs.environment import versions
from torchemo.runs.signals import GracefulStop
from torchemo.runs.storage.heartbeat import beating

SHARED = ("torchemo", "torch")
"""Packages whose versions decide what a run computes."""
LOOK_EVERY = 1.0
"""Seconds between two looks for a wish to stop."""


@final
@dataclass(frozen=True)
class Errand:
    """A job on its way to a worker; plain, so that any engine can carry it.

    Attributes:
        job: What to do; its folder is one that the worker sees, too.
        stops: The job is saved and left as soon as one of these files is there.
        beat: File beside which the worker gives signs of life.
        versions: Those of whoever sends it; a worker with others refuses.
    """

    job: Job
    stops: tuple[Path, ...]
    beat: Path
    versions: Mapping[str, str]


class Handle(Protocol):
    """A job on an engine: what a future, a job of submitit and a future of dask have in common."""

    def done(self) -> bool:
        """Return whether it has ended, in whatever way."""
        ...

    def result(self) -> Ended:
        """Return how it ended; raise whatever there is where its worker was lost."""
        ...

    def cancel(self) -> object:
        """Give it up, if that is possible."""
        ...


class Engine(AbstractContextManager["Engine"], Protocol):
    """Carries errands to workers; it need not be reliable, see `Crew`."""

    every: float
    """Seconds between two looks at its jobs."""

    def submit(self, errand: Errand) -> Handle:
        """Send an errand to a worker."""
        ...


@final
class Executing(AbstractContextManager["Executing"]):
    """Any executor of ``concurrent.futures`` as an engine.

    Args:
        executor: Where jobs are done.
        close: Called at the end.
        every: Seconds between two looks at its jobs.
    """

    def __init__(
        self, executor: Executor, *, close: Callable[[], object] = lambda: None, every: float = 1.0
    ) -> None:
        self.every = every
        self._executor = executor
        self._close = close

    def submit(self, errand: Errand) -> Handle:
        """Send an errand to a worker."""
        return self._executor.submit(run_job, errand)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Part from the workers."""
        self._close()


@final
class StopFiles:
    """A wish to stop, as files that all machines see.

    Args:
        paths: One of them is enough; the first is that of this session.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._looked = float("-inf")
        self._found = False

    def ask(self) -> None:
        """Make the wish known."""
        self.paths[0].parent.mkdir(parents=True, exist_ok=True)
        self.paths[0].touch()
        self._found = True

    def asked(self) -> bool:
        """Return whether somebody asked, looking now and then."""
        if not self._found and time.monotonic() - self._looked >= LOOK_EVERY:
            self._looked = time.monotonic()
            self._found = any(path.exists() for path in self.paths)
        return self._found


def run_job(errand: Errand) -> Ended:
    """Do a job in a worker, with one thread; signals and stop files save it and end it."""
    job, stops = errand.job, StopFiles(errand.stops)
    other = {n: (v, now) for n, v in errand.versions.items() if (now := versions().get(n)) != v}
    if other:
        found = ", ".join(f"{name} {now} instead of {v}" for name, (v, now) in other.items())
        return Ended(job.run, "failed", f"its worker has {found}; install the same there")
    torch.set_num_threads(1)
    if wanted():  # the study was started by a command
        keep_memory()
    errand.beat.parent.mkdir(parents=True, exist_ok=True)
    with GracefulStop() as stop, beating(errand.beat):
        return work(
            job,
            tell=lambda step: None,
            should_stop=lambda: stop.requested is not None or stops.asked(),
        )


def sent_by_us() -> dict[str, str]:
    """Return the versions that a worker must have, too."""
    return {name: version for name, version in versions().items() if name in SHARED}


def needed(module: str, *, extra: str) -> ModuleType:
    """Import what an engine is made of.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{module.partition('.')[0]} is not installed ({error}).",
            hint=f"pip install 'torchemo[{extra}]'",
        ) from error
