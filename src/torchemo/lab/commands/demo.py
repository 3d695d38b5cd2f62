"""``torchemo demo``: curves that come back, with and without memory."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from torchemo.config.machine import CPU_ALONE, Machine
from torchemo.core.errors import ConfigError
from torchemo.report.terminal import counted, print_json, print_table, say

if TYPE_CHECKING:
    from torchemo.lab.demo.findings import Found

MARK = ".torchemo-demo"
"""Marks a folder that the demo made and may make anew."""


@final
@dataclass(frozen=True)
class DemoCommand:
    """Train MAML on curves of four families, then let unseen curves come back with new points.

    Without memory each visit starts anew. With EMO gradients of earlier visits help, and no point is kept.
    """

    steps: int = 1000
    """Outer steps of each of the two runs."""
    test_tasks: int = 200
    """Unseen curves."""
    visits: int = 5
    """How often each of them comes."""
    seed: int = 0
    """Seed of the initialisation, of the training curves and of the unseen ones."""
    out: Path = Path("runs/demo")
    """Folder of the runs, summary.json and report.html; an earlier demo there is made anew."""
    machine: Machine = CPU_ALONE
    """Where to compute."""
    json: bool = False
    """Print what was found as JSON instead of a table."""

    def run(self) -> int:
        """Run the demo."""
        from torchemo.lab.demo import DemoConfig, run_demo
        from torchemo.training.device import place_of, task_workers

        # Checked before an earlier demo is removed.
        config = DemoConfig(self.steps, self.test_tasks, self.visits, self.seed)
        place = place_of(self.machine)
        if place.precision == "bf16":
            raise ConfigError("bf16 is for networks of images, and the demo has curves.")
        self._fresh_folder()
        task_workers()  # small networks are fastest with one thread per operation
        if not self.json:
            say(
                f"Training MAML with and without offsets, {self.steps} outer steps each;"
                f" then {self.test_tasks} unseen curves come {self.visits} times.",
                file=sys.stderr,
            )
        with counted("training") as progress:
            found = run_demo(self.out, config, place=place, progress=progress)
        if self.json:
            print_json(found)
        else:
            _show(found)
            say(f"report: {self.out / 'report.html'}\nsummary: {self.out / 'summary.json'}")
        return 0

    def _fresh_folder(self) -> None:
        if self.out.exists() and not (self.out / MARK).exists() and any(self.out.iterdir()):
            raise ConfigError(
                f"{self.out} holds something that is not a demo.", hint="Choose another --out."
            )
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        (self.out / MARK).touch()


def _show(found: "Found") -> None:
    visits = [f"visit {v + 1}" for v in range(found["visits"])]
    rows = [[name, *(f"{e['value']:.2f}" for e in row)] for name, row in found["errors"].items()]
    title = f"Mean squared error on {found['curves']} unseen curves, by visit (lower is better)"
    print_table(title, ["method", *visits], rows)
    for line in found["sentences"]:
        say(line)
    say(f"(95 % intervals over {found['curves']} paired curves, one training seed)")
    say(found["meaning"])
