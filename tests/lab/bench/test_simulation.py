"""A simulated large memory: what is typed is checked, and what is measured becomes a table."""

import json
import sys
from importlib import util
from pathlib import Path

import pytest

from torchemo.core.errors import ConfigError, ResourceError
from torchemo.lab.bench import record as records
from torchemo.lab.bench.measures import simulation
from torchemo.lab.bench.sizes import Asked, asked
from torchemo.lab.bench.tables import tables
from torchemo.lab.commands.bench import BenchCommand


def test_sizes_are_read_as_they_are_typed(tmp_path):
    assert asked("1e3", "1kB", "exact", tmp_path) == Asked(1000, 1000, "exact", str(tmp_path))
    assert asked("20", "2 KiB", "exact", tmp_path).value == 2048


@pytest.mark.parametrize("slots", ["0", "-5", "1.5", "abc", "nan", "1e12", ""])
def test_slots_that_there_cannot_be_are_refused(slots, tmp_path):
    with pytest.raises(ConfigError, match="--slots should be a whole number"):
        asked(slots, "1kB", "exact", tmp_path)


@pytest.mark.parametrize("value", ["0kB", "3", "1 parsec", "", "-1kB", "2e9 MB"])
def test_values_that_there_cannot_be_are_refused(value, tmp_path):
    with pytest.raises(ConfigError, match="--value should be the size of a value"):
        asked("10", value, "exact", tmp_path)


def test_an_index_a_folder_or_a_disk_that_will_not_do_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="--index should be one of exact"):
        asked("10", "1kB", "hnsw", tmp_path)
    with pytest.raises(ResourceError, match="--folder: there is no folder"):
        asked("10", "1kB", "exact", tmp_path / "nowhere")
    with pytest.raises(ResourceError, match=r"--folder: the values take .* free"):
        asked("1e9", "100 MB", "exact", tmp_path)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match="needs the package faiss"):
        asked("10", "1kB", "ivfpq", tmp_path)
    with pytest.raises(ConfigError, match="--slots is for bench memory, got bench step"):
        BenchCommand("step", slots="10").run()


@pytest.mark.parametrize("index", ["exact", "ivfpq"])
def test_a_small_simulation_fills_overwrites_recalls_and_becomes_a_table(
    index, tmp_path, monkeypatch
):
    if index == "ivfpq" and util.find_spec("faiss") is None:
        pytest.skip("the extra ann is not installed")
    monkeypatch.setattr(simulation, "RECALLS", 6)
    monkeypatch.setattr(simulation, "QUERIES", 4)
    request = {"slots": 300, "value": 100, "index": index, "folder": str(tmp_path)}
    found = simulation.simulate(request)
    assert found["recall_at_20"] == 1
    assert found["disk_mb"] > 0
    assert list(tmp_path.iterdir()) == []  # its files are gone
    case = {"measurement": "simulation", "request": request, **found}
    (table,) = tables({"cases": {"it": json.loads(json.dumps(case))}})
    assert table.rows[0] == ["recall@20 against exact search, 100 queries", "1.000"]


def test_simulations_of_other_sizes_stay_in_the_record_and_other_records_are_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(records, "in_fresh_process", lambda name, request, keep: {"peak_mb": 1})
    first = records.simulate(Asked(10, 100, "exact", str(tmp_path)))
    both = records.simulate(Asked(20, 100, "exact", str(tmp_path)), earlier=first)
    assert list(both["cases"]) == ["10 slots, 100 bytes, exact", "20 slots, 100 bytes, exact"]
    assert str(tmp_path) not in json.dumps(both["cases"])
    with pytest.raises(ConfigError, match="the record that is there is of"):
        records.simulate(Asked(10, 100, "exact", "/"), earlier={"what": "x", "cases": {}})


def test_the_record_of_ten_million_slots_meets_the_goals():
    place = Path(__file__).parents[3] / "benchmarks" / "results" / "simulation.json"
    case = json.loads(place.read_text())["cases"]["10,000,000 slots, 1,000 bytes, ivfpq"]
    assert case["recall_at_20"] >= 0.99
    for recall in (case["fifo"]["recall"], case["clock"]["recall"], case["cold"]):
        assert recall["median"] < 0.01
    assert case["peak_mb"] * 2**20 < 4e9
