"""docs/clusters.md: its commands are understood, its table is that of the record."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from torchemo.apps.cli import _parse
from torchemo.lab.study.engines import ENGINES
from torchemo.runs.storage import heartbeat

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "clusters.md").read_text()
RECORD = json.loads((ROOT / "benchmarks" / "results" / "engines.json").read_text())
COMMANDS = [
    shlex.split(line, comments=True)[1:] for line in re.findall(r"(?m)^    (torchemo .+)$", PAGE)
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_what_is_typed_is_understood(words):
    assert callable(_parse(words).run)


def test_the_table_is_that_of_the_record():
    spec = importlib.util.spec_from_file_location("engines", ROOT / "benchmarks" / "engines.py")
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    shown = PAGE.split(study.BEGIN)[1].split(study.END)[0].strip()
    assert shown == study.table(RECORD)


def test_all_engines_found_the_same_scores():
    for engines in RECORD["studies"].values():
        assert len(engines) > 1
        assert len({one["scores"] for one in engines.values()}) == 1
        assert len({one["runs"] for one in engines.values()}) == 1


def test_every_engine_and_every_option_is_on_the_page():
    for name in ENGINES:
        assert f"| `{name}` |" in PAGE
        for option in getattr(ENGINES.options_of(name), "__dataclass_fields__", {}):
            assert f"`{option}`" in PAGE


def test_the_page_names_the_times_of_heartbeats():
    assert (heartbeat.BEAT, heartbeat.STALE) == (10, 120)  # "every ten seconds", "two minutes"
