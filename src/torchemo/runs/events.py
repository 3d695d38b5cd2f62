"""The log of a run: ``events.jsonl`` is the truth, other sinks are copies that may fail.

An event is a plain dict with ``event``, ``step`` and ``time`` and whatever belongs to it; in the file each
line ends with digests of itself and of the line before (`torchemo.runs.storage.lines`). All events of a
step are emitted before its checkpoint is published, so that cutting the log after the restored step gives
the log that an uninterrupted run would have written.
"""

import contextlib
import math
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, final, runtime_checkable
from uuid import uuid4

from torchemo.core.errors import ConfigError, DataError, ResourceError
from torchemo.runs.folder import RunFolder
from torchemo.runs.storage.durable import (
    BINARY,
    NO_LINKS,
    StrPath,
    read_at,
    read_regular,
    replace_file,
    sync_folder,
)
from torchemo.runs.storage.lines import Line, parse, resealed, sealed

Event: TypeAlias = Mapping[str, Any]

_WITH_DIGEST = re.compile(rb'"sha256": "[0-9a-f]{64}"')
RESERVED = ("event", "step", "time", "digest")
_STEP = re.compile(rb'{"event": "[^"]*", "step": ([0-9]{1,18}),')
"""How a line begins, also one that is torn."""


@runtime_checkable
class Sink(Protocol):
    """Where events go."""

    def write(self, event: Event) -> None:
        """Take one event."""
        ...

    def flush(self) -> None:
        """Make sure that what was written is kept."""
        ...

    def close(self) -> None:
        """Take no more events."""
        ...


@final
class JsonLines:
    """Append events to a file, one line and one ``write`` each.

    A last line that was torn by a crash is cut off when the file is opened: it never happened. Numbers
    that JSON does not know are written as the texts "NaN", "Infinity" and "-Infinity".

    Attributes:
        lines: How many lines the file has.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | NO_LINKS | BINARY
        with _writing(self.path):
            self._handle = os.open(self.path, flags, 0o666)
            self._cut(_whole_lines(self._handle))
            self._last = _last_line(self._handle)
            self.lines = _count_lines(self._handle)
            sync_folder(self.path.parent)

    def write(self, event: Event) -> None:
        """Append one line."""
        line = sealed(plain(event), self._last)
        with _writing(self.path):
            end = os.fstat(self._handle).st_size
            try:
                written = os.write(self._handle, line)
                while written < len(line):
                    written += os.write(self._handle, line[written:])
            except OSError:
                self._cut(end)
                raise
        self._last = line
        self.lines += 1

    def flush(self) -> None:
        """Force the file to the disk."""
        with _writing(self.path):
            os.fsync(self._handle)

    def close(self) -> None:
        """Flush and close the file; a second time does nothing."""
        if self._handle >= 0:
            try:
                self.flush()
            finally:
                handle, self._handle = self._handle, -1
                os.close(handle)

    def _cut(self, size: int) -> None:
        if os.fstat(self._handle).st_size > size:
            os.ftruncate(self._handle, size)


@final
class EventLog:
    """Send every event to the log file and to copies of it.

    Args:
        log: The truth; its errors are raised.
        copies: Sinks that may fail: each failure is swallowed, and the first of each sink is a warning.
        clock: Seconds since 1970. Events are ordered by their place in the log, never by time.
    """

    def __init__(
        self,
        log: JsonLines,
        *,
        copies: Sequence[Sink] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._log = log
        self._copies = tuple(copies)
        self._clock = clock
        self._warned: set[int] = set()

    @property
    def lines(self) -> int:
        """How many events are in the log."""
        return self._log.lines

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def emit(self, event: str, step: int, *, fields: Mapping[str, Any] | None = None) -> None:
        """Log that ``event`` happened at ``step``, with ``fields`` that belong to it."""
        taken = [name for name in RESERVED if name in (fields or {})]
        if taken:
            raise ConfigError(f"event '{event}' cannot have fields named {taken}.")
        entry = {"event": event, "step": step, "time": self._clock(), **(fields or {})}
        self._log.write(entry)
        self._to_copies(lambda sink: sink.write(entry))

    def flush(self) -> None:
        """Make the log safe on the disk; do this before a checkpoint is published."""
        self._log.flush()
        self._to_copies(lambda sink: sink.flush())

    def close(self) -> None:
        """Flush and close everything."""
        self._to_copies(lambda sink: sink.close())
        self._log.close()

    def _to_copies(self, action: Callable[[Sink], None]) -> None:
        for i, sink in enumerate(self._copies):
            try:
                action(sink)
            except Exception as error:  # your own sink may raise anything; training continues
                if i not in self._warned:
                    self._warned.add(i)
                    warnings.warn(
                        f"{type(sink).__name__} failed ({error!r}); the log still gets all events.",
                        stacklevel=3,
                    )


def read(path: StrPath) -> list[dict[str, Any]]:
    """Read all events of a log; a torn last line, the mark of a crash, is left out.

    Raises:
        DataError: A line is damaged; it is named.
    """
    events = []
    for number, (line, event, gap) in enumerate(_parse(Path(path))[0], start=1):
        if event is None:
            raise DataError(
                f"{path}, line {number} should be a JSON object with event and step, got {line[:60]!r}."
            )
        if gap:
            raise DataError(f"{path}: lines before line {number} are missing or out of order.")
        events.append(event)
    return events


def cpu_seconds(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the CPU time of a training up to its last validation; None if its log does not say.

    Each session of a run that was continued counts from its own start.
    """
    known = [e["cpu_seconds"] for e in events if e.get("cpu_seconds") is not None]
    ends = [now for now, later in pairwise([*known, 0.0]) if later < now]
    return round(sum(ends), 2) if known else None


