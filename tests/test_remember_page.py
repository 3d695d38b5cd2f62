"""docs/remember.md: its commands exist, its table is that of the record, and so is what its words say."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from torchemo.apps.cli import _parse

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "remember.md").read_text()
RECORD = json.loads((ROOT / "benchmarks" / "results" / "remember.json").read_text())
VISITS = json.loads((ROOT / "benchmarks" / "results" / "returning.json").read_text())
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"(?m)^\$ (torchemo .+)$", PAGE)]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_what_is_typed_is_understood(words):
    assert callable(_parse(words).run)


def test_the_table_is_that_of_the_record():
    spec = importlib.util.spec_from_file_location("study", ROOT / "benchmarks" / "remember.py")
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    shown = PAGE.split(study.BEGIN)[1].split(study.END)[0].strip()
    assert shown == study.table(RECORD)


def test_what_is_said_about_the_table_holds():
    for found in RECORD["sets"].values():
        last = {name: row["accuracy"][-1] for name, row in found["methods"].items()}
        gain = {name: row["gain"] for name, row in found["methods"].items()}
        assert gain["store"]["low"] > 0
        assert abs(last["store"] - last["joined path"]) <= 0.205
        assert last["clip 20"] == last["store"]
        assert last["clip 10"] - last["clip 10, noise 0.01"] <= 0.205
        assert gain["clip 10, noise 0.1"]["low"] < 0
        norms = [run["norm of the first gradient"] for run in found["runs"]]
        assert min(norms) >= 3.5
        assert max(norms) <= 11.5


def test_accuracy_by_visit_is_that_of_the_record():
    for words, key in (("with the store", "with store"), ("without", "without")):
        cells = " | ".join(f"{value:.1f}" for value in VISITS[key])
        assert f"| {words} | {cells} |" in PAGE
    gain = VISITS["gain at the last visit"]
    assert f"{gain['value']} points [{gain['low']}, {gain['high']}]" in PAGE
