"""A result as tables: our cells, contrasts beside the paper's numbers, recalls, cost, the paper itself."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchemo.lab.study.catalogue import ENTRIES
from torchemo.lab.study.pages.cost import cpu_seconds_of, estimate
from torchemo.lab.study.pages.table import Table
from torchemo.lab.study.pages.visit_tables import meets_visits, place_of, visit_tables
from torchemo.lab.study.scales import FOUR
from torchemo.lab.study.verdict import interval_of, verdict_of
from torchemo.report.format import METRICS, MINUS, number


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return all tables of a result; those without rows are left out."""
    cells = result["cells"]
    found = [
        *visit_tables(cells),
        *score_tables([cell for cell in cells if not meets_visits(cell)]),
        contrast_table(result["contrasts"]),
        recall_table(cells),
        recalled_table(cells),
        _costs(cells),
        _missing(result),
        _paper(result["entry"]),
    ]
    return [table for table in found if table.rows]


def markdown(result: Mapping[str, Any]) -> str:
    """Write a result as Markdown."""
    entry = ENTRIES[result["entry"]]
    lines = [f"# {entry.name}: {entry.title}", "", entry.sentence, ""]
    lines += [about(result), ""]
    if entry.note:
        lines += [entry.note, ""]
    for table in tables(result):
        lines += [f"## {table.title}", "", *grid(table), ""]
    lines += [result["rule"], "", f"Made by `{result['command']}`.", ""]
    return "\n".join(lines)


