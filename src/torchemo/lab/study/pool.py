"""Jobs side by side in processes of one thread each; one that fails or dies does not stop the others."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple, final

import torch

from torchemo.core.allocator import keep_memory, wanted
from torchemo.lab.study.job import Ended, Job, work
from torchemo.runs.signals import GracefulStop

OnStep = Callable[[str, int], None]
"""Told the name of a run and how many of its outer steps are done."""

TOLD_EVERY = 0.3
"""Seconds between two messages of a job about its steps."""


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection


@final
class Crew:
    """Worker processes that are kept until the end; with one worker everything happens in this process.

    Example:
        >>> with Crew(1) as crew:
        ...     crew.do([])
        []
    """

    def __init__(self, workers: int = 2) -> None:
        self.workers = workers
        self._staff: list[_Worker] = []

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for worker in self._staff:
            if kind is None:
                _send(worker.pipe, None)
                worker.process.join(timeout=10)
            if worker.process.is_alive():
                worker.process.terminate()
            worker.pipe.close()

    def do(
        self,
        jobs: Sequence[Job],
        *,
        on_step: OnStep = lambda run, step: None,
        on_end: Callable[[Ended], None] = lambda ended: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[Ended]:
        """Do jobs.

        Args:
            jobs: The jobs, of different runs.
            on_step: Told about steps.
            on_end: Told when a job has ended.
            should_stop: Asked now and then; running jobs then save and end, others are not begun.

        Returns:
            How each job that was begun ended.
        """
        if self.workers == 1:
            return list(_here(jobs, on_step, on_end, should_stop))
        ended: list[Ended] = []
        waiting, busy = list(jobs), dict[_Worker, Job]()
        while waiting or busy:
            if should_stop():
                waiting.clear()
                _ask_to_stop(busy)
            self._hand_out(busy, waiting)
            for worker, message in _messages(busy):
                job = busy[worker]
                if isinstance(message, int):
                    on_step(job.run, message)
                    continue
                del busy[worker]
                if message is None:
                    self._staff.remove(worker)
                found = message or _died(job, asked=should_stop())
                ended.append(found)
                on_end(found)
        return ended

    def _hand_out(self, busy: dict[_Worker, Job], waiting: list[Job]) -> None:
        while waiting and len(busy) < self.workers:
            idle = [worker for worker in self._staff if worker not in busy]
            if not idle:
                idle = [_hire()]
                self._staff += idle
            job = waiting.pop(0)
            busy[idle[0]] = job
            _send(idle[0].pipe, job)


def _here(
    jobs: Sequence[Job],
    on_step: OnStep,
    on_end: Callable[[Ended], None],
    should_stop: Callable[[], bool],
) -> Iterator[Ended]:
    for job in jobs:
        if should_stop():
            return

        def tell(step: int, run: str = job.run) -> None:
            on_step(run, step)

        ended = work(job, tell=tell, should_stop=should_stop)
        on_end(ended)
        yield ended


def _serve(pipe: Connection) -> None:
    """Work through jobs until there are no more: the main function of a worker."""
    torch.set_num_threads(1)
    if wanted():  # this process was started by a command
        keep_memory()
    with GracefulStop() as stop:
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                return
            if job is None:
                return
            pipe.send(work(job, tell=_throttled(pipe), should_stop=lambda: bool(stop.requested)))


def _throttled(pipe: Connection) -> Callable[[int], None]:
    last = 0.0

    def tell(step: int) -> None:
        nonlocal last
        if time.monotonic() - last >= TOLD_EVERY:
            last = time.monotonic()
            pipe.send(step)

    return tell


def _hire() -> _Worker:
    # A fresh interpreter: torch's threads do not survive a fork.
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _messages(busy: Iterable[_Worker]) -> list[tuple[_Worker, Ended | int | None]]:
    """Wait a moment; return what workers say, None for one that has died."""
    ready = wait([worker.pipe for worker in busy], timeout=0.2)
    return [(worker, _receive(worker.pipe)) for worker in busy if worker.pipe in ready]


def _died(job: Job, *, asked: bool) -> Ended:
    # One that is asked to stop while it still starts has nothing to save.
    return Ended(job.run, "stopped") if asked else Ended(job.run, "failed", "its process died")


def _ask_to_stop(busy: Iterable[_Worker]) -> None:
    """Pass the wish on: Ctrl-C reaches the workers too, a signal to this process alone does not."""
    for worker in busy:
        if worker.process.pid is not None and worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGTERM)


def _send(pipe: Connection, message: Job | None) -> None:
    try:
        pipe.send(message)
    except (BrokenPipeError, OSError):
        return  # its process died; reading from it tells so


def _receive(pipe: Connection) -> Ended | int | None:
    try:
        message: Ended | int = pipe.recv()
        return message
    except (EOFError, OSError):
        return None
