"""The whole demo: train, visit, compare, write."""

import json
from collections.abc import Callable
from pathlib import Path

from torchemo.data.synthetic.regression import RegressionSpec
from torchemo.lab.demo.findings import Found, findings, meaning, sentences
from torchemo.lab.demo.methods import measure
from torchemo.lab.demo.page import write_page
from torchemo.lab.demo.runs import RUNS, SHOTS, DemoConfig, draw_visits, train_both
from torchemo.report.run.page import write_run_report
from torchemo.training.device import HERE, Place


def run_demo(
    root: Path,
    config: DemoConfig,
    *,
    place: Place = HERE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Found:
    """Run the demo in a folder; return what it found, which summary.json holds too."""
    systems = train_both(root, config, place=place, progress=progress)
    measured = measure(systems, draw_visits(config))
    found = findings(measured)
    summary = {
        "data": f"curves of four families (synthetic), {SHOTS} new points at every visit",
        "steps": config.steps,
        "seed": config.seed,
        **found,
        "sentences": sentences(found),
        "meaning": meaning(found),
    }
    (root / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    families = RegressionSpec("hsml4").families
    write_page(measured, found, families, steps=config.steps, out=root / "report.html")
    for name in RUNS:
        write_run_report(root / name)
    return summary
