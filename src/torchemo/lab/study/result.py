"""What a study found: every cell, every contrast, and the scores of every task beside them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from torchemo.core.errors import DataError
from torchemo.core.stats import mean_interval, paired_difference, seeds_by_tasks
from torchemo.lab.study.entry import Cell, Contrast
from torchemo.lab.study.job import read_json
from torchemo.lab.study.streams.visits import mean_rates
from torchemo.lab.study.verdict import verdict_of
from torchemo.report.figures import smooth
from torchemo.report.run.collect import best_validation, curve
from torchemo.runs import events as event_log
from torchemo.runs.folder import RunFolder

DIGITS = 4
"""Digits that are kept of a task's score."""
CURVES = "curves.json"
"""Recorded curves of a run that was restored."""


class TaskScores(NamedTuple):
    """Scores of a cell on one task set.

    Attributes:
        metric: accuracy or mse.
        domains: Names of the domains.
        domain: Domain of each task.
        scores: After 0, 1, ..., S inner steps, for every training seed.
        data: Fingerprint of the data the tasks were drawn from; None where a record does not have it.
        recalled: Share of the tasks that used their recall, over all seeds; None where no task may skip it.
        visits: What was noted of tasks that come back, by visit: classes known, found, rightly so.
    """

    metric: str
    domains: tuple[str, ...]
    domain: Int[np.ndarray, " task"]
    scores: Float[np.ndarray, "seed task step"]
    data: str | None = None
    recalled: float | None = None
    visits: Mapping[str, Any] | None = None


class CellRuns(NamedTuple):
    """A cell with the runs that stand for it: their folders, one per seed, and what each was tested on.

    Attributes:
        cell: The cell.
        seeds: Training seed of each run.
        folders: Folder of each run.
        files: Task set -> file of the scores in each folder.
        rates: The rates that were chosen.
        tried: Every point of the grid with its validation score; None where it diverged.
    """

    cell: Cell
    seeds: tuple[int, ...]
    folders: tuple[Path, ...]
    files: Mapping[str, str]
    rates: tuple[str, ...]
    tried: tuple[tuple[tuple[str, ...], float | None], ...]


def read_scores(runs: CellRuns, world: str) -> TaskScores | None:
    """Read the scores of a cell; None if one of its runs has none.

    What a cell learns on is shown after every inner step, further tests after the last alone.
    """
    records = [read_json(folder / runs.files[world]) for folder in runs.folders]
    found = [record for record in records if record is not None and "diverged" not in record]
    if not found or len(found) < len(records):
        return None
    shown = slice(None) if world == runs.cell.world else slice(-1, None)
    by_seed = [
        TaskScores(
            record["metric"],
            tuple(record["domains"]),
            np.array(record["domain"], dtype=np.int64),
            np.array([[row[shown] for row in record["per_task"]]], dtype=np.float64),
            record.get("data"),
        )
        for record in found
    ]
    for other in by_seed[1:]:
        check_same_tasks(by_seed[0], other, what=f"{runs.cell.name} on {world}, two seeds")
    whole = np.concatenate([one.scores for one in by_seed])
    known = next((one.data for one in by_seed if one.data is not None), None)
    shares = [record.get("recalled") for record in found]
    recalled = None if None in shares else _mean(shares)
    noted = mean_rates(found) if "visits" in found[0] else None
    return by_seed[0]._replace(scores=whole, data=known, recalled=recalled, visits=noted)


def check_same_tasks(first: TaskScores, second: TaskScores, *, what: str) -> None:
    """Refuse to set scores of different tasks against each other."""
    same = (
        first.metric == second.metric
        and np.array_equal(first.domain, second.domain)
        and (first.data == second.data or None in (first.data, second.data))
    )
    if not same:
        raise DataError(
            f"{what}: the scores are not of the same test tasks.",
            hint="The data have changed between two runs: use another folder (--out).",
        )


