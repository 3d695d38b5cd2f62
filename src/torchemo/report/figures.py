"""The figures of a report."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgba
from matplotlib.ticker import FuncFormatter, MaxNLocator

from torchemo.report.run.collect import Curve
from torchemo.report.run.memory import MemoryView
from torchemo.report.run.samples import PointSample
from torchemo.report.svg import GRID, INK, MUTED, PAPER, SERIES, WIDTH, draw, short

WINDOWS = 60
"""Points of a smoothed curve."""

MAX_NUMBERED = 16
"""More slots than these are not numbered on the map."""


DWARFING = 50
"""An interval that reaches this many times as far as the typical difference hides the others."""
FEW_POWERS = 2
"""Powers of ten on either side of zero that have room for a number each."""


class Line(NamedTuple):
    """A line, perhaps with a band around it; ``marked`` shows its points."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    marked: bool = False
    colour: int = 0


class Interval(NamedTuple):
    """A number with its interval; an end that is None is open."""

    label: str
    value: float
    low: float | None
    high: float | None
    strong: bool = False


def smooth(curve: Curve, label: str = "", *, colour: int = 0) -> Line:
    """Cut a curve into at most 60 windows of equal length: medians, and where 80 % of the values lie.

    Medians, because a single diverging task can have a loss a thousand times that of its neighbours.
    """
    length = -(-len(curve.values) // WINDOWS)
    starts = range(0, len(curve.values), length)
    steps = [np.array(curve.steps[i : i + length], dtype=float) for i in starts]
    values = [np.array(curve.values[i : i + length]) for i in starts]
    low, high = ([float(np.quantile(part, q)) for part in values] for q in (0.1, 0.9))
    return Line(
        label,
        [float(part.mean()) for part in steps],
        [float(np.median(part)) for part in values],
        low if length > 1 else None,
        high if length > 1 else None,
        colour=colour,
    )


def lines(
    shown: Sequence[Line],
    *,
    name: str,
    alt: str,
    x: str,
    y: str,
    log: bool = False,
    best: int | None = None,
    whole: bool = False,
) -> Markup:
    """Draw lines with their bands."""

    def drawing(axes: Axes) -> None:
        for line in shown:
            _line(axes, line)
        if best is not None:
            axes.axvline(best, color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if log:
            _log_axis(axes, shown)
        if whole:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return draw(drawing, name=name, alt=alt, legend=len(shown) > 1)


def wide_range(shown: Sequence[Line]) -> bool:
    """Return whether lines of positive numbers span so much that only a logarithmic axis shows them."""
    values = [value for line in shown for value in line.y]
    return bool(values) and min(values) > 0 and max(values) > 8 * min(values)


def forest(
    rows: Sequence[Interval],
    *,
    name: str,
    alt: str,
    x: str,
    zero: bool = False,
    sides: tuple[str, str] | None = None,
    length: int = 22,
) -> Markup:
    """Draw numbers with their intervals, one below the other."""

    def drawing(axes: Axes) -> None:
        if zero:
            axes.axvline(0.0, color=INK, linewidth=1)
        _intervals(axes, rows, length=length)
        axes.set_xlabel(x)
        if zero and (typical := _dwarfed(rows)) is not None:
            _bend(axes, typical)
            axes.set_xlabel(f"{x} (log beyond ±{typical:.2g})")
        if sides is not None:
            axes.set_title(f"← {short(sides[0], length=26)}", loc="left", color=MUTED, fontsize=9)
            axes.set_title(f"{short(sides[1], length=26)} →", loc="right", color=MUTED, fontsize=9)

    width = WIDTH + 0.06 * max(length - 22, 0)
    return draw(drawing, name=name, alt=alt, size=(width, 1.1 + 0.36 * len(rows)))


def _intervals(axes: Axes, rows: Sequence[Interval], *, length: int) -> None:
    """Draw one number with its interval per line, the first on top."""
    places = list(range(len(rows)))[::-1]
    for place, row in zip(places, rows, strict=True):
        colour = INK if row.strong else SERIES[0]
        low = row.value if row.low is None else row.low
        high = row.value if row.high is None else row.high
        axes.plot([low, high], [place, place], color=colour, linewidth=3 if row.strong else 2)
        axes.plot([row.value], [place], "D" if row.strong else "o", color=colour, markersize=6)
    axes.set_yticks(places, [short(row.label, length=length) for row in rows], color=INK)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _bend(axes: Axes, typical: float) -> None:
    """Make the axis logarithmic beyond a typical distance from zero."""
    far = max(abs(end) for end in axes.get_xlim())
    powers = [10.0**k for k in range(math.ceil(math.log10(typical)), 1 + int(math.log10(far)))]
    shown = powers[:: 1 if len(powers) <= FEW_POWERS else 2]
    ticks = [*(-p for p in shown[::-1]), 0.0, *shown]
    axes.set_xscale("symlog", linthresh=typical)
    axes.set_xticks(ticks, [f"{at:g}" for at in ticks], minor=False)
    axes.set_xticks([], minor=True)


def _dwarfed(rows: Sequence[Interval]) -> float | None:
    """Return the typical distance from zero if some interval is so wide that it would hide the others."""
    ends = [abs(end) for row in rows for end in (row.value, row.low, row.high) if end is not None]
    middle = statistics.median(abs(row.value) for row in rows)
    return middle if middle > 0 and max(ends) > DWARFING * middle else None


def key_map(memory: MemoryView, *, name: str, alt: str) -> Markup:
    """Draw where slots (circles) and validation tasks (dots) lie; slots that are recalled more are larger."""
    colours = {domain: SERIES[i % len(SERIES)] for i, domain in enumerate(memory.domains)}
    places = memory.key_map
    sizes = _sizes(memory)

    def drawing(axes: Axes) -> None:
        for domain in [*memory.domains, None]:
            rows = [i for i, d in enumerate(memory.task_domains) if d == domain]
            if rows:
                at = places.tasks[rows].numpy()
                label = "unknown" if domain is None else short(domain)
                colour = MUTED if domain is None else colours[domain]
                axes.scatter(at[:, 0], at[:, 1], s=16, color=colour, label=label, linewidths=0)
        owners = [s.recalled_by if s.domain is None else s.domain for s in memory.slots]
        edges = [MUTED if owner is None else colours[owner] for owner in owners]
        faces = [to_rgba(edge, 0.22) for edge in edges]
        x, y = places.slots.numpy().T
        axes.scatter(x, y, s=sizes, facecolors=faces, edgecolors=edges, linewidths=1.4)
        if len(memory.slots) <= MAX_NUMBERED:
            for slot, at_x, at_y in zip(memory.slots, x, y, strict=True):
                axes.text(at_x, at_y, str(slot.number), ha="center", va="center", fontsize=8)
        first, second = (100 * share for share in places.explained)
        axes.set_xlabel(f"first component ({first:.0f} % of the variance)")
        axes.set_ylabel(f"second ({second:.0f} %)")

    return draw(drawing, name=name, alt=alt, size=(WIDTH, 3.8), legend=True)


def _sizes(memory: MemoryView) -> list[float]:
    """Return areas that grow with how much slots are recalled; few slots are drawn larger."""
    amounts = [float(slot.recalls) for slot in memory.slots]
    if memory.recalls_are_equal:
        amounts = [slot.weight for slot in memory.slots]
    least, most = min(amounts), max(amounts)
    smallest = 140.0 if len(amounts) <= MAX_NUMBERED else 30.0
    return [smallest + 160.0 * (a - least) / ((most - least) or 1.0) for a in amounts]


def task_curve(sample: PointSample, *, name: str, alt: str) -> Markup:
    """Draw a regression task: its points, and what the learner made of them before and after."""
    before, after = 4, 0

    def curves(axes: Axes) -> None:
        x, y = sample.support.x[:, 0].numpy(), sample.support.y[:, 0].numpy()
        grid = sample.grid.numpy()
        axes.plot(grid, sample.curves[0].numpy(), "--", color=SERIES[before], label="before")
        axes.plot(grid, sample.curves[1].numpy(), color=SERIES[after], label="after")
        asked = sample.query.x[:, 0].numpy(), sample.query.y[:, 0].numpy()
        axes.plot(*asked, "o", markersize=5, color=PAPER, markeredgecolor=INK, label="query")
        axes.plot(x, y, "o", markersize=5.5, color=INK, label="support")
        axes.set_xlabel("input")
        axes.set_ylabel("target")

    def agreement(axes: Axes) -> None:
        truth = sample.query.y[:, 0].numpy()
        span = [float(truth.min()), float(truth.max())]
        axes.plot(span, span, color=GRID, linewidth=3)
        axes.plot(
            truth, sample.answers[0].numpy(), "s", markersize=5, color=SERIES[before],
            fillstyle="none", label="before",
        )  # fmt: skip
        axes.plot(truth, sample.answers[1].numpy(), "o", color=SERIES[after], label="after")
        axes.set_xlabel("true target of a query")
        axes.set_ylabel("predicted")

    drawing = curves if len(sample.grid) else agreement
    return draw(drawing, name=name, alt=alt, size=(WIDTH, 2.9), legend=True)


def _line(axes: Axes, line: Line) -> None:
    colour = SERIES[line.colour % len(SERIES)]
    if line.low is not None and line.high is not None:
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.16, linewidth=0)
    axes.plot(
        line.x,
        line.y,
        color=colour,
        label=short(line.label, length=30),
        marker="o" if line.marked or len(line.x) == 1 else None,
        markersize=4.5,
    )


def _log_axis(axes: Axes, shown: Sequence[Line]) -> None:
    """Scale by what the lines reach: a band may run below zero, or far above where anything happens."""
    axes.set_yscale("log")
    tops = [v for line in shown for v in (line.high if line.high is not None else line.y)]
    bottoms = [v for line in shown for v in line.y]
    bottom, top = min(bottoms) / 1.6, min(max(tops), 4 * max(bottoms)) * 1.2
    axes.set_ylim(bottom, top)
    plain_ticks(axes.yaxis, narrow=top < 80 * bottom)


def plain_ticks(axis: Axis, *, narrow: bool) -> None:
    """Number a logarithmic axis with plain numbers; a narrow one also between the powers of ten."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(
        FuncFormatter(lambda v, _: f"{v:g}" if narrow and f"{v:e}"[0] in "25" else "")
    )
