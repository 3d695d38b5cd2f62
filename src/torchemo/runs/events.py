"""The log of a run: ``events.jsonl`` is the truth, other sinks are copies that may fail.

An event is a plain dict with ``event``, ``step`` and ``time`` and whatever belongs to it. All events of a
step are emitted before its checkpoint is published, so that cutting the log after the restored step gives
the log that an uninterrupted run would have written.
"""

import contextlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

from torchemo.core.errors import ConfigError, DataError, ResourceError
from torchemo.runs.storage.durable import StrPath, sync_folder

Event: TypeAlias = Mapping[str, Any]

RESERVED = ("event", "step", "time")


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
    """

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with _writing(self.path):
            self._handle = os.open(self.path, flags, 0o666)
            self._cut(_whole_lines(self._handle))
            sync_folder(self.path.parent)

    def write(self, event: Event) -> None:
        """Append one line."""
        line = (json.dumps(plain(event), allow_nan=False) + "\n").encode()
        with _writing(self.path):
            end = os.fstat(self._handle).st_size
            try:
                written = os.write(self._handle, line)
                while written < len(line):
                    written += os.write(self._handle, line[written:])
            except OSError:
                self._cut(end)
                raise

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
        log: Sink,
        *,
        copies: Sequence[Sink] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._log = log
        self._copies = tuple(copies)
        self._clock = clock
        self._warned: set[int] = set()

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
    """Read all events of a log; a torn last line, the mark of a crash, is left out."""
    return [event for event, _ in _parse(Path(path))]


def truncate_after(path: StrPath, step: int) -> int:
    """Cut the log after the last event of ``step`` or before, to continue from there.

    What stands behind an event of a later step was written later, and goes with it. A missing log is
    left missing.

    Returns:
        How many events were cut off.
    """
    place = Path(path)
    if not place.exists():
        return 0
    events = list(_parse(place))
    kept = next((i for i, (event, _) in enumerate(events) if event["step"] > step), len(events))
    size = events[kept - 1][1] if kept else 0
    if size < place.stat().st_size:
        with _writing(place):
            os.truncate(place, size)
    return len(events) - kept


def _parse(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield every event and where its line ends."""
    end = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    end += len(line)
                    yield _event(line, where=f"{path}, line {number}"), end
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _event(line: bytes, *, where: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
        if isinstance(event["event"], str) and type(event["step"]) is int:
            return dict(event)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise DataError(f"{where} should be a JSON object with event and step, got {line[:60]!r}.")


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
        found = os.pread(handle, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


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
