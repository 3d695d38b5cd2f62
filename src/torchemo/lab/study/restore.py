"""From a record back to runs: a study continues where it was recorded, on another machine too."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchemo.core.errors import DataError
from torchemo.lab.study.entry import Cell
from torchemo.lab.study.job import read_json
from torchemo.lab.study.plan import Study
from torchemo.lab.study.result import CURVES, CellRuns, write_json
from torchemo.lab.study.run import StudyRun
from torchemo.lab.study.scales import ONCE, SEEN
from torchemo.lab.study.streams.visits import Streams, Visits
from torchemo.runs.folder import RunFolder


class Restored(NamedTuple):
    """What came back.

    Attributes:
        cells: Names of the cells whose runs need not be trained again.
        left: Name of every other cell, and why not.
    """

    cells: tuple[str, ...]
    left: Mapping[str, str]


def restore(run: StudyRun, record: Mapping[str, Any], scores: Path) -> Restored:
    """Put what was recorded of each run where the run would be, unless it is there.

    A cell comes back only if its runs would be named as they were: by the same configuration, data sets
    and seeds. Its checkpoints do not; whoever asks for more than was recorded has it trained anew.

    Args:
        run: The study as it would be run now, with the seeds of the record.
        record: The recorded result.
        scores: The recorded scores of its tasks.
    """
    if not scores.is_file():
        raise DataError(
            f"{scores} is not there: without the scores of tasks nothing can be restored."
        )
    run.open_data()
    cells = {cell.name: cell for cell in run.study.available}
    taken, left = [], {}
    with np.load(scores) as arrays:
        for recorded in record["cells"]:
            name = recorded["name"]
            why = _why_not(run, cells.get(name), recorded, record["worlds"], arrays)
            if why is None:
                _restore_cell(run, cells[name], recorded, arrays)
                taken.append(name)
            else:
                left[name] = why
    return Restored(tuple(taken), left)


def _plain(visits: Visits) -> dict[str, Any]:
    """Return what a cell does as a record has it: with lists where there are tuples."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(visits)))
    return found


