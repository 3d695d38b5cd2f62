"""Drawings that our figures and the paper's share: a matrix of sets, a sweep over sizes, lines over steps."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from torchemo.report.figures import Line, lines, plain_ticks, wide_range
from torchemo.report.svg import GRID, INK, MUTED, SERIES, WIDTH, draw

HOLLOW: dict[str, Any] = {"color": INK, "markerfacecolor": "none", "markeredgewidth": 1.5}
"""A mark that leaves what lies under it to be seen."""


class Pair(NamedTuple):
    """Scores of a learner without and with memory, one per seed; ``whole`` are of all its inner steps."""

    label: str
    without: Sequence[float]
    given: Sequence[float]
    whole: Sequence[float] = ()


def matrix(
    values: np.ndarray,
    names: Sequence[str],
    *,
    name: str,
    signed: bool = False,
    higher_is_better: bool = True,
) -> Markup:
    """Draw trained-on (rows) by tested-on (columns); signed values are coloured by what is better.

    One value that is off by orders of magnitude, as errors can be, leaves the others their shades.
    """
    known = np.abs(values[np.isfinite(values)])
    top = min(float(known.max()), 3 * float(np.median(known))) if known.size else 0.0
    centred: dict[str, Any] = {"ha": "center", "va": "center"}

    def drawing(axes: Axes) -> None:
        axes.grid(visible=False)
        for (i, j), value in np.ndenumerate(values):
            if not np.isfinite(value):
                axes.text(j, i, "no result", color=MUTED, fontsize=8, **centred)
                continue
            good = not signed or (value > 0) == higher_is_better
            shade = 0.1 + 0.5 * min(abs(value) / (top or 1.0), 1.0)
            colour = SERIES[0] if good else SERIES[1]
            axes.fill_between([j - 0.48, j + 0.48], i - 0.46, i + 0.46, color=colour, alpha=shade)
            axes.text(j, i, _short(value, "+" if signed else ""), color=INK, fontsize=9, **centred)
        axes.set_xticks(range(len(names)), names)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_ylim(len(names) - 0.4, -0.6)

    return draw(drawing, name=f"matrix-{name}", alt="Trained on by tested on.", size=(WIDTH, 2.6))


def _short(value: float, sign: str) -> str:
    """Write a number so that it fits into a cell."""
    digits = {10: ".2f", 100: ".1f", 10_000: ".0f"}
    fitting = next((form for below, form in digits.items() if abs(value) < below), ".0e")
    return format(value, sign + fitting)


def sweep(shown: Sequence[Line], *, name: str, x: str, y: str) -> Markup:
    """Draw scores over sizes that grow by factors: they stand side by side, and the axis names them."""
    sizes = sorted({size for line in shown for size in line.x})

    def drawing(axes: Axes) -> None:
        for line in shown:
            places = [sizes.index(size) for size in line.x]
            colour = SERIES[line.colour % len(SERIES)]
            if line.low is not None and line.high is not None:
                axes.fill_between(
                    places, line.low, line.high, color=colour, alpha=0.16, linewidth=0
                )
            axes.plot(places, line.y, "o-", color=colour, label=line.label, markersize=4.5)
        if wide_range(shown):
            axes.set_yscale("log")
            plain_ticks(axes.yaxis, narrow=True)
        axes.set_xticks(range(len(sizes)), [f"{size:g}" for size in sizes])
        axes.set_xlabel(x)
        axes.set_ylabel(y)

    return draw(drawing, name=name, alt=f"{y} over {x}.", legend=len(shown) > 1)


def over_steps(shown: Sequence[Line], *, name: str, y: str, x: str = "inner step") -> Markup:
    """Draw something after every inner step."""
    return lines(
        shown, name=name, alt=f"{y} over {x}.", x=x, y=y, log=wide_range(shown), whole=True
    )


def by_tensor(shown: Sequence[tuple[str, dict[str, float]]], *, name: str, y: str) -> Markup:
    """Draw one number per tensor of the network, for several methods."""
    tensors = list(dict.fromkeys(tensor for _, values in shown for tensor in values))

    def drawing(axes: Axes) -> None:
        axes.axhline(0.0, color=INK, linewidth=1)
        for number, (label, values) in enumerate(shown):
            places = [tensors.index(tensor) for tensor in values]
            colour = SERIES[number % len(SERIES)]
            axes.plot(places, list(values.values()), "o-", color=colour, label=label, markersize=4)
        axes.set_xticks(range(len(tensors)), tensors, rotation=60, ha="right", fontsize=8)
        axes.set_ylabel(y)

    return draw(drawing, name=name, alt=f"{y} by tensor.", size=(WIDTH, 3.4), legend=True)


def with_and_without(pairs: Sequence[Pair], *, name: str, x: str, higher_is_better: bool) -> Markup:
    """Draw what memory changes: a learner per line, means as large dots, seeds as small ones."""
    values = [value for pair in pairs for value in (*pair.without, *pair.given, *pair.whole)]
    log = not higher_is_better and wide_range([Line("", range(len(values)), values)])

    def drawing(axes: Axes) -> None:
        places = list(range(len(pairs)))[::-1]
        for place, pair in zip(places, pairs, strict=True):
            means = [sum(scores) / len(scores) for scores in (pair.without, pair.given)]
            axes.plot(means, [place, place], color=GRID, linewidth=4, zorder=1)
        for label, look, scores in (
            ("without memory", {"color": MUTED}, [pair.without for pair in pairs]),
            ("with memory", {"color": SERIES[0]}, [pair.given for pair in pairs]),
            ("without memory, all steps", HOLLOW, [pair.whole for pair in pairs]),
        ):
            if not any(scores):
                continue
            means = [sum(one) / len(one) if one else np.nan for one in scores]
            axes.plot(means, places, "o", markersize=8, label=label, **look)
            for place, one in zip(places, scores, strict=True):
                axes.plot(one, [place] * len(one), ".", color=INK, markersize=3)
        axes.set_yticks(places, [pair.label for pair in pairs], color=INK)
        axes.set_ylim(-0.6, len(pairs) - 0.4)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(x)
        if log:
            axes.set_xscale("log")
            plain_ticks(axes.xaxis, narrow=True)
        elif not higher_is_better:
            axes.set_xlim(left=0.0)

    alt = f"{x} of {len(pairs)} learners without and with memory."
    return draw(drawing, name=name, alt=alt, size=(WIDTH, 1.2 + 0.3 * len(pairs)), legend=True)
