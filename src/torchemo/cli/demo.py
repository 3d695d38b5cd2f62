"""``torchemo demo``: the main job on embedded tasks, in about two minutes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from torchemo.demo import DemoResult


@final
@dataclass(frozen=True)
class DemoCommand:
    """Train MAML and MAML with memory on the same synthetic tasks and compare them, paired."""

    iterations: int = 1500
    """Outer steps of each of the two runs."""
    tasks: int = 16
    """Tasks per outer step."""
    test_tasks: int = 1000
    """Test tasks, the same for both runs."""
    seed: int = 0
    """Seed of the initialisation and of the training tasks."""
    out: Path = Path("runs/demo")
    """Where summary.json is written."""
    json: bool = False
    """Print the summary as JSON instead of a table."""

    def run(self) -> int:
        """Run the demo."""
        from rich.console import Console
        from rich.progress import Progress

        from torchemo.demo import DemoConfig, run_demo

        config = DemoConfig(self.iterations, self.tasks, self.test_tasks, self.seed)
        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal) as bar:
            rows = {n: bar.add_task(n, total=self.iterations) for n in ("MAML", "MAML + EMO")}
            result = run_demo(config, progress=lambda n, i: bar.update(rows[n], completed=i))
        summary = {"config": asdict(config), **_summary(result)}
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / "summary.json"
        path.write_text(json.dumps(summary, indent=2) + "\n")
        if self.json:
            print(json.dumps(summary))
        else:
            _show(summary)
            print(f"written: {path}")
        return 0


def _summary(result: "DemoResult") -> dict[str, Any]:
    per_step = {
        name: [round(float(v), 6) for v in scores.loss.mean(0)]
        for name, scores in (("MAML", result.base), ("MAML + EMO", result.memory))
    }
    return {
        "tasks": "synthetic regression: sines, lines, quadratics, cubics; 10 shot, 5 inner steps",
        "test_mse_per_step": per_step,
        "paired_difference": result.difference.to_dict(),
    }


def _show(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Mean squared error on the same unseen tasks (synthetic regression)")
    table.add_column("after inner step")
    per_step = summary["test_mse_per_step"]
    for s in range(len(per_step["MAML"])):
        table.add_column(str(s), justify="right")
    for name, losses in per_step.items():
        table.add_row(name, *(f"{v:.3f}" for v in losses))
    console = Console()
    console.print(table)
    difference = summary["paired_difference"]["difference"]
    low, high, p = difference["low"], difference["high"], summary["paired_difference"]["p_value"]
    verdict = "memory helps" if high < 0 else "memory harms" if low > 0 else "no difference shown"
    console.print(
        f"MAML + EMO minus MAML: {difference['value']:+.3f} [{low:+.3f}, {high:+.3f}] (95 %, paired,"
        f" {difference['n']} tasks, one seed), p = {p:.4f}: {verdict}."
    )
