"""Processes of this machine, of one thread each, which are kept until the end."""

from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, final

from torchemo.config.registry import NoOptions
from torchemo.core.errors import ConfigError
from torchemo.lab.study.engines.engine import Errand, Handle, run_job
from torchemo.lab.study.job import Ended
from torchemo.runs.signals import GracefulStop


class WorkerLost(Exception):
    """The process that did a job has ended without a word."""


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection


@final
class Local(AbstractContextManager["Local"]):
    """Worker processes of this machine, as many as there are jobs at a time.

    Example:
        >>> with Local() as engine:
        ...     engine.every
        0.2
    """

    every = 0.2

    Options = NoOptions

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []

    @classmethod
    def build(cls, address: str, options: NoOptions, folder: Path) -> "Local":
        """Make it; it needs nothing."""
        if address:
            raise ConfigError(f"--on local takes no address, got '{address}'.")
        return cls()

    def submit(self, errand: Errand) -> Handle:
        """Send an errand to an idle process, or to a new one."""
        worker = self._idle.pop() if self._idle else _hire()
        self._busy.append(worker)
        with suppress(BrokenPipeError, OSError):  # where its process died, the result tells so
            worker.pipe.send(errand)
        return _Sent(worker, self)

    def release(self, worker: _Worker, *, alive: bool) -> None:
        """Take a worker back that has finished its job, or let go of one that died."""
        self._busy.remove(worker)
        if alive:
            self._idle.append(worker)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all processes; after an error without waiting for them."""
        for worker in (*self._idle, *self._busy):
            if kind is None and worker in self._idle:
                _dismiss(worker)
            if worker.process.is_alive():
                worker.process.terminate()
            worker.pipe.close()


@final
@dataclass
class _Sent:
    """A job in a process."""

    worker: _Worker
    engine: Local

    def done(self) -> bool:
        """Return whether the process has answered or died."""
        return self.worker.pipe.poll() or not self.worker.process.is_alive()

    def result(self) -> Ended:
        """Return how the job ended."""
        try:
            # What it has sent before it died is still there.
            found: Ended = self.worker.pipe.recv()
        except (EOFError, OSError) as error:
            self.engine.release(self.worker, alive=False)
            raise WorkerLost("its process died") from error
        self.engine.release(self.worker, alive=True)
        return found

    def cancel(self) -> None:
        """End the process."""
        self.worker.process.kill()
        self.engine.release(self.worker, alive=False)


def _dismiss(worker: _Worker) -> None:
    with suppress(BrokenPipeError, OSError):
        worker.pipe.send(None)
        worker.process.join(timeout=10)


def _serve(pipe: Connection) -> None:
    """Work through jobs until there are no more: the main function of a worker."""
    with GracefulStop():  # Ctrl-C reaches the workers, too: between two jobs it means nothing
        while True:
            try:
                errand = pipe.recv()
            except EOFError:
                return
            if errand is None:
                return
            pipe.send(run_job(errand))


def _hire() -> _Worker:
    # A fresh interpreter: torch's threads do not survive a fork.
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)