def _filled(recorded: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what a cell did; options that its record does not know yet were as they are by default."""
    return None if recorded is None else _plain(Visits(Streams())) | dict(recorded)


def _why_not(
    run: StudyRun,
    cell: Cell | None,
    recorded: Mapping[str, Any],
    worlds: Mapping[str, list[str]],
    arrays: Mapping[str, np.ndarray],
) -> str | None:
    if cell is None:
        return "the study has no such cell any more"
    runs = _runs(run, cell, recorded)
    if [one["id"] for one in recorded["runs"]] != [folder.name for folder in runs.folders]:
        return "its configuration has changed since"
    now = (None if cell.visits is None else _plain(cell.visits), cell.report)
    if (_filled(recorded.get("visits")), recorded.get("report", cell.report)) != now:
        return "what it does with tasks that come back has changed since"
    for world in runs.files:
        summary = recorded["tests"].get(world)
        if summary is None:
            return f"it has no scores on {world}"
        fits = cell.visits is not None or summary["tasks"] == run.study.scale.test_tasks
        if not fits or not _same_sets(run, world, worlds):
            return "the test tasks have changed since"
        whole = arrays[f"{cell.name}|{world}"].shape[-1] == len(summary["per_step"])
        if not whole and _looks_at_steps(run.study, cell):
            return "of its scores the last inner step alone was kept"
    if recorded["recall"] is not None and _mixes(runs, recorded, run.study.scale.diagnosed):
        return "its recalls are a mean over seeds of which some are there; use a folder of its own (--out)"
    return None


def _runs(run: StudyRun, cell: Cell, recorded: Mapping[str, Any]) -> CellRuns:
    seeds = tuple(one["seed"] for one in recorded["runs"])
    return run.runs_of(cell, tuple(recorded["rates"]), seeds=seeds)


def _restore_cell(
    run: StudyRun, cell: Cell, recorded: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    tried = {tuple(one["rates"]): one["validation"] for one in recorded["tried"]}
    runs = _runs(run, cell, recorded)
    for rates, score in tried.items():
        if rates != runs.rates:
            _restore_tried(run.runs_of(cell, rates, seeds=runs.seeds), score, tried[runs.rates])
    for i, (folder, about) in enumerate(zip(runs.folders, recorded["runs"], strict=True)):
        score = about.get("best_score") if i else tried.get(runs.rates, about.get("best_score"))
        files: dict[str, Any] = {"done.json": {**about, "best_score": score}}
        for world, file in runs.files.items():
            scores = arrays[f"{cell.name}|{world}"][i]
            summary = recorded["tests"][world]
            domain = _domain(arrays, f"{cell.name}|{world}", summary, len(scores))
            files[file] = _scored(summary, scores, domain)
        if cell.visits is None:
            # Of a base learner too: it is the control without memory of a cell that is new.
            files["recall.json"] = _recalled(recorded, run.study.scale.diagnosed)
        if i == 0 and recorded["curve"] is not None:
            files[CURVES] = recorded["curve"]
        _write(folder, files)


def _same_sets(run: StudyRun, world: str, worlds: Mapping[str, list[str]]) -> bool:
    """Return whether a task set has the datasets it had; seen classes are those of the cell's own set."""
    return world in (SEEN, ONCE) or worlds.get(world) == list(run.study.scale.worlds[world])


def _looks_at_steps(study: Study, cell: Cell) -> bool:
    """Return whether a study shows a cell after fewer inner steps than all, which large records leave out."""
    drawn = (c for c in study.contrasts if cell.name in (c.cell, c.against))
    return study.entry.figure in ("steps", "visits") or any(
        (c.step, c.against_step) != (None, None) for c in drawn
    )


def _recalled(recorded: Mapping[str, Any], tasks: int) -> dict[str, Any]:
    """Let the mean over all runs stand for each; a control without memory recalls nothing."""
    recall = recorded["recall"]
    return {"tasks": 0} if recall is None else {"tasks": tasks, **recall}


def _mixes(runs: CellRuns, recorded: Mapping[str, Any], tasks: int) -> bool:
    """Return whether some of the runs have recalls of their own, or the mean over other seeds."""
    known = [read_json(folder / "recall.json") for folder in runs.folders]
    there = [_is_run(folder) for folder in runs.folders]
    ours = _recalled(recorded, tasks)
    others = (
        one not in (None, ours) for one, is_run in zip(known, there, strict=True) if not is_run
    )
    return any(others) or (any(there) and not all(there))


def _restore_tried(runs: CellRuns, score: float | None, chosen: float | None) -> None:
    """Put back rates that were not chosen; better ones were given up, as a run of another seed diverged."""
    diverged = {"ended": "diverged", "why": "given up when it was recorded"}
    first = diverged if score is None else {"ended": "finished", "best_score": score}
    _write(runs.folders[0], {"done.json": first})
    if score is not None and chosen is not None and score > chosen:
        for folder in runs.folders[1:]:
            _write(folder, {"done.json": diverged})


def _domain(
    arrays: Mapping[str, np.ndarray], name: str, summary: Mapping[str, Any], tasks: int
) -> np.ndarray:
    """Return the domain of each task of a cell."""
    usual = f"domain|{name.split('|', 1)[1]}"
    found = arrays[f"domain|{name}" if f"domain|{name}" in arrays else usual]
    if len(found) == tasks:
        return found
    if len(summary["domains"]) > 1:
        raise DataError(f"{name}: the domains of its tasks were not recorded.")
    # Earlier records have the domains of one cell alone, whatever tasks the others have.
    return np.zeros(tasks, dtype=np.int16)


def _scored(summary: Mapping[str, Any], scores: np.ndarray, domain: np.ndarray) -> dict[str, Any]:
    about = {name: summary[name] for name in ("metric", "domains")}
    # As they were written, with four digits: float32 would print more.
    rows = [[float(f"{score:.4g}") for score in row] for row in scores.tolist()]
    about["recalled"] = summary.get("recalled")  # the mean over all runs, for each
    if "visits" in summary:
        about["visits"] = summary["visits"]
    return {**about, "domain": domain.tolist(), "per_task": rows}


def _write(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write what was recorded of a run, beside what came back of it before; a run needs none of it."""
    if _is_run(folder):
        return
    for name, content in files.items():
        if name == "done.json":
            known = {key: value for key, value in content.items() if value is not None}
            content = {**(read_json(folder / name) or {}), **known, "restored": True}
        write_json(folder / name, content)


def _is_run(folder: Path) -> bool:
    """Return whether there is a run, ended or not, and not what was recorded of one."""
    return RunFolder(folder).config.exists()
