"""Progress over all runs of a study."""

import sys
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from torchemo.lab.study.job import Ended

from torchemo.report.terminal import say


@final
class StudyProgress:
    """Progress over all runs of a study: one live line on a terminal, plain lines elsewhere."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.total = 0
        self.before = 0
        self.steps: dict[str, int] = {}
        self.ended = 0

    def __enter__(self) -> "StudyProgress":
        from torchemo.report.terminal import counted

        self._counted = counted(self.name)
        self._show = self._counted.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._counted.__exit__(None, None, None)

    def plan(self, total: int, done: int) -> None:
        """Begin a part of the study."""
        self.total, self.before, self.steps = total, done, {}

    def step(self, run: str, step: int) -> None:
        """Note how far a run is."""
        self.steps[run] = step
        self._show(self.before + sum(self.steps.values()), self.total)

    def end(self, ended: "Ended") -> None:
        """Note that a run has ended."""
        if ended.how in ("failed", "diverged"):
            self.note(f"run {ended.run} {ended.how}: {ended.why}")

    def note(self, text: str) -> None:
        """Say something."""
        say(f"{self.name}: {text}", file=sys.stderr)
