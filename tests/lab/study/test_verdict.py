"""The rules: which side of zero an interval lies on, which way is better, one seed, what diverged."""

import pytest

from torchemo.lab.study.verdict import interval_of, together, verdict_of


def contrast(low, high, expect="better", metric="accuracy", **more):
    row = {"value": 0.0, "low": low, "high": high}
    return {
        **{"cell": "a", "against": "b", "expect": expect, "metric": metric, "diverged": []},
        **{"means": [0.5, 0.5], "over_tasks": row, "over_seeds": {"both": row}, **more},
    }


@pytest.mark.parametrize(
    ("low", "high", "expect", "metric", "verdict"),
    [
        (0.1, 0.3, "better", "accuracy", "holds"),
        (-0.1, 0.3, "better", "accuracy", "does not hold"),
        (-0.3, -0.1, "better", "accuracy", "does not hold"),
        (-0.3, -0.1, "better", "mse", "holds"),
        (-0.3, -0.1, "worse", "accuracy", "holds"),
        (0.1, 0.3, "worse", "mse", "holds"),
        (-0.1, 0.3, "worse", "accuracy", "does not hold"),
        (None, None, "better", "accuracy", "does not hold"),
        (0.0, 0.3, "better", "accuracy", "does not hold"),
        (0.1, 0.3, "shown", "accuracy", "shown"),
        # No better: a gain of a point, or of a tenth of 0.5, must be ruled out.
        (-0.02, 0.009, "no better", "accuracy", "holds"),
        (-0.3, -0.1, "no better", "accuracy", "holds"),
        (-0.15, 0.16, "no better", "accuracy", "undecided"),
        (0.001, 0.005, "no better", "accuracy", "does not hold"),
        (-0.04, 0.2, "no better", "mse", "holds"),
        (-0.06, 0.2, "no better", "mse", "undecided"),
        (-0.2, -0.1, "no better", "mse", "does not hold"),
        (None, None, "no better", "mse", "undecided"),
    ],
)
def test_verdict(low, high, expect, metric, verdict):
    assert verdict_of(contrast(low, high, expect, metric)) == verdict


def test_the_interval_over_seeds_and_tasks_counts_where_there_are_seeds():
    found = contrast(0.1, 0.3)
    found["over_seeds"] = {"both": {"value": 0.2, "low": -1.0, "high": 1.4}}
    assert interval_of(found)["low"] == -1.0
    assert verdict_of(found) == "does not hold"


@pytest.mark.parametrize(("low", "verdict"), [(0.1, "undecided"), (-0.1, "does not hold")])
def test_with_one_seed_nothing_holds(low, verdict):
    found = contrast(low, 0.3)
    del found["over_seeds"]
    assert interval_of(found)["low"] == low
    assert verdict_of(found) == verdict


@pytest.mark.parametrize(
    ("expect", "who", "verdict"),
    [
        ("better", ["a"], "does not hold"),
        ("better", ["b"], "undecided"),  # a control at the rates of another
        ("worse", ["a"], "holds"),
        ("worse", ["b"], "does not hold"),
        ("no better", ["a"], "holds"),
        ("worse", ["a", "b"], "undecided"),
        ("shown", ["a"], "shown"),
    ],
)
def test_what_diverged_is_worse_than_what_did_not(expect, who, verdict):
    found = {"cell": "a", "against": "b", "expect": expect, "diverged": who, "test": None}
    assert verdict_of(found) == verdict


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        (["holds", "holds"], "holds"),
        (["holds", "undecided"], "undecided"),
        (["undecided", "does not hold", "holds"], "does not hold"),
        ([], "undecided"),
    ],
)
def test_a_claim_holds_if_all_of_it_does(verdicts, verdict):
    assert together(verdicts) == verdict


@pytest.mark.parametrize(
    ("at_home", "test", "verdict"),
    [(["a"], "elsewhere", "undecided"), ([], "elsewhere", "holds"), (["a"], None, "holds")],
)
def test_what_diverged_at_home_is_no_proof_of_harm_on_other_sets(at_home, test, verdict):
    found = {"cell": "a", "against": "b", "expect": "worse", "diverged": ["a"]}
    assert verdict_of({**found, "test": test, "diverged_at_home": at_home}) == verdict
