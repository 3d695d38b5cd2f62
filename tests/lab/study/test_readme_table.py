"""The table of README shows what was recorded."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROWS = {
    ("curves", "offsets"): ("R2-cpu-regression", "-offsets"),
    ("images, 4 datasets", "offsets"): ("R7-cpu-pictures", "-offsets"),
    ("images, the same", "EMO (`-emo`)"): ("T1-cpu-pictures", "-emo"),
    ("images, the same", "paper, mixed reductions"): ("T1-cpu-pictures", "-emo-mixed"),
}
"""Beginning of a row and its memory, and which record and cells they stand for."""


def shown(row):
    """Return the cells of the row that begins so, under the three learners."""
    tasks, memory = row
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    (line,) = (x for x in lines if x.startswith(f"| {tasks}") and f"| {memory} |" in x)
    return [cell.strip() for cell in line.strip("|").split("|")][2:]


def recorded(record, kind, learner):
    """Return what a record has of a learner with memory against the learner; None if it was not run."""
    contrasts = json.loads((ROOT / "studies" / f"{record}.json").read_text())["contrasts"]
    name = f"{learner}{kind} vs {learner}"
    return next((c for c in contrasts if c["name"] == name and c["test"] is None), None)


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_every_cell_is_the_recorded_one(row):
    record, kind = ROWS[row]
    for cell, learner in zip(shown(row), ("maml", "anil", "meta-sgd"), strict=True):
        found = recorded(record, kind, learner)
        if found is None:
            assert cell == "not run"
            continue
        both = found["over_seeds"]["both"]
        relative = "%" in cell
        value = 100 * (found["relative"] if relative else both["value"])
        written = float(re.match(r"[−+]\d+(\.\d)?", cell)[0].replace("−", "-"))
        assert written == pytest.approx(value, abs=0.501 if relative else 0.0501)
        assert ("not significant" in cell) == (both["low"] <= 0 <= both["high"])
