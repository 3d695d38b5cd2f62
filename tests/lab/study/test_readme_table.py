"""The tables of README and the findings that people wrote have what was recorded."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FINDINGS = "docs/findings.md"
ROWS = {
    ("README.md", "curves", "offsets"): ("R2-cpu-regression", "-offsets"),
    ("README.md", "images, 4 datasets", "offsets"): ("R7-cpu-images", "-offsets"),
    ("README.md", "images, the same", "EMO (`-emo`)"): ("T1-cpu-images", "-emo"),
    ("README.md", "images, the same", "paper, mixed reductions"): ("T1-cpu-images", "-emo-mixed"),
    (FINDINGS, "curves: change of error", "offsets"): ("R2-cpu-regression", "-offsets"),
    (FINDINGS, "curves: change of error", "mixed"): ("T1-cpu-regression", "-emo-mixed"),
    (FINDINGS, "images: change of accuracy", "offsets"): ("R7-cpu-images", "-offsets"),
    (FINDINGS, "images: change of accuracy", "`-emo`"): ("T1-cpu-images", "-emo"),
    (FINDINGS, "images: change of accuracy", "mixed"): ("T1-cpu-images", "-emo-mixed"),
}
"""Page, beginning of a row and its memory, and which record and cells they stand for."""


def shown(row):
    """Return the cells of the row that begins so, under the three learners."""
    page, tasks, memory = row
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    (line,) = (x for x in lines if x.startswith(f"| {tasks}") and f"| {memory} |" in x)
    return [cell.strip() for cell in line.strip("|").split("|")][2:5]


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
        if found["diverged"]:
            assert cell == "diverges"
            continue
        both = found["over_seeds"]["both"]
        relative = "%" in cell
        value = 100 * (found["relative"] if relative else both["value"])
        written = re.match(r"[−+]\d+(\.\d+)?", cell)[0].replace("−", "-")
        digits = len(written.partition(".")[2])
        assert float(written) == pytest.approx(value, abs=0.501 * 10**-digits)
        assert ("not significant" in cell) == (both["low"] <= 0 <= both["high"])


VISITS = {
    "no memory": "ANIL, no memory",
    "EMO, classes found by name": "ANIL, found by class names",
    "replay of all images of the task": "· ANIL, replay of all images",
    "running class means, by name": "ANIL, class means alone, by names",
}
"""Rows of README about tasks that come back, and what they are called beside the record."""


@pytest.mark.parametrize("row", VISITS)
def test_tasks_that_come_back_have_the_accuracy_of_their_page(row):
    """That page is made from the record, which its own test checks."""
    readme, page = (
        [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
        for text in ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/lifelong.md"))
    )
    (shown,) = (cells[1:] for cells in readme if cells[0] == row)
    fifth = next(cells[1:] for cells in page if cells[0] == VISITS[row] and len(cells) == 5)
    assert shown == [f"{float(value):.1f}" for value in fifth]


def test_gains_from_images_alone_are_as_recorded():
    record = json.loads((ROOT / "studies/L8-cpu-features.json").read_text())
    gains = {c["name"]: 100 * (c["means"][0] - c["means"][1]) for c in record["contrasts"]}
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = re.search(r"birds gain ([\d.]+) points, aircraft ([\d.]+) and flowers ([\d.]+);", text)
    for world, value in zip(
        ("birds84", "aircraft84_47classes", "flowers84"), said.groups(), strict=True
    ):
        assert value == f"{gains[f'anil {world} shares vs none']:.1f}"