def diverged(runs: CellRuns, world: str) -> bool:
    """Return whether a run of a cell diverged, in training or on these test tasks."""
    for folder in runs.folders:
        ended = read_json(folder / "done.json") or {}
        scored = read_json(folder / runs.files[world]) or {}
        if ended.get("ended") == "diverged" or "diverged" in scored:
            return True
    return False


def describe_cell(runs: CellRuns, scores: Mapping[str, TaskScores]) -> dict[str, Any]:
    """Return everything about a cell that fits on a page."""
    cell = runs.cell
    ended = [read_json(folder / "done.json") or {} for folder in runs.folders]
    shared = cell.visits is not None and cell.of is not None
    return {
        "name": cell.name,
        "title": cell.title,
        "role": cell.role,
        "of": cell.of,
        "world": cell.world,
        "preset": cell.preset,
        "variant": cell.variant,
        "options": list(cell.options),
        "rates": list(runs.rates),
        "tried": [{"rates": list(rates), "validation": score} for rates, score in runs.tried],
        "runs": [
            {
                "id": folder.name,
                "seed": seed,
                "ended": end.get("ended", "not run"),
                "best_step": end.get("best_step"),
                "best_score": end.get("best_score"),
                "cpu_seconds": end.get("cpu_seconds"),
            }
            for folder, seed, end in zip(runs.folders, runs.seeds, ended, strict=True)
        ],
        "tests": {world: _summary(found) for world, found in scores.items()},
        "recall": _recall(runs.folders),
        "curve": _curves(runs.folders[0]) if runs.folders and not shared else None,
        "cost": read_json(runs.folders[0] / "cost.json") if runs.folders else None,
        **_visits(cell),
    }


def _visits(cell: Cell) -> dict[str, Any]:
    """Return what a cell does with tasks that come back, if it is tested on these."""
    return {} if cell.visits is None else {"visits": asdict(cell.visits), "report": cell.report}


def describe_contrast(contrast: Contrast, first: TaskScores, second: TaskScores) -> dict[str, Any]:
    """Compare two cells on the same tasks: over tasks, per domain, over seeds."""
    check_same_tasks(first, second, what=contrast.name)
    a = first.scores[:, :, -1 if contrast.step is None else contrast.step]
    b = second.scores[:, :, -1 if contrast.against_step is None else contrast.against_step]
    seeds, d = len(a), a - b
    paired = paired_difference(a.mean(0), b.mean(0))
    found: dict[str, Any] = {
        **_named(contrast),
        "metric": first.metric,
        "means": [float(a.mean()), float(b.mean())],
        "relative": float(a.mean() / b.mean() - 1) if b.mean() else None,
        "median": paired.median,
        "tasks": int(d.shape[1]),
        "seeds": seeds,
        "over_tasks": paired.difference.to_dict(),
        "p_value": paired.p_value,
        "per_domain": _per_domain(d.mean(0), first),
    }
    if seeds > 1:
        found["over_seeds"] = seeds_by_tasks(d, resamples=999).to_dict()
    found["verdict"] = verdict_of(found)
    return found


def describe_diverged(
    contrast: Contrast, who: Sequence[str], *, at_home: Sequence[str] = ()
) -> dict[str, Any]:
    """Say that a contrast has no numbers because these cells diverged, where they were trained or not."""
    found = {**_named(contrast), "diverged": list(who), "diverged_at_home": list(at_home)}
    return {**found, "verdict": verdict_of(found)}


def _named(contrast: Contrast) -> dict[str, Any]:
    return {
        "name": contrast.name,
        "cell": contrast.cell,
        "against": contrast.against,
        "test": contrast.test,
        "expect": contrast.expect,
        "claims": list(contrast.claims),
        "paper": contrast.paper,
        "diverged": [],
    }


