"""The speed page is made of the records, and says so when it is not."""

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "page.py"
PAGE = runpy.run_path(str(SCRIPT))


@pytest.fixture
def records():
    return PAGE["read_records"]()


def test_page_and_figures_are_those_of_the_records(records):
    assert PAGE["check"](records) == []


def test_a_record_that_changed_is_noticed(records):
    rows = records["memory"]["cases"]["shares of the step"]["rows"]
    rows["maml"]["wall"]["median"] *= 1.01
    assert PAGE["check"](records) == ["speed.md", "speed-sizes.svg", "speed-memory.svg"]


def test_every_variant_of_every_case_is_on_the_page(records):
    text = PAGE["PAGE"].read_text()
    for case in records["step"]["cases"].values():
        for name, row in case.get("rows", {}).items():
            assert name in text
            shown = row.get("cost", row["speed"])  # methods are told by what they cost
            assert f"({shown['min']:.2f} to {shown['max']:.2f})" in text


def test_records_hold_no_paths_and_say_where_they_come_from(records):
    for name, record in records.items():
        what = "memory --slots" if name == "simulation" else name
        assert record["what"] == f"torchemo bench {what}"
        assert record["environment"]["torch"]["version"]
        words = json.dumps({k: v for k, v in record.items() if k != "environment"})
        assert "/root" not in words
        assert "/home" not in words
