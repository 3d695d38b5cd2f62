"""The figure of a result."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from markupsafe import Markup

from torchemo.lab.study.catalogue import ENTRIES
from torchemo.lab.study.entry import MIXED, OFFSETS
from torchemo.lab.study.pages.cost import cost_figure
from torchemo.lab.study.pages.drawings import by_tensor, matrix, over_steps, sweep
from torchemo.lab.study.pages.memory_figures import memory_figures
from torchemo.lab.study.pages.paper_figures import paper_figures
from torchemo.lab.study.paper.claims import variant_of
from torchemo.lab.study.scales import FOUR
from torchemo.lab.study.verdict import interval_of
from torchemo.report.figures import Interval, Line, forest, lines, wide_range
from torchemo.report.format import METRICS, Metric
from torchemo.report.svg import short

MAX_LINES = 6
"""More lines than these cannot be distinguished."""

MAX_ROWS = 24
"""More intervals than these do not fit one figure: the others are then left to the table."""


def figures(result: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """Return the figures of a result with their captions; none where there is nothing to draw."""
    entry = ENTRIES[result["entry"]]
    kind = entry.figure
    if kind == "bars":
        return [*_bars(result), *paper_figures(entry)]
    metric = _metric(result)
    if metric is None:
        return []
    makers = {
        "forest": _forest,
        "steps": _steps,
        "sweep": _sweep,
        "matrix": lambda *about: list(_matrices(*about).values()),
        "curves": _curves,
        "visits": _visits,
        "cost": _cost,
    }
    found = [*makers[kind](result, metric), *paper_figures(entry)]
    if kind == "matrix":
        return found
    if kind != "forest":
        found += _forest(result, metric)
    found += memory_figures(result).values()
    return [*found, *_layers(result)]


def named_figures(result: Mapping[str, Any]) -> dict[str, tuple[str, Markup]]:
    """Return by name the figures that pages may link: gains in each task set, sweeps, matrices."""
    metric, kind = _metric(result), ENTRIES[result["entry"]].figure
    if metric is not None and kind == "matrix":
        return _matrices(result, metric)
    found = memory_figures(result)
    if metric is not None and kind == "sweep":
        found["sweep"] = _sweep(result, metric)[0]
    if metric is not None and kind == "cost":
        found["cost"] = _cost(result, metric)[0]
    return found


def _metric(result: Mapping[str, Any]) -> Metric | None:
    for cell in result["cells"]:
        for test in cell["tests"].values():
            return METRICS[test["metric"]]
    return None


def _forest(result: Mapping[str, Any], metric: Metric) -> list[tuple[str, Markup]]:
    contrasts = _most_telling(result)
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
        length=40,
    )
    caption = "First minus second on the same tasks, 95 % intervals; claims of the paper in bold."
    left = sum(not c["diverged"] for c in result["contrasts"]) - len(rows)
    more = f" {left} more are in the table below." if left else ""
    return [(caption + more, figure)]


def _most_telling(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the contrasts that fit one figure, in order: claims, then expectations, then the others."""
    contrasts = [c for c in result["contrasts"] if not c["diverged"]]
    roles = {cell["name"]: cell["role"] for cell in result["cells"]}
    ranks = [
        0 if c["claims"] else 2 + (c["expect"] == "shown") - (roles[c["against"]] != "control")
        for c in contrasts
    ]
    chosen = sorted(range(len(contrasts)), key=lambda i: (ranks[i], i))[:MAX_ROWS]
    return [contrasts[i] for i in sorted(chosen)]


def _steps(result: Mapping[str, Any], metric: Metric) -> list[tuple[str, Markup]]:
    shown: list[Line] = []
    for cell in _shown(result):
        for test in list(cell["tests"].values())[:1]:
            ys = [metric.scale * v for v in test["per_step"]]
            steps = list(range(len(ys)))
            shown.append(Line(cell["title"], steps, ys, marked=True, colour=len(shown)))
    drawn = over_steps(shown, name="steps", y=metric.unit)
    return [("Ours: mean over test tasks after every inner step.", drawn)]


def _visits(result: Mapping[str, Any], metric: Metric) -> list[tuple[str, Markup]]:
    """Draw accuracy by visit, one figure per task set."""
    found: list[tuple[str, Markup]] = []
    cells = [c for c in _shown(result) if c.get("report") == "visits"]
    for world in dict.fromkeys(cell["world"] for cell in cells):
        shown: list[Line] = []
        for cell in [c for c in cells if c["world"] == world and world in c["tests"]][:MAX_LINES]:
            ys = [metric.scale * v for v in cell["tests"][world]["per_step"]]
            visits = list(range(1, len(ys) + 1))
            shown.append(Line(cell["title"], visits, ys, marked=True, colour=len(shown)))
        if shown:
            name = f"visits-{len(found)}"
            drawn = over_steps(shown, name=name, y=metric.unit, x="visit of the task")
            sets = ", ".join(result["worlds"].get(world, [world]))
            found.append((f"Ours, {sets}: mean over tasks by visit.", drawn))
    return found


