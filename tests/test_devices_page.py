"""docs/devices.md: its table is that of the record."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "devices.md").read_text()
RECORD = json.loads((ROOT / "benchmarks" / "results" / "ranks.json").read_text())


def test_the_table_of_ranks_is_that_of_the_record():
    spec = importlib.util.spec_from_file_location("ranks", ROOT / "benchmarks" / "ranks.py")
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    shown = PAGE.split(study.BEGIN)[1].split(study.END)[0].strip()
    assert shown == study.table(RECORD)


def test_two_ranks_need_less_of_the_processor_each_than_one_process():
    ratios = RECORD["one_process_by_this"]["processor"]
    assert 1 < ratios["2 ranks"] <= 2
