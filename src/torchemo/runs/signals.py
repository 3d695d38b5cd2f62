"""Stopping when asked to: finish the task at hand, save, and leave with the right exit code."""

import signal
import threading
from types import FrameType
from typing import Any, final


@final
class GracefulStop:
    """Turn SIGINT and SIGTERM into a flag while the block runs.

    A second Ctrl-C raises ``KeyboardInterrupt`` at once, which is safe at any time: publishing is atomic.
    Further SIGTERMs change nothing, since schedulers repeat them. Outside the main thread python cannot
    catch signals, and the flag is never set.

    Example:
        >>> with GracefulStop() as stop:
        ...     for step in range(3):
        ...         if stop.requested:
        ...             break
        >>> stop.exit_code
        0
    """

    def __init__(self) -> None:
        self._requested: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> signal.Signals | None:
        """The first signal that arrived, or None."""
        return self._requested

    @property
    def exit_code(self) -> int:
        """130 after SIGINT, 143 after SIGTERM, 0 if nobody asked to stop."""
        return 0 if self._requested is None else 128 + self._requested

    def __enter__(self) -> "GracefulStop":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        while self._before:
            number, handler = self._before.popitem()
            # None stands for a handler that was not installed by python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._requested is None:
            self._requested = signal.Signals(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