def save_scores(path: Path, scores: Mapping[str, TaskScores]) -> None:
    """Write the scores of all tasks, ``cell|task set`` -> ``[seed, task, step]``, rounded to four digits."""
    arrays: dict[str, np.ndarray] = {}
    for name, found in scores.items():
        arrays[name] = _rounded(found.scores)
        domain = found.domain.astype(np.int16)
        usual = arrays.setdefault(f"domain|{name.split('|', 1)[1]}", domain)
        if not np.array_equal(
            usual, domain
        ):  # cells with tasks of their own, such as other streams
            arrays[f"domain|{name}"] = domain
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        np.savez_compressed(stream, allow_pickle=False, **arrays)


def _rounded(values: np.ndarray) -> np.ndarray:
    """Keep four digits that matter: noise below them does not compress."""
    with np.errstate(divide="ignore"):
        size = np.floor(np.log10(np.abs(values)))
    scale = 10.0 ** (DIGITS - 1 - np.where(np.isfinite(size), size, 0))
    rounded: np.ndarray = (np.round(values * scale) / scale).astype(np.float32)
    return rounded


def _summary(found: TaskScores) -> dict[str, Any]:
    last = found.scores[:, :, -1]
    return {
        "metric": found.metric,
        "domains": list(found.domains),
        "tasks": int(last.shape[1]),
        "mean": mean_interval(last.mean(0)).to_dict(),
        "median": float(np.median(last)),
        "recalled": found.recalled,
        **({} if found.visits is None else {"visits": found.visits}),
        "seed_means": [float(v) for v in last.mean(1)],
        "per_step": [float(v) for v in found.scores.mean((0, 1))],
        "per_domain": {
            found.domains[d]: mean_interval(last.mean(0)[found.domain == d]).to_dict()
            for d in sorted(set(found.domain.tolist()))
            if d >= 0
        },
    }


def _per_domain(d: np.ndarray, scores: TaskScores) -> dict[str, Any]:
    zeros = np.zeros_like(d)
    return {
        scores.domains[i]: paired_difference(
            d[scores.domain == i], zeros[scores.domain == i], resamples=99
        ).difference.to_dict()
        for i in sorted(set(scores.domain.tolist()))
        if i >= 0 and (scores.domain == i).sum() > 1
    }


def _recall(folders: Sequence[Path]) -> dict[str, Any] | None:
    """Average what the recalls of a cell's runs were worth."""
    found = [r for r in (read_json(folder / "recall.json") for folder in folders) if r is not None]
    found = [r for r in found if r["tasks"]]
    if not found:
        return None
    names = ("chance", "same_domain", "cosine", "norm_ratio", "age", "distance", "slots_in_use")
    means = {name: _mean([r.get(name) for r in found]) for name in names}
    tensors = {
        name: {t: _mean([r[name].get(t) for r in found]) for t in found[0][name]}
        for name in ("cosine_by_tensor", "norm_ratio_by_tensor", "gate_by_tensor")
        if all(name in r for r in found)  # few have gates
    }
    return {**means, **tensors}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(sum(known) / len(known), 6) if known else None


def _curves(folder: Path) -> dict[str, Any] | None:
    """Return the first run's training loss in windows and its validations, with seconds since its start.

    A run that was restored has no events but the curves that were recorded of it.
    """
    log = RunFolder(folder).events
    if not log.exists():
        return read_json(folder / CURVES)
    events = event_log.read(log)
    losses = curve(events, "step", "loss")
    scores = curve(events, "validation", "score")
    best = best_validation(events)
    if not losses.values:
        return None
    windows = smooth(losses)
    began = float(events[0]["time"])
    times = [float(e["time"]) - began for e in events if e["event"] == "validation"]
    return {
        "loss": [[round(x, 1), round(y, 5)] for x, y in zip(windows.x, windows.y, strict=True)],
        "validation": [
            [step, round(score, 5), round(seconds, 1)]
            for step, score, seconds in zip(scores.steps, scores.values, times, strict=False)
        ],
        "best_step": None if best is None else best.step,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result for people and machines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
