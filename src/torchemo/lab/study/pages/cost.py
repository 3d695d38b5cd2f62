"""What methods reach for the time that their training takes: a figure and a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes

from torchemo.lab.study.pages.table import Table
from torchemo.lab.study.verdict import interval_of
from torchemo.report.format import METRICS
from torchemo.report.svg import INK, MUTED, SERIES, draw

SIZE = (6.4, 4.2)
"""Room for the names of two dozen methods."""


def cpu_seconds(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Average what training took, validations included, over the runs that were not interrupted."""
    known = [run["cpu_seconds"] for run in runs if run.get("cpu_seconds") is not None]
    return sum(known) / len(known) if known else None


def estimate(found: Mapping[str, Any], metric: str, *, sign: bool = False) -> str:
    """Write an estimate as ``value [low, high]`` in the units of its metric."""
    m = METRICS[metric]
    ends = m.interval(found["low"], found["high"], sign=sign)
    return f"{m.write(found['value'], sign=sign)} {ends}"


def cpu_seconds_of(runs: Sequence[Mapping[str, Any]]) -> str:
    """Write what training took; nothing where nobody knows."""
    seconds = cpu_seconds(runs)
    return "" if seconds is None else f"{seconds:.0f}"


def cost_figure(cells: Sequence[Mapping[str, Any]], *, name: str) -> Markup | None:
    """Draw the score of each cell on its own tasks, with its interval, against seconds of training."""
    points = []
    for cell in cells:
        seconds, test = cpu_seconds(cell["runs"]), cell["tests"].get(cell["world"])
        if seconds is not None and test is not None:
            points.append((cell, seconds, test))
    if not points:
        return None
    metric = METRICS[points[0][2]["metric"]]

    def drawing(axes: Axes) -> None:
        for cell, seconds, test in points:
            low, middle, high = (metric.scale * test["mean"][e] for e in ("low", "value", "high"))
            colour = SERIES[0] if cell["role"] == "base" else SERIES[1]
            axes.plot([seconds, seconds], [low, high], color=MUTED, linewidth=1)
            axes.plot([seconds], [middle], "o", color=colour, markersize=5)
            beside: dict[str, Any] = {"xytext": (5, 2), "textcoords": "offset points"}
            axes.annotate(cell["name"], (seconds, middle), color=INK, fontsize=7, **beside)
        axes.set_xscale("log")
        axes.set_xlabel("CPU seconds of training")
        axes.set_ylabel(metric.unit)

    alt = f"{metric.unit} of {len(points)} methods against CPU seconds of training."
    return draw(drawing, name=name, alt=alt, size=SIZE)


def compared(result: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> Table:
    """Return scores and seconds of cells, with their differences from what all are compared with.

    That is what most contrasts are against; intervals are over seeds and tasks where there are several seeds.
    """
    drawn = [c for c in result["contrasts"] if not c["diverged"] and c["test"] is None]
    against = list(dict.fromkeys(c["against"] for c in drawn))
    bases = [n for n in against if 2 * sum(c["against"] == n for c in drawn) >= len(cells)]
    titles = {cell["name"]: cell["title"] for cell in result["cells"]}
    rows = []
    for cell in cells:
        test = cell["tests"][cell["world"]]
        differences = []
        for base in bases:
            found = [c for c in drawn if (c["cell"], c["against"]) == (cell["name"], base)]
            differences.append(_difference(found[0]) if found else "")
        score = estimate(test["mean"], test["metric"])
        rows.append((cell["title"], score, cpu_seconds_of(cell["runs"]), *differences))
    columns = (
        "method",
        "accuracy [95 % over tasks]",
        "CPU s",
        *(f"minus {titles[b]}" for b in bases),
    )
    return Table("Methods", columns, rows)


def _difference(contrast: Mapping[str, Any]) -> str:
    metric, found = contrast["metric"], interval_of(contrast)
    if found["low"] is None:
        return METRICS[metric].write(found["value"], sign=True)
    return estimate(found, metric, sign=True)
