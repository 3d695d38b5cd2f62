"""The figure of a result."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from torchemo.report.figures import Interval, Line, forest, lines, wide_range
from torchemo.report.svg import INK, SERIES, WIDTH, draw, short
from torchemo.report.words import METRICS, Metric
from torchemo.study.entries import ENTRIES
from torchemo.study.scales import FOUR
from torchemo.study.verdict import interval_of

MAX_ROWS = 24
"""More intervals than these do not fit one figure: controls are then left to the table."""


def figures(result: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """Return the figures of a result with their captions; none where there is nothing to draw."""
    kind = ENTRIES[result["entry"]].figure
    if kind == "bars":
        return _bars(result)
    metric = _metric(result)
    if metric is None:
        return []
    makers = {
        "forest": _forest,
        "steps": _steps,
        "sweep": _sweep,
        "matrix": _matrix,
        "curves": _curves,
    }
    found = makers[kind](result, metric)
    return found if kind == "forest" else [*found, *_forest(result, metric)]


def _metric(result: Mapping[str, Any]) -> Metric | None:
    for cell in result["cells"]:
        for test in cell["tests"].values():
            return METRICS[test["metric"]]
    return None


def _forest(result: Mapping[str, Any], metric: Metric) -> list[tuple[str, Markup]]:
    contrasts = [c for c in result["contrasts"] if not c["diverged"]]
    roles = {cell["name"]: cell["role"] for cell in result["cells"]}
    if len(contrasts) > MAX_ROWS:
        contrasts = [c for c in contrasts if roles[c["against"]] != "control"][:MAX_ROWS]
    rows = []
    for c in contrasts:
        found = interval_of(c)
        low, high = (None if found[e] is None else metric.scale * found[e] for e in ("low", "high"))
        value = metric.scale * found["value"]
        rows.append(Interval(c["name"], value, low, high, strong=bool(c["claims"])))
    if not rows:
        return []
    sides = ("second better", "first better")
    figure = forest(
        rows,
        name="contrasts",
        alt="Paired differences with 95 % intervals.",
        x=metric.difference,
        zero=True,
        sides=sides if metric.higher_is_better else (sides[1], sides[0]),
    )
    return [
        (
            "First minus second on the same tasks, 95 % intervals; claims of the paper in bold.",
            figure,
        )
    ]


def _steps(result: Mapping[str, Any], metric: Metric) -> list[tuple[str, Markup]]:
    shown: list[Line] = []
    for cell in _shown(result):
        for test in list(cell["tests"].values())[:1]:
            ys = [metric.scale * v for v in test["per_step"]]
            shown.append(
                Line(cell["title"], list(range(len(ys))), ys, marked=True, colour=len(shown))
            )
    figure = lines(
        shown,
        name="steps",
        alt="Scores after every inner step.",
        x="inner step",
        y=metric.unit,
        log=not metric.higher_is_better and wide_range(shown),
        whole=True,
    )
    return [("Mean over test tasks after every inner step.", figure)]


def _sweep(result: Mapping[str, Any], metric: Metric) -> list[tuple[str, Markup]]:
    """Draw scores over the size that cells are named after, ``T=100`` or ``k=20``."""
    by_shot: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for cell in _shown(result):
        shot = "5-shot" if cell["name"].endswith("5-shot") else "1-shot"
        head = cell["name"].split(" ")[0]
        size = int(head.split("=")[1]) if "=" in head else 0
        for test in list(cell["tests"].values())[:1]:
            by_shot.setdefault(shot, []).append((size, test["mean"]))
    shown: list[Line] = []
    for shot, points in sorted(by_shot.items()):
        points.sort(key=lambda point: point[0])
        # Sizes grow by factors: they stand side by side, and the axis names them.
        y, low, high = (
            [metric.scale * mean[key] for _, mean in points] for key in ("value", "low", "high")
        )
        places = [float(i) for i in range(len(points))]
        label = f"{shot}: {', '.join(str(size) for size, _ in points)}"
        shown.append(Line(label, places, y, low, high, marked=True, colour=len(shown)))
    figure = lines(
        shown,
        name="sweep",
        alt="Scores over the size of the memory or the number of neighbours.",
        x="sizes in the order of the legend",
        y=metric.unit,
        whole=True,
    )
    return [("Mean over test tasks with its 95 % interval.", figure)]


def _matrix(result: Mapping[str, Any], metric: Metric) -> list[tuple[str, Markup]]:
    """Draw trained-on by tested-on: scores without memory, and what memory adds."""
    names = [short(result["worlds"][world][0].split(":")[-1], length=14) for world in FOUR]
    cells = {cell["name"]: cell for cell in result["cells"]}
    base = np.full((4, 4), np.nan)
    for i, trained in enumerate(FOUR):
        for j, tested in enumerate(FOUR):
            test = cells.get(f"maml on {trained}", {"tests": {}})["tests"].get(tested)
            if test is not None:
                base[i, j] = metric.scale * test["mean"]["value"]
    found = [("MAML: trained on (rows), tested on (columns).", _heat(base, names, metric, "base"))]
    for kind in ("-emo-paper", "-emo"):
        gains = np.full((4, 4), np.nan)
        for c in result["contrasts"]:
            words = c["name"].split(", ")
            if c["diverged"]:
                continue
            if c["cell"].startswith(f"maml{kind} on ") and c["test"] in FOUR and len(words) == 2:
                trained = c["cell"].rsplit(" ", 1)[-1]
                place = FOUR.index(trained), FOUR.index(c["test"])
                gains[place] = metric.scale * interval_of(c)["value"]
        if np.isfinite(gains).any():
            caption = f"maml{kind} minus MAML: trained on (rows), tested on (columns)."
            found.append((caption, _heat(gains, names, metric, kind.strip("-"), signed=True)))
    return found


def _heat(
    values: np.ndarray, names: Sequence[str], metric: Metric, name: str, *, signed: bool = False
) -> Markup:
    known = np.abs(values[np.isfinite(values)])
    top = float(known.max()) if known.size else 1.0

    def drawing(axes: Axes) -> None:
        axes.grid(visible=False)
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                if not np.isfinite(value):
                    continue
                good = (value > 0) == metric.higher_is_better or not signed
                colour = SERIES[0] if good else SERIES[1]
                share = min(abs(value) / (top or 1.0), 1.0)
                axes.fill_between(
                    [j - 0.48, j + 0.48], i - 0.46, i + 0.46, color=colour, alpha=0.1 + 0.5 * share
                )
                text = f"{value:+.2f}" if signed else f"{value:.2f}"
                axes.text(j, i, text, ha="center", va="center", color=INK, fontsize=9)
        axes.set_xticks(range(4), names)
        axes.set_yticks(range(4), names)
        axes.set_xlim(-0.6, 3.6)
        axes.set_ylim(3.6, -0.6)

    return draw(drawing, name=f"matrix-{name}", alt="Trained on by tested on.", size=(WIDTH, 2.6))


def _curves(result: Mapping[str, Any], metric: Metric) -> list[tuple[str, Markup]]:
    losses, scores = [], []
    for number, cell in enumerate(_shown(result)):
        if cell["curve"] is None:
            continue
        x, y = zip(*cell["curve"]["loss"], strict=True)
        losses.append(Line(cell["title"], x, y, colour=number))
        if cell["curve"]["validation"]:
            x, y, _ = zip(*cell["curve"]["validation"], strict=True)
            sign = metric.scale if metric.higher_is_better else -metric.scale
            shown = [sign * v for v in y]
            scores.append(Line(cell["title"], x, shown, marked=True, colour=number))
    found = []
    for name, shown, label in (
        ("loss", losses, "training loss"),
        ("validation", scores, f"validation {metric.name}"),
    ):
        if shown:
            figure = lines(
                shown,
                name=name,
                alt=f"{label} over outer steps.",
                x="outer step",
                y=label,
                log=wide_range(shown),
            )
            found.append((f"The {label} of the first seed.", figure))
    return found


def _bars(result: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """Draw the time before the first and at every inner step."""
    cells = [cell for cell in result["cells"] if cell["cost"] is not None]
    shown = [
        Line(
            cell["title"],
            list(range(len(cell["cost"]["inner_ms"]))),
            cell["cost"]["inner_ms"],
            marked=True,
            colour=number,
        )
        for number, cell in enumerate(cells)
    ]
    if not shown:
        return []
    figure = lines(
        shown,
        name="times",
        alt="Processor time of every inner step.",
        x="inner step (0: before the first)",
        y="ms",
        whole=True,
    )
    return [("Processor time of one task on one core.", figure)]


def _shown(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [c for c in result["cells"] if c["role"] != "control" and (c["tests"] or c["curve"])]
