"""Jobs side by side on an engine; one that fails, is lost, delayed or repeated does not stop the others."""

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, final
from uuid import uuid4

from torchemo.core.errors import ResourceError, TorchemoError
from torchemo.lab.study.engines.engine import Engine, Errand, Handle, StopFiles, sent_by_us
from torchemo.lab.study.job import Ended, Job, work
from torchemo.runs.folder import RunFolder
from torchemo.runs.storage import heartbeat

OnStep: TypeAlias = Callable[[str, int], None]
"""Called with the name of a run and the number of its outer steps that are done."""

LOSSES = 3
"""A job that is lost so often without a step in between is given up: it may be what ends its workers."""
AGAIN = 10.0
"""Seconds until a job is tried again whose run somebody else is writing."""
JOBS = "jobs"
"""Folder of a study's heartbeats, stop files and logs of engines."""
STOP = "stop"
"""A file of this name in the folder of the studies stops all of them, on all machines."""
_TAIL = 1 << 16


class Doing(Protocol):
    """Does jobs and says how each ended."""

    def do(
        self,
        jobs: Sequence[Job],
        *,
        on_step: OnStep = ...,
        on_end: Callable[[Ended], None] = ...,
        on_note: Callable[[str], None] = ...,
        should_stop: Callable[[], bool] = ...,
    ) -> list[Ended]:
        """Do jobs.

        Args:
            jobs: The jobs, of different runs.
            on_step: Called after steps.
            on_end: Called when a job has ended.
            on_note: Called with a sentence when a job is lost or has to wait.
            should_stop: Asked now and then; running jobs then save and end, others are not begun.

        Returns:
            How each job that was begun ended.
        """
        ...


