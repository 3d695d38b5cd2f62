"""Records: every case can be measured, in a process of its own, and turned into a table."""

import json

import pytest
import torch

from torchemo.core.errors import ConfigError, ResourceError
from torchemo.lab.bench import record as records
from torchemo.lab.bench.measures.family import measure as methods
from torchemo.lab.bench.measures.growth import resident_mb
from torchemo.lab.bench.measures.limit import counted
from torchemo.lab.bench.plan import PLANS, Case
from torchemo.lab.bench.process import MEASUREMENTS, in_fresh_process, measure_here
from torchemo.lab.bench.tables import percent, ratio, seconds, tables

TINY = {"size": 16, "filters": 3, "tasks": 1, "steps": 1, "n_query": 1, "n_way": 2}


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("what", PLANS)
def test_every_case_of_a_plan_can_be_asked_for(what, quick):
    cases = PLANS[what](quick=quick)
    assert cases
    for case in cases.values():
        assert case.measurement in MEASUREMENTS
        assert json.loads(json.dumps(case.request)).keys() == case.request.keys()


REQUESTS = {
    "step": {"work": TINY, "workers": 1, "repeats": 1, "only": ["torchemo, fused", "plain loop"]},
    "sizes": {"work": TINY, "quantity": "tasks", "values": [1, 2], "repeats": 1},
    "learners": {"work": TINY, "repeats": 1},
    "shares": {"work": TINY, "repeats": 1, "small": 16, "small_repeats": 1},
    "verbs": {"work": TINY, "repeats": 1, "k": [1], "parameters": [10]},
    "search": {"recall": [("exact", "clusters", [3, 30])], "remember": [3, 30], "repeats": 1},
    "mapped": {"slots": 200, "numbers": 10},
    "data": {"cases": [("regression:hsml4", 16, 4)], "batches": 1, "repeats": 1},
    "sampling": {"work": TINY, "repeats": 1},
    "packing": {"size": 16, "packed": 8, "images": 80, "repeats": 1},
    "mapped_images": {"size": 16, "megabytes": 4, "cache_mb": 1, "batches": 10},
    "limit": {"works": [TINY], "workers": [1], "repeats": 1},
    "growth": {"work": TINY, "steps": 10, "workers": 1},
    "training": {"preset": "maml", "size": 16, "workers": 1, "steps": 1, "repeats": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_every_measurement_becomes_a_table(name):
    found = measure_here(name, json.loads(json.dumps(REQUESTS[name])), keep=False)
    assert found["allocator"] == "default"
    case = {"measurement": name, "request": REQUESTS[name], **found}
    (table,) = tables({"cases": {"the case": json.loads(json.dumps(case))}})
    assert table.rows
    assert all(len(row) == len(table.columns) for row in table.rows)


@pytest.mark.slow
def test_a_memory_map_may_be_larger_than_what_stays_resident():
    request = {"size": 84, "megabytes": 256, "cache_mb": 64, "batches": 60}
    found = in_fresh_process("mapped_images", request, keep=True)
    assert found["times_let_go"] > 0
    assert found["seen"][-1]["batch"] == 60
    # A batch of 4 tasks holds 80 images of 3 x 84 x 84 numbers each; 60 of them were drawn.
    batch_mb = 4 * 80 * 3 * 84 * 84 * 4 / 2**20
    own = [one["anonymous_mb"] for one in found["seen"]]
    assert max(own) - min(own) < 3 * batch_mb


@pytest.mark.slow
def test_a_fresh_process_has_its_own_peak_memory():
    request = {"work": TINY, "workers": 1, "repeats": 1, "variant": "torchemo, fused"}
    ballast = torch.ones(2**27)  # half a gigabyte here is not there
    found = in_fresh_process("peak", request, keep=False)
    assert found["allocator"] == "default"
    assert 0 < found["before_mb"] <= found["peak_mb"] < resident_mb()
    assert ballast.numel() == 2**27


@pytest.mark.slow
def test_methods_are_measured_beside_maml_with_what_they_hold():
    options = ["model.filters=2", "data.image_size=16", "data.n_query=1", "learner.steps=1"]
    presets = ["maml", "arml", "maml-offsets-joint"]
    request = {"presets": presets, "options": options, "repeats": 1}
    small, large = (methods(request | {"published": p})["rows"] for p in (False, True))
    assert small["maml"]["cost"]["median"] == 1.0
    assert small["maml"]["parameters"] < small["arml"]["parameters"] < large["arml"]["parameters"]
    assert small["maml-offsets-joint"]["parameters"] == small["maml"]["parameters"]
    assert small["maml-offsets-joint"]["memory_bytes"] > 0 == small["arml"]["memory_bytes"]


def test_a_measurement_that_fails_says_why():
    with pytest.raises(ResourceError, match="unexpected keyword argument 'colour'"):
        in_fresh_process("peak", {"work": {"colour": 1}, "workers": 1, "variant": "x"})


def test_products_are_counted():
    a = torch.rand(3, 5)
    assert counted(lambda: a @ a.T) == pytest.approx(2 * 3 * 3 * 5 / 1e9)


def test_a_record_says_what_where_and_who_was_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(
        records, "in_fresh_process", lambda name, request, keep: {"kept": keep, "pi": 3.14159265}
    )
    seen = []
    found = records.measure_all("data", quick=True, on_case=seen.append)
    assert seen == list(PLANS["data"](quick=True)) == list(found["cases"])
    assert found["quick"] is True
    assert found["environment"]["torch"]["version"] == torch.__version__
    records.write(found, tmp_path / "new" / "data.json")
    read = json.loads((tmp_path / "new" / "data.json").read_text())
    assert read["cases"]["episodes"]["pi"] == 3.142
    assert read["cases"]["episodes"]["kept"] is True


def test_some_cases_are_measured_anew_and_the_others_stay(monkeypatch):
    number = iter(range(100))
    monkeypatch.setattr(
        records, "in_fresh_process", lambda name, request, keep: {"number": next(number)}
    )
    first = records.measure_all("data", quick=True)
    second = records.measure_all("data", quick=True, chosen=["episodes"], earlier=first)
    assert list(second["cases"]) == list(first["cases"])
    changed = {n for n, case in second["cases"].items() if case != first["cases"][n]}
    assert changed == {"episodes"}
    alone = records.measure_all("data", quick=True, chosen=["epi*"])
    assert list(alone["cases"]) == ["episodes"]


def test_cases_of_another_kind_of_record_do_not_stay(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "in_fresh_process", lambda name, request, keep: {})
    with pytest.raises(ConfigError, match="no case like steps"):
        records.measure_all("data", quick=True, chosen=["steps"])
    other = records.measure_all("growth", quick=True)
    with pytest.raises(ConfigError, match="differs in what"):
        records.measure_all("data", quick=True, chosen=["episodes"], earlier=other)
    other = records.measure_all("data", quick=True)
    other["environment"]["packages"] = {"torch": "1.0"}
    with pytest.raises(ConfigError, match="differs in packages"):
        records.measure_all("data", quick=True, chosen=["episodes"], earlier=other)
    (tmp_path / "data.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a record"):
        records.read(tmp_path / "data.json")


def test_of_several_processes_the_median_peak_counts(monkeypatch):
    peaks = iter([5.0, 1.0, 3.0])
    monkeypatch.setattr(
        records, "in_fresh_process", lambda name, request, keep: {"peak_mb": next(peaks)}
    )
    plan = {"peak": Case("peak", {}, keep=False, processes=3)}
    monkeypatch.setitem(records.PLANS, "step", lambda quick: plan)
    case = records.measure_all("step")["cases"]["peak"]
    assert case["peak_mb"] == 3.0
    assert case["peaks_mb"] == [1.0, 3.0, 5.0]


def test_spreads_are_written_in_the_unit_that_suits_them():
    spread = {"median": 0.5, "min": 0.25, "max": 1.0}
    assert seconds(spread) == "500 ms (250 to 1,000)"
    assert seconds({k: v / 1e4 for k, v in spread.items()}) == "50.0 µs (25.0 to 100)"
    assert ratio(spread) == "0.50 (0.25 to 1.00)"
    assert percent(spread) == "50.0 % (25.0 to 100.0)"