class Cut(NamedTuple):
    """What was taken out of a log.

    Attributes:
        later: Events of later steps.
        damaged: Numbers of lines that could not be trusted.
        kept_as: Where the log as it was is kept, if it was damaged.
        last: Step of the last event that is left; None if there is none.
        gaps: Numbers of sound lines before which others are missing or out of order.
        left: How many events are left.
    """

    later: int
    damaged: tuple[int, ...] = ()
    kept_as: Path | None = None
    last: int | None = None
    gaps: tuple[int, ...] = ()
    left: int = 0


def truncate_after(path: StrPath, step: int) -> Cut:
    """Cut the log after the last event of ``step`` or before, to continue from there.

    What stands behind an event of a later step was written later, and goes with it. Damaged lines go,
    too: the run's state is in its checkpoints, and a damaged log must not keep it from continuing. A
    missing log is left missing.
    """
    place = Path(path)
    if not place.exists():
        return Cut(0)
    lines, torn = _parse(place)
    damaged = tuple(n for n, line in enumerate(lines, start=1) if line.event is None)
    if (begun := _STEP.match(torn)) and int(begun[1]) <= step:
        damaged += (len(lines) + 1,)  # all of that step was on the disk: no crash tore it
    gaps = tuple(n for n, line in enumerate(lines, start=1) if line.gap)
    good = [(line, line.event["step"]) for line in lines if line.event is not None]
    kept = next((i for i, (_, at) in enumerate(good) if at > step), len(good))
    last = good[kept - 1][1] if kept else None
    with _writing(place):
        if damaged or gaps:
            aside = place.with_name(f"damaged-{uuid4().hex[:8]}-{place.name}")
            os.link(place, aside) if hasattr(os, "link") else shutil.copyfile(place, aside)
            replace_file(place, resealed([line for line, _ in good[:kept]]))
            return Cut(len(good) - kept, damaged, aside, last, gaps, kept)
        size = sum(len(line.raw) for line, _ in good[:kept])
        if size < place.stat().st_size:
            os.truncate(place, size)
    return Cut(len(good) - kept, last=last, left=kept)


def _parse(path: Path) -> tuple[list[Line], bytes]:
    """Read the whole lines of a log, and what stands behind them."""
    try:
        lines = read_regular(path).split(b"\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    raws = [line + b"\n" for line in lines[:-1]]
    return parse(raws, earlier=not _is_of_today(path.parent)), lines[-1]


def _is_of_today(root: Path) -> bool:
    """Return whether a run was started by a version that gives digests to all it writes."""
    try:
        return _WITH_DIGEST.search(read_regular(RunFolder(root).environment)) is not None
    except OSError:
        return False


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"cannot write {path}: {error.strerror or error}.",
            hint="Check that the folder may be written and its disk has space, then resume the run.",
        ) from error


def _whole_lines(handle: int) -> int:
    """Return how many bytes there are up to the last end of a line."""
    end = os.fstat(handle).st_size
    while end > 0:
        start = max(0, end - 65536)
        found = read_at(handle, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _count_lines(handle: int) -> int:
    """Count the ends of lines in a file."""
    starts = range(0, os.fstat(handle).st_size, 1 << 20)
    return sum(read_at(handle, 1 << 20, start).count(b"\n") for start in starts)


def _last_line(handle: int) -> bytes:
    """Return the last line of a file of whole lines; empty if there is none."""
    end, found = os.fstat(handle).st_size, b""
    while end > 0 and found.count(b"\n") < 2:
        start = max(0, end - 65536)
        found = read_at(handle, end - start, start) + found
        end = start
    return found[found[:-1].rfind(b"\n") + 1 :]


def plain(value: Any) -> Any:
    """Turn numbers, tensors and containers into what JSON knows."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # tensors and arrays; zero axes give a number
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
