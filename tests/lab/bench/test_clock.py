"""Timing: variants take turns, and ratios are taken within a round."""

import time

import pytest
import torch

from torchemo.lab.bench.clock import (
    Sample,
    Variant,
    fastest,
    interleave,
    rows,
    seconds_per_call,
    spread,
    timed,
)


def test_variants_take_turns_and_the_warm_up_does_not_count():
    seen = []
    variants = {
        "a": Variant(lambda: seen.append(("a", torch.get_num_threads())), 2),
        "b": Variant(lambda: seen.append(("b", torch.get_num_threads())), 1),
    }
    times = interleave(variants, repeats=2, warmup=1)
    assert seen == [("a", 2), ("b", 1)] * 3
    assert {name: len(samples) for name, samples in times.items()} == {"a": 2, "b": 2}
    assert torch.get_num_threads() == 1


def test_a_speed_is_the_ratio_within_a_round_not_of_medians():
    times = {
        "base": [Sample(1.0, 2.0), Sample(10.0, 20.0), Sample(100.0, 200.0)],
        "ours": [Sample(0.5, 1.0), Sample(2.0, 4.0), Sample(50.0, 100.0)],
    }
    found = rows(times, base="base")["ours"]
    assert found["speed"] == found["speed_cpu"] == {"median": 2.0, "min": 2.0, "max": 5.0}
    assert found["wall"] == {"median": 2.0, "min": 0.5, "max": 50.0}
    assert fastest(times, ["base", "ours"]) == "ours"


def test_sleeping_takes_time_on_the_clock_but_not_of_the_processor():
    sample = timed(lambda: time.sleep(0.05))
    assert sample.wall >= 0.05
    assert sample.cpu < 0.04


def test_short_calls_are_timed_many_at_a_time(monkeypatch):
    """On a clock that moves by a millisecond per call and stands still otherwise."""
    calls = []
    monkeypatch.setattr(time, "perf_counter", lambda: 0.001 * len(calls))
    found = seconds_per_call(lambda: calls.append(1), repeats=3, least=0.0105)
    assert len(calls) == 1 + 3 * 10
    assert found["median"] == pytest.approx(0.001)


def test_a_spread_is_median_smallest_and_largest():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
