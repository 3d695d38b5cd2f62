"""``torchemo demo``: the main job on embedded synthetic pictures."""

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torchemo.cli.output import interval, print_json, print_table
from torchemo.errors import ConfigError

MARK = ".torchemo-demo"
"""Marks a folder that the demo made and may make anew."""


@final
@dataclass(frozen=True)
class DemoCommand:
    """Train MAML and MAML with memory on the same synthetic pictures and compare them, paired."""

    iterations: int = 150
    """Outer steps of each of the two runs."""
    test_tasks: int = 200
    """Test tasks, the same for both runs."""
    seed: int = 0
    """Seed of the initialisation and of the training tasks."""
    out: Path = Path("runs/demo")
    """Folder of the two runs, summary.json and the reports; an earlier demo there is made anew."""
    release_memory: bool = False
    """Give freed memory back to the system at once: slower, smaller between steps."""
    json: bool = False
    """Print the comparison as JSON instead of a table."""

    def run(self) -> int:
        """Run the demo."""
        from torchemo.cli.cores import task_workers
        from torchemo.demo import RUNS, DemoConfig, run_demo
        from torchemo.report import write_comparison_report, write_run_report

        config = DemoConfig(self.iterations, self.test_tasks, self.seed)
        self._fresh_folder()
        found = run_demo(
            self.out,
            config,
            on_event=_tell,
            workers=task_workers(release_memory=self.release_memory),
        )
        summary = {
            "data": "synthetic pictures (procedural), 5-way 1-shot, unseen classes",
            "iterations": self.iterations,
            "seed": self.seed,
            **found,
        }
        page = write_comparison_report([found], self.out / "report.html")
        for run in RUNS:
            write_run_report(self.out / run)
        path = self.out / "summary.json"
        path.write_text(json.dumps(summary, indent=2) + "\n")
        if self.json:
            print_json(summary)
        else:
            _show(summary)
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


def _show(summary: dict[str, Any]) -> None:
    steps = range(len(summary["per_step"][0]))
    rows = [
        [summary[side]["method"], *(f"{100 * v:.1f}" for v in values)]
        for side, values in zip(("base", "other"), summary["per_step"], strict=True)
    ]
    title = "Accuracy on the same unseen synthetic classes, %, after inner step"
    print_table(title, ["method", *map(str, steps)], rows)
    domains = [
        [name, interval(row["difference"], scale=100, sign=True)]
        for name, row in summary["per_domain"].items()
    ]
    print_table("With memory minus without, points", ["domain", "difference [95 %]"], domains)
    difference = summary["difference"]["difference"]
    low, high = difference["low"], difference["high"]
    verdict = "memory helps" if low > 0 else "memory harms" if high < 0 else "no difference shown"
    print(
        f"All: {interval(difference, scale=100, sign=True)} points, {difference['n']} paired tasks, one"
        f" seed, p = {summary['difference']['p_value']:.4f}: {verdict}."
    )
