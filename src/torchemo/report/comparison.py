"""The report of a comparison: paired differences on the same tasks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from torchemo.core.errors import DataError
from torchemo.report.figures import Interval, Line, forest, lines, wide_range
from torchemo.report.format import (
    Metric,
    cost_of,
    metric_of,
    number,
    p_value,
    place,
    side_names,
    unequal_steps,
)
from torchemo.report.page import render
from torchemo.runs.folder import RunFolder

_NEEDED = ("metric", "base", "other", "tasks", "seeds", "difference", "per_domain", "per_step")


class Pair(NamedTuple):
    """One comparison, ready to be shown.

    Attributes:
        title: ``other`` minus ``base``.
        verdict: What the interval says.
        steps: That the methods had different numbers of outer steps, if they had.
        rows: The table: all tasks, then domains.
        forest: The same as a figure.
        seeds: Rows of the table over seeds; empty with one seed.
        sides: Either method with its mean, runs and seeds.
        found: The comparison itself.
    """

    title: str
    verdict: str
    steps: str | None
    rows: list[dict[str, Any]]
    forest: Markup
    seeds: list[tuple[str, str, str]]
    sides: list[dict[str, Any]]
    found: Mapping[str, Any]


def write_comparison_report(comparison: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Write one or several comparisons with the same base as one HTML file.

    Args:
        comparison: What `torchemo.runs.compare.compare` returned, the base being the same in all. Runs and
            seeds are named if they were noted (`torchemo.report.run.collect.compare_runs`).
        out: The file.
    """
    _check(comparison)
    metric = metric_of(str(comparison[0]["metric"]))
    names = side_names(comparison)
    pairs = [
        _pair(found, metric, base=names[0], other=name, order=i)
        for i, (found, name) in enumerate(zip(comparison, names[1:], strict=True))
    ]
    text = render(
        "comparison.html.j2",
        title=f"{', '.join(names[1:])} against {names[0]}",
        synthetic=any(_is_synthetic(found) for found in comparison),
        pairs=pairs,
        metric=metric,
        per_step=_per_step(comparison, metric, names),
        protocol=comparison[0].get("protocol"),
    )
    RunFolder(out.parent).save(out, text)
    return out


def _check(comparison: Sequence[Mapping[str, Any]]) -> None:
    if not comparison:
        raise DataError("a comparison report needs at least one comparison.")
    for i, found in enumerate(comparison):
        missing = [name for name in _NEEDED if name not in found]
        if missing:
            raise DataError(f"comparison {i} lacks {missing}.")
        if found["metric"] != comparison[0]["metric"]:
            raise DataError(
                f"comparison {i} is of {found['metric']}, the first of {comparison[0]['metric']}."
            )


def _is_synthetic(found: Mapping[str, Any]) -> bool:
    """Return whether tasks are drawn: regression is, and embedded images say so in their domain names."""
    return found["metric"] == "mse" or any(d.startswith("synthetic-") for d in found["per_domain"])


def _pair(found: Mapping[str, Any], metric: Metric, *, base: str, other: str, order: int) -> Pair:
    domains = found["per_domain"] if len(found["per_domain"]) > 1 else {}
    groups = {"all tasks": found["difference"]} | dict(domains)
    sides = tuple(f"{name} better" for name in side_names([found]))
    left, right = sides if metric.higher_is_better else sides[::-1]
    rows = [_row(name, row, metric) for name, row in groups.items()]
    shown = [
        Interval(
            name,
            metric.scale * row["difference"]["value"],
            _scaled(row["difference"]["low"], metric),
            _scaled(row["difference"]["high"], metric),
            strong=i == 0,
        )
        for i, (name, row) in enumerate(groups.items())
    ]
    alt = "; ".join(f"{row['name']}: {row['value']} {row['interval']}" for row in rows)
    return Pair(
        title=f"{other} minus {base}",
        verdict=_verdict(found, metric, base=base, other=other),
        steps=unequal_steps(found, base=base, other=other),
        rows=rows,
        forest=forest(
            shown,
            name=f"forest-{order}",
            alt=f"{other} minus {base}. {alt}.",
            x=metric.difference,
            zero=True,
            sides=(left, right),
        ),
        seeds=_over_seeds(found, metric),
        sides=[_side(found[key], name, metric) for key, name in (("base", base), ("other", other))],
        found=found,
    )


def _row(name: str, row: Mapping[str, Any], metric: Metric) -> dict[str, Any]:
    difference = row["difference"]
    return {
        "name": name,
        "value": metric.write(difference["value"], sign=True),
        "interval": metric.interval(difference["low"], difference["high"], sign=True),
        "p": p_value(row["p_value"]),
        "wins": f"{row['wins']} / {row['ties']} / {row['losses']}",
    }


def _verdict(found: Mapping[str, Any], metric: Metric, *, base: str, other: str) -> str:
    """Say what the widest interval at hand allows to say."""
    several = "over_seeds" in found
    shown = found["over_seeds"]["both"] if several else found["difference"]["difference"]
    low, high = shown["low"], shown["high"]
    scope = "over seeds and tasks" if several else "over tasks, one training seed"
    verdict = "The difference is not significant"
    if low is not None and high is not None and not low <= 0 <= high:
        ahead = (low > 0) == metric.higher_is_better
        verdict = f"{other} is better than {base}" if ahead else f"{base} is better than {other}"
    difference = metric.write(shown["value"], sign=True)
    return f"{verdict}: {difference} {metric.interval(low, high, sign=True)}, {scope}."


def _over_seeds(found: Mapping[str, Any], metric: Metric) -> list[tuple[str, str, str]]:
    words = {
        "both": "new seeds and new tasks (random effects)",
        "bootstrap": "new seeds and new tasks (bootstrap)",
        "over_seeds": "new seeds, these tasks",
        "over_tasks": "these seeds, new tasks",
    }
    rows = found.get("over_seeds", {})
    return [
        (
            word,
            metric.write(rows[key]["value"], sign=True),
            metric.interval(rows[key]["low"], rows[key]["high"], sign=True),
        )
        for key, word in words.items()
        if key in rows
    ]


def _side(side: Mapping[str, Any], name: str, metric: Metric) -> dict[str, Any]:
    return {
        "name": name,
        "mean": metric.write(side["mean"]),
        "runs": [place(str(run)) for run in side.get("runs", [])],
        "seeds": side.get("train_seeds", []),
        **cost_of(side),
    }


def _per_step(
    comparison: Sequence[Mapping[str, Any]], metric: Metric, names: Sequence[str]
) -> Markup:
    means = [comparison[0]["per_step"][0], *(found["per_step"][1] for found in comparison)]
    shown = [
        Line(
            name,
            list(range(len(values))),
            [metric.scale * v for v in values],
            marked=True,
            colour=7 if i == 0 else i - 1,
        )
        for i, (name, values) in enumerate(zip(names, means, strict=True))
    ]
    alt = "; ".join(f"{line.label}: {number(line.y[0])} to {number(line.y[-1])}" for line in shown)
    return lines(
        shown,
        name="per-step",
        alt=f"{metric.unit} after each inner step. {alt}.",
        x="inner step",
        y=metric.unit,
        log=not metric.higher_is_better and wide_range(shown),
        whole=True,
    )


def _scaled(end: float | None, metric: Metric) -> float | None:
    return None if end is None else metric.scale * end
