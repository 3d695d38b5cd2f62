"""Tables of tasks that come back: scores by visit, and how they were found."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchemo.lab.study.pages.table import Table
from torchemo.lab.study.scales import ONCE
from torchemo.report.format import METRICS, number


def meets_visits(cell: Mapping[str, Any]) -> bool:
    """Return whether a cell was tested on tasks that come back."""
    return cell.get("visits") is not None


def visit_tables(cells: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return scores by visit and how tasks were found, per task set and kind of report."""
    shown = [cell for cell in cells if meets_visits(cell) and cell["world"] in cell["tests"]]
    found = []
    for world, report in dict.fromkeys((c["world"], c["report"]) for c in shown):
        alike = [c for c in shown if (c["world"], c["report"]) == (world, report)]
        found += [scores_by_visit(alike), found_by_visit(alike)]
    return [table for table in found if table.rows]


def scores_by_visit(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Return the scores of cells of one task set, visit by visit."""
    tests = [cell["tests"][cell["world"]] for cell in cells]
    m, report = METRICS[tests[0]["metric"]], cells[0]["report"]
    steps = max(len(test["per_step"]) for test in tests)
    first = 0 if report == "steps" else 1
    named = {"visits": "visit", "steps": "step"}.get(report, "all visits")
    heads = [f"{named} {i + first}" if steps > 1 else named for i in range(steps)]
    once = any(ONCE in cell["tests"] for cell in cells)
    rows = []
    for cell, test in zip(cells, tests, strict=True):
        ends = m.interval(test["mean"]["low"], test["mean"]["high"])
        other = cell["tests"].get(ONCE)
        last = [m.write(other["mean"]["value"]) if other else ""] if once else []
        values = [m.write(v) for v in test["per_step"]]
        values += [""] * (steps - len(values))
        rows.append((_title(cell), *values, ends, *last))
    where = f"{cells[0]['world']}: {', '.join(tests[0]['per_domain'])}"
    columns = ("method", *heads, "last, 95 % over tasks", *([ONCE] if once else []))
    return Table(f"By {named}, {where} ({m.unit})", columns, rows)


def found_by_visit(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Return which classes were recognised, and how many of these rightly."""
    rows = []
    several = len({cell["world"] for cell in cells}) > 1
    for cell in cells:
        noted = cell["tests"][cell["world"]].get("visits")
        if noted is None or cell["visits"]["find"] in ("nothing", "task", "random"):
            continue
        hits, right = noted["hits"], noted["precision"]
        once = cell["tests"].get(ONCE, {}).get("visits", {}).get("precision", [None])
        ends = [_share(values[i]) for values in (hits, right) for i in (min(1, len(hits) - 1), -1)]
        title = f"{_title(cell)}, {place_of(cell['name'])}" if several else _title(cell)
        rows.append((title, *ends, _share(once[0]), number(noted["ms"], decimals=2)))
    columns = (
        "method",
        "known classes found, visit 2",
        "last",
        "of those found, right, visit 2",
        "last",
        f"right, {ONCE}",
        "ms",
    )
    return Table("How classes were found", columns, rows)


def last_by_set(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Return what cells score last, one row per method and one column per task set."""
    scored = [cell for cell in cells if cell["world"] in cell["tests"]]
    tests = {(_title(c), place_of(c["name"])): c["tests"][c["world"]] for c in scored}
    places = list(dict.fromkeys(place for _, place in tests))
    rows = []
    for title in dict.fromkeys(title for title, _ in tests):
        found = [tests.get((title, place)) for place in places]
        values = [METRICS[t["metric"]].write(t["per_step"][-1]) if t else "" for t in found]
        rows.append((title, *values))
    unit = METRICS[next(iter(tests.values()))["metric"]].unit
    return Table(f"At the last visit ({unit})", ("method", *places), rows)


def kept_by_visit(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Return what a visit leaves behind, and the time that it takes."""
    rows = []
    for cell in cells:
        noted = cell["tests"][cell["world"]]["visits"]
        kilobytes = number(noted["bytes"] / 1000, decimals=1) if "bytes" in noted else ""
        rows.append((_title(cell), kilobytes, number(noted["ms"], decimals=2)))
    return Table("Cost of a visit", ("method", "kB kept", "CPU ms"), rows)


def place_of(name: str) -> str:
    """Return the task set in the name of a cell: learner, task set, kind."""
    return name.split()[1]


def _title(cell: Mapping[str, Any]) -> str:
    title = str(cell["title"])
    return f"· {title}" if cell["role"] == "control" else title


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"
