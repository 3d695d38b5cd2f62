"""Jobs side by side in processes of one thread each; one that fails or dies does not stop the others."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import torch

from torchemo.runs.signals import GracefulStop
from torchemo.study.job import Ended, Job, work

OnStep = Callable[[str, int], None]
"""Told the name of a run and how many of its outer steps are done."""

TOLD_EVERY = 0.3
"""Seconds between two messages of a job about its steps."""


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection


def run_jobs(
    jobs: Sequence[Job],
    *,
    workers: int = 2,
    on_step: OnStep = lambda run, step: None,
    on_end: Callable[[Ended], None] = lambda ended: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Ended]:
    """Do jobs, ``workers`` at a time; with one worker in this process.

    Args:
        jobs: The jobs, of different runs.
        workers: Processes.
        on_step: Told about steps.
        on_end: Told when a job has ended.
        should_stop: Asked now and then; running jobs then save and end, others are not begun.

    Returns:
        How each job that was begun ended.
    """
    if workers == 1 or len(jobs) <= 1:
        return list(_here(jobs, on_step, on_end, should_stop))
    ended: list[Ended] = []
    waiting = list(jobs)
    with _workers(min(workers, len(jobs))) as staff:
        busy: dict[Connection, Job] = {}
        while waiting or busy:
            stop = should_stop()
            if stop:
                waiting.clear()
                _ask_to_stop(staff, busy)
            _hand_out(staff, busy, waiting)
            for pipe in wait(list(busy), timeout=0.2):
                job = busy[pipe]  # type: ignore[index]
                message = _receive(pipe)  # type: ignore[arg-type]
                if isinstance(message, int):
                    on_step(job.run, message)
                    continue
                del busy[pipe]  # type: ignore[arg-type]
                found = message or Ended(job.run, "failed", "its process died")
                if message is None:
                    _replace(staff, pipe, hire=bool(waiting))  # type: ignore[arg-type]
                ended.append(found)
                on_end(found)
    return ended


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


@contextmanager
def _workers(count: int) -> Iterator[list[_Worker]]:
    staff = [_hire() for _ in range(count)]
    try:
        yield staff
        for worker in staff:
            _send(worker.pipe, None)
        for worker in staff:
            worker.process.join(timeout=10)
    finally:
        for worker in staff:
            if worker.process.is_alive():
                worker.process.terminate()
            worker.pipe.close()


def _hire() -> _Worker:
    # A fresh interpreter: torch's threads do not survive a fork.
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _replace(staff: list[_Worker], pipe: Connection, *, hire: bool) -> None:
    place = next(i for i, worker in enumerate(staff) if worker.pipe is pipe)
    staff.pop(place).process.join(timeout=10)
    if hire:
        staff.append(_hire())


def _hand_out(staff: list[_Worker], busy: dict[Connection, Job], waiting: list[Job]) -> None:
    for worker in staff:
        if waiting and worker.pipe not in busy:
            job = waiting.pop(0)
            busy[worker.pipe] = job
            _send(worker.pipe, job)


def _ask_to_stop(staff: list[_Worker], busy: dict[Connection, Job]) -> None:
    """Pass the wish on: Ctrl-C reaches the workers too, a signal to this process alone does not."""
    for worker in staff:
        if worker.pipe in busy and worker.process.pid is not None and worker.process.is_alive():
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
