"""From a record back to runs: a study goes on where it was recorded, on another machine too."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchemo.errors import DataError
from torchemo.study.entry import Cell
from torchemo.study.job import read_json
from torchemo.study.result import CURVES, CellRuns, write_json
from torchemo.study.run import StudyRun


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

    Raises:
        DataError: The scores are not there.
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
            why = _why_not(run, cells.get(name), recorded, arrays)
            if why is None:
                _restore_cell(run, cells[name], recorded, arrays)
                taken.append(name)
            else:
                left[name] = why
    return Restored(tuple(taken), left)


def _why_not(
    run: StudyRun, cell: Cell | None, recorded: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> str | None:
    if cell is None:
        return "the study has no such cell any more"
    runs = _runs(run, cell, recorded)
    if [folder.name for folder in runs.folders] != [one["id"] for one in recorded["runs"]]:
        return "its configuration has changed since"
    for world in runs.files:
        summary = recorded["tests"].get(world)
        if summary is None:
            return f"it has no scores on {world}"
        if arrays[f"{cell.name}|{world}"].shape[-1] != len(summary["per_step"]):
            return "of its scores the last inner step alone was kept"
    recalled = _recalled(recorded, run.study.scale.diagnosed)
    if cell.role != "base" and any(_is_other(folder, recalled) for folder in runs.folders):
        return "a study with other seeds has come back; choose a folder of its own (--out)"
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
        ended = {"ended": "finished" if score is not None else "diverged", "best_score": score}
        if rates != runs.rates:
            _write(run.runs_of(cell, rates, seeds=runs.seeds[:1]).folders[0], {"done.json": ended})
    for i, (folder, about) in enumerate(zip(runs.folders, recorded["runs"], strict=True)):
        score = about.get("best_score") if i else tried.get(runs.rates, about.get("best_score"))
        files: dict[str, Any] = {"done.json": {**about, "best_score": score}}
        for world, file in runs.files.items():
            scores = arrays[f"{cell.name}|{world}"][i]
            domain = arrays[f"domain|{world}"]
            files[file] = _scored(recorded["tests"][world], scores, domain)
        if cell.role != "base":
            files["recall.json"] = _recalled(recorded, run.study.scale.diagnosed)
        if i == 0 and recorded["curve"] is not None:
            files[CURVES] = recorded["curve"]
        _write(folder, files)


def _recalled(recorded: Mapping[str, Any], tasks: int) -> dict[str, Any]:
    """Let the mean over all runs stand for each; a control without memory recalls nothing."""
    recall = recorded["recall"]
    return {"tasks": 0} if recall is None else {"tasks": tasks, **recall}


def _is_other(folder: Path, recalled: Mapping[str, Any]) -> bool:
    """Whether a run came back from the record of other seeds: what it recalled is a mean over those."""
    known = read_json(folder / "recall.json")
    return known not in (None, recalled) and not _is_run(folder)


def _scored(summary: Mapping[str, Any], scores: np.ndarray, domain: np.ndarray) -> dict[str, Any]:
    about = {name: summary[name] for name in ("metric", "domains")}
    # As they were written, with four digits: float32 would print more.
    rows = [[float(f"{score:.4g}") for score in row] for row in scores.tolist()]
    return {**about, "domain": domain.tolist(), "per_task": rows}


def _write(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write what was recorded of a run; a run that is there needs none of it."""
    if _is_run(folder):
        return
    there = read_json(folder / "done.json")
    for name, content in files.items():
        ended = name == "done.json"
        if there is None or not ended or content.get("best_score") is not None:
            write_json(folder / name, {**content, "restored": True} if ended else content)


def _is_run(folder: Path) -> bool:
    there = read_json(folder / "done.json")
    return there is not None and not there.get("restored")