def _cost(result: Mapping[str, Any], metric: Metric) -> list[tuple[str, Markup]]:
    """Draw what methods reach against what their training takes."""
    drawn = cost_figure(result["cells"], name="cost")
    caption = (
        "Ours: score on test tasks with its 95 % interval over tasks, and CPU time of training."
    )
    return [] if drawn is None else [(caption, drawn)]


def _sweep(result: Mapping[str, Any], metric: Metric) -> list[tuple[str, Markup]]:
    """Draw scores over the size that cells are named after: ``T=100``, ``k=20``, ``T=8 offsets 5-shot``."""
    by_line: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    base: dict[str, tuple[int, dict[str, Any]]] = {}
    for cell in _shown(result):
        shot = "5-shot" if cell["name"].endswith("5-shot") else "1-shot"
        head = cell["name"].split(" ")[0]
        for test in list(cell["tests"].values())[:1]:
            if "=" not in head:
                base[shot] = (0, test["mean"])
                continue
            size = int(head.split("=")[1])
            by_line.setdefault(f"{variant_of(cell)}, {shot}", []).append((size, test["mean"]))
    shown: list[Line] = []
    for name, points in by_line.items():
        shot = name.split(", ")[1]
        points = [*([base[shot]] if shot in base else []), *sorted(points, key=lambda p: p[0])]
        y, low, high = (
            [metric.scale * mean[key] for _, mean in points] for key in ("value", "low", "high")
        )
        sizes = [size for size, _ in points]
        shown.append(Line(name, sizes, y, low, high, colour=len(shown)))
    x = "slots T" if result["entry"] == "F3" else "neighbours k"
    drawn = sweep(shown, name="sweep", x=f"{x} (0: no memory)", y=metric.unit)
    return [("Ours: mean over test tasks with its 95 % interval.", drawn)]


def _matrices(result: Mapping[str, Any], metric: Metric) -> dict[str, tuple[str, Markup]]:
    """Draw trained-on by tested-on: scores without memory (maml), and by kind of memory what it adds."""
    sets = [world for world in FOUR if world in result["worlds"]]
    if not sets:
        return {}
    names = [short(result["worlds"][world][0].split(":")[-1], length=14) for world in sets]
    places = [((i, j), (a, b)) for i, a in enumerate(sets) for j, b in enumerate(sets)]
    cells = {
        ("" if c["role"] == "base" else variant_of(c), c["world"]): c
        for c in result["cells"]
        if c["role"] != "control"
    }
    base = np.full((len(sets), len(sets)), np.nan)
    for place, (trained, tested) in places:
        test = cells.get(("", trained), {"tests": {}})["tests"].get(tested)
        if test is not None:
            base[place] = metric.scale * test["mean"]["value"]
    caption = "Ours: MAML, trained on (rows), tested on (columns)."
    found = {"maml": (caption, matrix(base, names, name="base"))}
    for variant, kind in ((MIXED, "maml-emo-mixed"), (OFFSETS, "maml-offsets")):
        drawn = {(c["cell"], c["test"]): c for c in result["contrasts"] if not c["diverged"]}
        gains = np.full_like(base, np.nan)
        for place, (trained, tested) in places:
            name = cells.get((variant, trained), {"name": ""})["name"]
            contrast = drawn.get((name, tested))
            if contrast is not None:
                gains[place] = metric.scale * interval_of(contrast)["value"]
        if np.isfinite(gains).any():
            better, unit = metric.higher_is_better, ""
            if not better:  # errors of sets differ by orders of magnitude
                gains, unit = 100 * gains / base, ", % of its error"
            figure = matrix(gains, names, name=variant, signed=True, higher_is_better=better)
            found[kind] = (f"Ours: {kind} minus MAML{unit}; blue is better.", figure)
    return found


def _layers(result: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """Draw tensor by tensor how much recalled and own values agree, and what share gates give the former."""
    wanted = {
        "cosine": ("cos(recall, own)", "Agreement of what is recalled with the task's own value"),
        "gate": ("gate b", "Learned share of what is recalled beside the task's own gradient"),
    }
    cells = [cell for cell in result["cells"] if cell["role"] == "memory" and cell["recall"]]
    found = []
    for name, (y, caption) in wanted.items():
        shown = [
            (short(cell["title"], length=30), values)
            for cell in cells
            if (values := cell["recall"].get(f"{name}_by_tensor"))
        ]
        if shown:
            drawn = by_tensor(shown[:MAX_LINES], name=f"{name}-layers", y=y)
            found.append((f"{caption}, by tensor.", drawn))
    return found


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
    figure = over_steps(shown, name="times", y="ms", x="inner step (0: before the first)")
    return [("Ours: processor time of one task on one core.", figure)]


def _shown(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [c for c in result["cells"] if c["role"] != "control" and (c["tests"] or c["curve"])]
