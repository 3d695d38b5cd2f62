"""The rule: which side of zero an interval lies on decides, and which way is better."""

import pytest

from torchemo.study.verdict import interval_of, judge


def contrast(low, high, expect="better"):
    return {"expect": expect, "over_tasks": {"value": 0.0, "low": low, "high": high}}


@pytest.mark.parametrize(
    ("low", "high", "expect", "higher", "verdict"),
    [
        (0.1, 0.3, "better", True, "holds"),
        (-0.1, 0.3, "better", True, "does not hold"),
        (-0.3, -0.1, "better", True, "does not hold"),
        (-0.3, -0.1, "better", False, "holds"),
        (-0.3, -0.1, "worse", True, "holds"),
        (0.1, 0.3, "worse", False, "holds"),
        (-0.1, 0.3, "worse", True, "does not hold"),
        (-0.1, 0.3, "no better", True, "holds"),
        (-0.3, -0.1, "no better", True, "holds"),
        (0.1, 0.3, "no better", True, "does not hold"),
        (None, None, "better", True, "does not hold"),
        (0.0, 0.3, "better", True, "does not hold"),
        (0.1, 0.3, "shown", True, "shown"),
    ],
)
def test_verdict(low, high, expect, higher, verdict):
    assert judge(contrast(low, high, expect), higher_is_better=higher) == verdict


def test_the_interval_over_seeds_and_tasks_counts_where_there_are_seeds():
    found = contrast(0.1, 0.3)
    assert interval_of(found)["low"] == 0.1
    found["over_seeds"] = {"both": {"value": 0.2, "low": -1.0, "high": 1.4}}
    assert interval_of(found)["low"] == -1.0
    assert judge(found, higher_is_better=True) == "does not hold"