@final
class Here:
    """One job after another in this process.

    Example:
        >>> Here().do([])
        []
    """

    def do(
        self,
        jobs: Sequence[Job],
        *,
        on_step: OnStep = lambda run, step: None,
        on_end: Callable[[Ended], None] = lambda ended: None,
        on_note: Callable[[str], None] = lambda note: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[Ended]:
        """Do jobs; see `Doing.do`."""
        ended: list[Ended] = []
        waiting = deque((job, 0.0) for job in jobs)
        while waiting and not should_stop():
            job, due = waiting.popleft()
            if time.monotonic() < due:  # its turn comes after all others
                time.sleep(0.2)
                waiting.append((job, due))
                continue

            def tell(step: int, run: str = job.run) -> None:
                on_step(run, step)

            found = work(job, tell=tell, should_stop=should_stop)
            if found.how == "busy":
                on_note(f"run {job.run} waits: {found.why}")
                waiting.append((job, time.monotonic() + AGAIN))
                continue
            ended.append(found)
            on_end(found)
        return ended


@dataclass
class _Turn:
    """A job that is to be done.

    Attributes:
        job: The job.
        due: Not before.
        losses: How often it was lost without a step in between.
        steps: Its steps when it was lost.
    """

    job: Job
    due: float = 0.0
    losses: int = 0
    steps: int = 0


class _Sent(NamedTuple):
    """A job on the engine."""

    turn: _Turn
    handle: Handle
    beat: Path
    log: "_Log"


class _Lost(NamedTuple):
    why: str


@final
class Crew:
    """Workers on an engine.

    Args:
        engine: What carries jobs to them.
        most: Jobs at a time, running or waiting on the engine.
        folder: Folder of the studies, which all workers see.
    """

    def __init__(self, engine: Engine, *, most: int, folder: Path) -> None:
        self.engine = engine
        self.most = most
        self.jobs = folder.resolve() / JOBS
        self.stops = StopFiles(
            (self.jobs / f"stop-{uuid4().hex[:8]}", folder.resolve() / STOP),
        )

    def do(
        self,
        jobs: Sequence[Job],
        *,
        on_step: OnStep = lambda run, step: None,
        on_end: Callable[[Ended], None] = lambda ended: None,
        on_note: Callable[[str], None] = lambda note: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[Ended]:
        """Do jobs; see `Doing.do`."""
        ended: list[Ended] = []
        waiting, busy = deque(_Turn(job) for job in jobs), list[_Sent]()
        while waiting or busy:
            stopping = self.stops.asked() or should_stop()
            if stopping:
                self.stops.ask()
                waiting.clear()
                busy = [sent for sent in busy if not _call_off(sent)]
            self._send(waiting, busy)
            time.sleep(self.engine.every)
            for sent in list(busy):
                for step in sent.log.news():
                    on_step(sent.turn.job.run, step)
                if (found := _look(sent)) is None:
                    continue
                busy.remove(sent)
                last = self._after(sent, found, waiting, on_note, stopping=stopping)
                if last is not None:
                    ended.append(last)
                    on_end(last)
        return ended

    def _send(self, waiting: deque[_Turn], busy: list[_Sent]) -> None:
        """Send jobs whose time has come, as many as there may be."""
        for _ in range(len(waiting)):
            if len(busy) >= self.most:
                return
            turn = waiting.popleft()
            if time.monotonic() < turn.due:
                waiting.append(turn)
                continue
            job = replace(turn.job, root=turn.job.root.resolve())
            beat = self.jobs / f"{job.run}-{uuid4().hex[:8]}"
            errand = Errand(job, self.stops.paths, beat, sent_by_us())
            try:
                handle = self.engine.submit(errand)
            except TorchemoError:
                raise
            except Exception as error:  # engines raise what they like
                raise ResourceError(
                    f"the engine takes no jobs: {_reason(error)}.",
                    hint="What was saved is whole; the same command resumes.",
                ) from error
            busy.append(_Sent(turn, handle, beat, _Log(job.root)))

    def _after(
        self,
        sent: _Sent,
        found: "Ended | _Lost",
        waiting: deque[_Turn],
        on_note: Callable[[str], None],
        *,
        stopping: bool,
    ) -> Ended | None:
        """Return how a job ended for good; None where it is to be tried again."""
        turn, run = sent.turn, sent.turn.job.run
        if isinstance(found, Ended) and found.how == "stopped" and not stopping:
            found = _Lost("its worker was told to stop")
        if stopping and (isinstance(found, _Lost) or found.how == "busy"):
            return Ended(run, "stopped")
        if isinstance(found, Ended) and found.how == "busy":
            on_note(f"run {run} waits: {found.why}")
            turn.due = time.monotonic() + AGAIN
            waiting.append(turn)
            return None
        if isinstance(found, Ended):
            return found
        sent.beat.unlink(missing_ok=True)
        steps = sent.log.step
        turn.losses = turn.losses + 1 if steps <= turn.steps else 1
        turn.steps = max(turn.steps, steps)
        if turn.losses >= LOSSES:
            return Ended(run, "failed", f"{found.why}, {LOSSES} times without a step in between")
        on_note(f"run {run} was lost: {found.why}; another worker continues it")
        waiting.append(turn)
        return None


def _look(sent: _Sent) -> Ended | _Lost | None:
    """Return how a job ended on the engine; None while it goes on."""
    if sent.handle.done():
        try:
            return sent.handle.result()
        except ImportError as error:
            return Ended(sent.turn.job.run, "failed", f"its worker has {_reason(error)}")
        except (Exception, CancelledError) as error:  # whatever an engine raises for lost workers
            return _Lost(_reason(error))
    note = heartbeat.read_note(sent.beat)
    # Two clocks are compared first, which costs nothing; that of the file system alone decides.
    if note is None or time.time() - note.beaten < heartbeat.STALE:
        return None
    quiet = heartbeat.silence(sent.beat, note)
    if quiet < heartbeat.STALE:
        return None
    _cancel(sent)
    return _Lost(f"{note} has given no heartbeat for {quiet:.0f} s")


def _call_off(sent: _Sent) -> bool:
    """Give a job up that no worker has begun; one that has begun sees the stop file and saves."""
    if sent.beat.exists() or sent.handle.done():
        return False
    _cancel(sent)
    return True


def _cancel(sent: _Sent) -> None:
    with contextlib.suppress(Exception):  # a cluster may know nothing of the job any more
        sent.handle.cancel()


def _reason(error: BaseException) -> str:
    """Return the last line of what an engine says, which names the cause in a trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" -=\t")]
    said = lines[-1].rstrip(".") if lines else ""
    name = type(error).__name__
    return said if name == "WorkerLost" else f"{name}: {said[:300]}" if said else name


@final
class _Log:
    """How far a run is, from the end of its log."""

    def __init__(self, root: Path) -> None:
        self.step = 0
        self._path = RunFolder(root).events
        self._size = -1
        self.news()

    def news(self) -> list[int]:
        """Return the number of the last step if it has changed."""
        try:
            size = self._path.stat().st_size
            if size == self._size:
                return []
            self._size = size
            with self._path.open("rb") as file:
                file.seek(max(0, size - _TAIL))
                lines = file.read().split(b"\n")[:-1]  # the last may be half written
            step = int(json.loads(lines[-1])["step"]) if lines else 0
        except (OSError, ValueError, KeyError, TypeError):
            return []
        changed, self.step = step != self.step, step
        return [step] if changed else []
