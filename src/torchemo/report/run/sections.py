"""The sections of a run's report: what was found, as figures and rows of tables."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from torchemo.config.registry import Part
from torchemo.config.run import RunConfig
from torchemo.config.toml import to_dict
from torchemo.core.stats import Estimate, mean_interval, median_interval
from torchemo.report.figures import (
    Interval,
    Line,
    forest,
    key_map,
    lines,
    smooth,
    task_curve,
    wide_range,
)
from torchemo.report.format import Metric, flat, memory_of, metric_of, number
from torchemo.report.run.collect import Curve, Result, RunFacts, best_validation, curve, metric_in
from torchemo.report.run.memory import MemoryView
from torchemo.report.run.samples import PictureSample, PointSample
from torchemo.runs.experiment import PARTS, complete, reduced

_ALL = "all tasks"
_ALL_COLOUR = 7


class Figure(NamedTuple):
    """A figure and what is said below it."""

    svg: Markup
    caption: str


class Row(NamedTuple):
    """A row of the table of results; numbers are written out."""

    name: str
    before: str
    mean: tuple[str, str]
    median: tuple[str, str]
    tasks: int


class ResultSection(NamedTuple):
    """One test result; ``skipped`` says how many tasks skip recall, if some do."""

    what: str
    metric: Metric
    steps: int
    step: int
    rows: list[Row]
    figures: list[Figure]
    skipped: str | None = None


class SampleSection(NamedTuple):
    """A sample task; tasks of points have a figure."""

    task: PictureSample | PointSample
    figure: Markup | None


def learning(facts: RunFacts) -> list[Figure]:
    """Return training loss and validation score over outer steps, as far as they were logged."""
    figures = []
    loss = curve(facts.events, "step", "loss")
    if loss.values:
        line = smooth(loss)
        svg = lines(
            [line],
            name="training-loss",
            alt=f"Training loss, from {_ends(line)}.",
            x="outer step",
            y="training loss",
            log=wide_range([line]),
        )
        caption = "Query loss of training tasks."
        if line.low is not None:
            caption = (
                "Query loss of training tasks: medians of windows, and where 80 % of the steps lie."
            )
        figures.append(Figure(svg, caption))
    validation = _validation(facts)
    return figures if validation is None else [*figures, validation]


def _validation(facts: RunFacts) -> Figure | None:
    metric, best = metric_in(facts.config), best_validation(facts.events)
    field = "accuracy" if metric.higher_is_better else "loss"
    score = curve(facts.events, "validation", field)
    if not score.values or best is None:
        return None
    values = [metric.scale * value for value in score.values]
    line = Line("", score.steps, values, marked=True, colour=2)
    svg = lines(
        [line],
        name="validation-score",
        alt=f"Validation {metric.name}, from {_ends(line)}.",
        x="outer step",
        y=metric.unit,
        log=not metric.higher_is_better and wide_range([line]),
        best=best.step,
    )
    tasks = facts.config.train.validation_tasks
    caption = f"Validation, always the same {tasks} tasks. The dashed line marks the best, step {best.step}."
    return Figure(svg, caption)


def result(found: Result, *, order: int) -> ResultSection:
    """Return a test result by domain and by inner step."""
    metric, steps = metric_of(found.metric), found.per_task.shape[1] - 1
    domains = found.by_domain
    groups = {_ALL: found.per_task, **(domains if len(domains) > 1 else {})}
    rows = [_row(name, scores, metric) for name, scores in groups.items()]
    return ResultSection(
        what=f"{found.split} tasks{'' if found.on is None else f' of {found.on}'},"
        f" {found.protocol} protocol, {found.statistics}",
        metric=metric,
        steps=steps,
        step=found.step,
        rows=rows,
        figures=_result_figures(groups, metric, steps=steps, order=order),
        skipped=_skipped(found),
    )


def _skipped(found: Result) -> str | None:
    if found.recalled is None or found.recalled == 1:
        return None
    by = ", ".join(f"{name} {100 * share:.0f} %" for name, share in found.skips.items())
    where = f" ({by})" if len(found.skips) > 1 else ""
    return f"{100 * (1 - found.recalled):.1f} % of the tasks skip recall{where}."


def _result_figures(
    groups: Mapping[str, np.ndarray], metric: Metric, *, steps: int, order: int
) -> list[Figure]:
    figures, mean = [], metric.mean.capitalize()
    if len(groups) > 1:
        when = f" after {steps} inner steps" if steps else ""
        caption = f"{mean}{when}, 95 % intervals over tasks."
        figures.append(Figure(_by_domain(groups, metric, name=f"result-{order}"), caption))
    if steps:
        caption = f"{mean} after every inner step; band: 95 % interval over all tasks."
        figures.append(Figure(_by_step(groups, metric, name=f"per-step-{order}"), caption))
    return figures


def _row(name: str, scores: np.ndarray, metric: Metric) -> Row:
    def cell(estimate: Estimate) -> tuple[str, str]:
        return metric.write(estimate.value), metric.interval(estimate.low, estimate.high)

    last = scores[:, -1]
    before = metric.write(float(scores[:, 0].mean()))
    return Row(name, before, cell(mean_interval(last)), cell(median_interval(last)), len(last))


def _by_domain(groups: Mapping[str, np.ndarray], metric: Metric, *, name: str) -> Markup:
    shown = []
    for label, scores in groups.items():
        found = mean_interval(scores[:, -1])
        low, high = (
            metric.scale * e if math.isfinite(e) else None for e in (found.low, found.high)
        )
        shown.append(Interval(label, metric.scale * found.value, low, high, strong=label == _ALL))
    alt = "; ".join(f"{row.label} {number(row.value)}" for row in shown)
    return forest(shown, name=name, alt=f"{metric.unit} by domain: {alt}.", x=metric.unit)


def _by_step(groups: Mapping[str, np.ndarray], metric: Metric, *, name: str) -> Markup:
    shown = []
    for i, (label, scores) in enumerate(groups.items()):
        means = [metric.scale * float(v) for v in scores.mean(0)]
        shown.append(Line(label, list(range(len(means))), means, marked=True, colour=i - 1))
    shown[0] = shown[0]._replace(colour=_ALL_COLOUR)
    scores = groups[_ALL]
    if len(scores) > 1:
        band = [mean_interval(column) for column in scores.T]
        low, high = ([metric.scale * getattr(e, end) for e in band] for end in ("low", "high"))
        shown[0] = shown[0]._replace(low=low, high=high)
    return lines(
        shown,
        name=name,
        alt=f"{metric.unit} of all tasks after each inner step, from {_ends(shown[0])}.",
        x="inner step",
        y=metric.unit,
        log=not metric.higher_is_better and wide_range(shown),
        whole=True,
    )


def turnover(facts: RunFacts) -> list[Figure]:
    """Return fill, age, likeness of domain and distance over time, as far as they were logged."""
    shown = [
        ("filled", "slots", "Slots in use."),
        ("age", "batches", "Age of what is recalled: batches since it was written."),
        ("same_domain", "%", "Recall weight on slots of the task's own domain."),
        ("distance", "distance", "Distance from a task's key to the keys it recalls."),
    ]
    memory = memory_of(facts.config)
    if memory is not None and memory.offsets_start:
        del shown[1]  # slots are seeded once: their age is the time
    figures = []
    for field, y, caption in shown:
        found = curve(facts.events, "step", field)
        if found.values:
            scale = 100.0 if field == "same_domain" else 1.0
            line = smooth(Curve(found.steps, [scale * v for v in found.values]), colour=4)
            alt = f"{caption} From {_ends(line)}."
            svg = lines([line], name=f"memory-{field}", alt=alt, x="outer step", y=y)
            figures.append(Figure(svg, caption))
    return figures


def memory_map(memory: MemoryView) -> Figure:
    """Return the map of the keys."""
    noted = any(slot.domain is not None for slot in memory.slots)
    colour = "domain of their task" if noted else "domain that recalls them most"
    size = "weight" if memory.recalls_are_equal else "recalls"
    caption = (
        f"Keys in the plane of their two principal components: {len(memory.slots)} slots (circles;"
        f" size: {size}; colour: {colour}) and {len(memory.task_domains)} validation tasks (dots)."
    )
    return Figure(key_map(memory, name="memory-map", alt=caption), caption)


def sample(task: PictureSample | PointSample, *, order: int) -> SampleSection:
    """Return a sample task."""
    if isinstance(task, PictureSample):
        return SampleSection(task, None)
    alt = (
        f"Task {task.number}, {task.domain}: support points, queries, and predictions; squared error"
        f" {number(task.errors[0])} before and {number(task.errors[-1])} after adaptation."
    )
    return SampleSection(task, task_curve(task, name=f"sample-{order}", alt=alt))


def changed_options(config: RunConfig) -> dict[str, str]:
    """Return the options that differ from the defaults, written out.

    Options of a part are compared with the defaults of this part.
    """
    parts: dict[str, Any] = {name: Part(getattr(config, name).name) for name in PARTS}
    default = flat(to_dict(complete(replace(RunConfig(), **parts))))
    default |= {f"{name}.name": getattr(RunConfig(), name).name for name in PARTS}
    chosen = flat(to_dict(reduced(config)))
    return {k: json.dumps(v) for k, v in chosen.items() if k not in default or v != default[k]}


def _ends(line: Line) -> str:
    return f"{number(line.y[0])} to {number(line.y[-1])}"
