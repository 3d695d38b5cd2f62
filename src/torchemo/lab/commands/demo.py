"""``torchemo demo``: MAML with and without a memory of offsets, on embedded synthetic images."""

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torchemo.core.errors import ConfigError
from torchemo.report.terminal import interval, print_json, print_table

if TYPE_CHECKING:
    from torchemo.lab.demo import DemoResult

MARK = ".torchemo-demo"
"""Marks a folder that the demo made and may make anew."""


@final
@dataclass(frozen=True)
class DemoCommand:
    """Train MAML and MAML with a memory of offsets on the same synthetic images and compare them, paired.

    A third run, the single-slot control, shows what the further parameters do without retrieval.
    """

    steps: int = 150
    """Outer steps of each run."""
    test_tasks: int = 200
    """Test tasks, the same for all runs."""
    seed: int = 0
    """Seed of the initialisation and of the training tasks."""
    out: Path = Path("runs/demo")
    """Folder of the runs, summary.json and the reports; an earlier demo there is made anew."""
    release_memory: bool = False
    """Give freed memory back to the system at once: slower, smaller between steps."""
    json: bool = False
    """Print the comparison as JSON instead of a table."""

    def run(self) -> int:
        """Run the demo."""
        from torchemo.lab.demo import RUNS, DemoConfig, run_demo
        from torchemo.report.comparison import write_comparison_report
        from torchemo.report.run.page import write_run_report
        from torchemo.training.device import task_workers

        # Checked before an earlier demo is removed.
        config = DemoConfig(self.steps, self.test_tasks, self.seed)
        self._fresh_folder()
        found = run_demo(
            self.out,
            config,
            on_event=_tell,
            workers=task_workers(release_memory=self.release_memory),
        )
        summary = {
            "data": "synthetic images (procedural), 5-way 1-shot, unseen classes",
            "steps": self.steps,
            "seed": self.seed,
            **found.memory,
            "single_slot": {"against_base": found.single_slot, "against_memory": found.retrieval},
        }
        page = write_comparison_report([found.memory, found.single_slot], self.out / "report.html")
        for run in RUNS:
            write_run_report(self.out / run)
        path = self.out / "summary.json"
        path.write_text(json.dumps(summary, indent=2) + "\n")
        if self.json:
            print_json(summary)
        else:
            _show(found)
            print(f"report: {page}\nsummary: {path}")
        return 0

    def _fresh_folder(self) -> None:
        if self.out.exists() and not (self.out / MARK).exists() and any(self.out.iterdir()):
            raise ConfigError(
                f"{self.out} holds something that is not a demo.", hint="Choose another --out."
            )
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        (self.out / MARK).touch()


def _tell(name: str, event: str, step: int, fields: Mapping[str, Any]) -> None:
    if event == "validation":
        print(f"{name}: step {step}, validation accuracy {fields['accuracy']:.3f}", file=sys.stderr)


def _show(found: "DemoResult") -> None:
    rows = [
        [title, *(f"{100 * v:.1f}" for v in values)]
        for title, values in (
            (found.memory["base"]["method"], found.memory["per_step"][0]),
            (found.single_slot["other"]["method"], found.single_slot["per_step"][1]),
            (found.memory["other"]["method"], found.memory["per_step"][1]),
        )
    ]
    title = "Accuracy on the same unseen synthetic classes, %, after inner step"
    print_table(title, ["method", *map(str, range(len(rows[0]) - 1))], rows)
    domains = [
        [name, *(_points(part["per_domain"][name]) for part in (found.memory, found.retrieval))]
        for name in found.memory["per_domain"]
    ]
    title = "MAML + offsets minus, points of accuracy [95 %]"
    print_table(title, ["domain", "MAML", "MAML + single slot"], domains)
    print(f"MAML + offsets against MAML: {_verdict(found.memory)}")
    print(f"MAML + offsets against MAML + single slot: {_verdict(found.retrieval)}")


def _points(row: Mapping[str, Any]) -> str:
    return interval(row["difference"], scale=100, sign=True)


def _verdict(found: Mapping[str, Any]) -> str:
    row = found["difference"]
    low, high = row["difference"]["low"], row["difference"]["high"]
    verdict = "it helps" if low > 0 else "it harms" if high < 0 else "not significant"
    return (
        f"{_points(row)} points, {row['difference']['n']} paired tasks, one seed,"
        f" p = {row['p_value']:.4f}: {verdict}."
    )