def grid(table: Table) -> list[str]:
    """Write a table as lines of Markdown."""
    rows = [table.columns, ("---",) * len(table.columns), *table.rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def about(result: Mapping[str, Any]) -> str:
    """Say what was run: data, scale, seeds, tasks."""
    names = [name for sets in result["worlds"].values() for name in sets]
    sets = ", ".join(dict.fromkeys(names))
    tasks = [test["tasks"] for cell in result["cells"] for test in cell["tests"].values()]
    tested = f", {max(tasks)} test tasks" if tasks else ""
    return (
        f"Ours: scale {result['scale']}, {result['tasks']} ({sets}),"
        f" seeds {', '.join(map(str, result['seeds']))}{tested}."
    )


def chosen_rates(options: Sequence[str]) -> str:
    """Write chosen rates briefly; slots have the outer one."""
    return ", ".join(
        option.split(".", 1)[-1] for option in options if not option.startswith("memory.")
    )


def score_tables(cells: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return one table per task set that cells were trained and tested on."""
    worlds = dict.fromkeys(world for cell in cells for world in cell["tests"])
    found = []
    for world in worlds:
        shown = [cell for cell in cells if world in cell["tests"]]
        first = shown[0]["tests"][world]
        domains = list(first["per_domain"]) if len(first["per_domain"]) > 1 else []
        columns = ("method", "all [95 % over tasks]", *domains, "seeds", "CPU s", "chosen rates")
        where = next(iter(first["per_domain"])) if world in FOUR else world
        title = f"Tested on {where}: {METRICS[first['metric']].unit}"
        found.append(Table(title, columns, [_score_row(cell, world, domains) for cell in shown]))
    return found


def _score_row(cell: Mapping[str, Any], world: str, domains: Sequence[str]) -> tuple[str, ...]:
    test = cell["tests"][world]
    m = METRICS[test["metric"]]
    name = f"· {cell['title']}" if cell["role"] == "control" else cell["title"]
    means = [m.write(test["per_domain"][d]["value"]) for d in domains]
    seeds = " / ".join(m.write(mean) for mean in test["seed_means"])
    return (
        name,
        estimate(test["mean"], test["metric"]),
        *means,
        seeds,
        cpu_seconds_of(cell["runs"]),
        chosen_rates(cell["rates"]),
    )


def contrast_table(contrasts: Sequence[Mapping[str, Any]]) -> Table:
    """Return paired differences, one row each."""
    rows = []
    for c in contrasts:
        found = {} if c["diverged"] else c["per_domain"]
        domains = [
            f"{name} {METRICS[c['metric']].write(row['value'], sign=True)}"
            for name, row in found.items()
            if len(found) > 1
        ]
        rows.append((c["name"], _paper_gain(c), _difference(c), ", ".join(domains), _expected(c)))
    columns = ("first minus second", "paper, points", "ours [95 %]", "by domain", "expected")
    return Table("Paired differences on the same tasks", columns, rows)


def gains_by_set(contrasts: Sequence[Mapping[str, Any]]) -> Table:
    """Return paired differences, one row per pair and one column per task set."""
    found: dict[str, dict[str, str]] = {}
    for c in contrasts:
        place = place_of(c["cell"])
        found.setdefault(c["name"].replace(f" {place}", ""), {})[place] = _difference(c)
    places = list(dict.fromkeys(place for row in found.values() for place in row))
    rows = [(name, *(row.get(place, "") for place in places)) for name, row in found.items()]
    return Table("Paired differences [95 %]", ("first minus second", *places), rows)


def _difference(contrast: Mapping[str, Any]) -> str:
    """Write a paired difference with its interval, or who diverged."""
    if contrast["diverged"]:
        return f"{' and '.join(contrast['diverged'])} diverged"
    return estimate(interval_of(contrast), contrast["metric"], sign=True) + _relative(contrast)


def _paper_gain(contrast: Mapping[str, Any]) -> str:
    paper = contrast["paper"]
    return "" if paper is None else number(paper, sign=True, decimals=2)


def _relative(contrast: Mapping[str, Any]) -> str:
    """Write the ratio of errors; accuracies have none."""
    relative = contrast["relative"]
    if METRICS[contrast["metric"]].higher_is_better or relative is None:
        return ""
    return f" ({number(100 * relative, sign=True, decimals=0)} %)"


def _expected(contrast: Mapping[str, Any]) -> str:
    return "" if contrast["expect"] == "shown" else f"{contrast['expect']}: {verdict_of(contrast)}"


def recall_table(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Return what the cells with memory recalled for unseen tasks."""
    rows = []
    for cell in cells:
        r = cell["recall"]
        if r is None:
            continue
        used = r.get("slots_in_use")
        rows.append(
            (
                cell["title"],
                f"{_number(r['same_domain'])} ({_number(r['chance'])})",
                _number(r["cosine"]),
                _number(r["norm_ratio"]),
                _number(r["age"]),
                "" if used is None else _number(used),
            )
        )
    columns = (
        "method",
        "same domain (chance)",
        "cos(recall, own)",
        "norm ratio",
        "age, batches",
        "slots in use",
    )
    return Table("What was recalled for unseen tasks", columns, rows)


def recalled_table(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Return how many test tasks used their recall, where some may skip it."""
    judging = [
        cell
        for cell in cells
        if any(test.get("recalled") is not None for test in cell["tests"].values())
    ]
    worlds = list(dict.fromkeys(world for cell in judging for world in cell["tests"]))
    rows = [
        (cell["title"], *(_number(_recalled(cell, world)) for world in worlds)) for cell in judging
    ]
    return Table("Share of test tasks that were evaluated with recall", ("method", *worlds), rows)


def _recalled(cell: Mapping[str, Any], world: str) -> float | None:
    found: float | None = cell["tests"].get(world, {}).get("recalled")
    return found


def _costs(cells: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for cell in cells:
        c = cell["cost"]
        if c is None:
            continue
        rows.append(
            (
                cell["title"],
                f"{c['parameters']:,}",
                f"{c['memory_parameters']:,}",
                f"{c['memory_bytes'] / 1e6:.3g}",
                f"{c['outer_step_ms']:.3g}",
                " / ".join(f"{ms:.2f}" for ms in c["inner_ms"]),
            )
        )
    columns = (
        "method",
        "parameters",
        "of key network and aggregator",
        "memory, MB",
        "outer step, ms",
        "before the first and at each inner step, ms",
    )
    return Table("Cost on one core", columns, rows)


def _missing(result: Mapping[str, Any]) -> Table:
    rows = [(name, f"not available: {why}") for name, why in result["missing"].items()]
    rows += [(f"run {name}", f"failed: {why}") for name, why in result["failed"].items()]
    for cell in result["cells"]:
        ends = [run["ended"] for run in cell["runs"]]
        if not cell["tests"] and cell["cost"] is None:
            rows.append((cell["title"], f"no result: {', '.join(ends)}"))
    return Table("Without result", ("what", "why"), rows)


def _paper(name: str) -> Table:
    published = ENTRIES[name].published
    how = "read off the plots" if published.read_off else "as printed"
    return Table(f"The paper ({published.unit}, {how})", published.header, published.rows)


def _number(value: float | None) -> str:
    return MINUS if value is None else number(value)
