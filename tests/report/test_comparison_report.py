"""Reports of comparisons: the forest, the table, who was compared, and what cannot be compared."""

import json

import pytest

from tests.report.html import Page, broken_laws
from torchemo.core.errors import DataError
from torchemo.report.comparison import write_comparison_report
from torchemo.report.run.collect import compare_runs
from torchemo.runs.compare import compare, read_result


def difference(value, half, *, p=0.2, n=10):
    ends = {"value": value, "low": value - half, "high": value + half, "n": n, "method": "t"}
    return {
        "difference": ends, "median": value, "p_value": p, "wins": 7, "ties": 1, "losses": 2,
    }  # fmt: skip


def comparison(value, half, *, metric="accuracy", other="B", domain="birds", **more):
    return {
        "metric": metric,
        "base": {"method": "A", "mean": 0.5},
        "other": {"method": other, "mean": 0.5 + value},
        "tasks": 10,
        "seeds": 1,
        "difference": difference(value, half),
        "per_domain": {
            domain: difference(value, 2 * half, p=0.00001),
            "fungi": difference(0.0, half),
        },
        "per_step": [[0.2, 0.5], [0.2, 0.5 + value]],
        **more,
    }


def write(found, out):
    path = write_comparison_report(found, out)
    return Page(path.read_text())


def test_a_comparison_of_real_runs_names_runs_seeds_and_tasks(points, base, tmp_path):
    page = write([compare_runs([base], [points])], tmp_path / "deep" / "comparison.html")
    record = [read_result(root) for root in (base, points)]
    pairs = [b[-1] - a[-1] for a, b in zip(*(r["per_task"] for r in record), strict=True)]
    mean = sum(pairs) / len(pairs)
    digits = 2 if abs(mean) >= 1 else 3
    assert f"{abs(mean):.{digits}f}" in page.text
    assert "MAML + EMO minus MAML" in page.text
    assert "on 12 tasks" in page.text
    assert "/base" in page.text
    assert "/points" in page.text
    assert "One training seed" in page.text
    assert "synthetic data" in page.text
    assert broken_laws((tmp_path / "deep" / "comparison.html").read_text()) == []
    assert "://" not in (tmp_path / "deep" / "comparison.html").read_text()


def test_a_domain_that_is_all_there_is_gets_no_row_of_its_own(tmp_path):
    found = comparison(0.1, 0.05)
    assert "birds" in write([found], tmp_path / "two.html").text
    del found["per_domain"]["fungi"]
    page = write([found], tmp_path / "one.html")
    assert "birds" not in page.text
    assert "all tasks" in page.text


def test_a_bare_comparison_without_runs_is_enough(points, base, tmp_path):
    bare = compare([read_result(base)], [read_result(points)])
    for side in ("base", "other"):
        del bare[side]["runs"], bare[side]["train_seeds"]
    page = write([json.loads(json.dumps(bare))], tmp_path / "c.html")
    assert "not noted" in page.text
    assert len(page.all("svg")) == 2


@pytest.mark.parametrize(
    ("metric", "value", "verdict"),
    [
        ("accuracy", 0.10, "B is better than A: +10.00 [+5.00, +15.00]"),
        ("accuracy", -0.10, "A is better than B: −10.00 [−15.00, −5.00]"),
        ("mse", -0.10, "B is better than A: −0.100 [−0.150, −0.0500]"),
        ("mse", 0.10, "A is better than B: +0.100 [+0.0500, +0.150]"),
        ("accuracy", 0.01, "The difference is not significant: +1.00 [−4.00, +6.00]"),
    ],
)
def test_the_verdict_follows_the_interval_and_the_metric(metric, value, verdict, tmp_path):
    page = write([comparison(value, 0.05, metric=metric)], tmp_path / "c.html")
    assert verdict in page.text
    forest = next(a for a in page.all("svg") if "minus" in a["aria-label"])
    assert "birds" in forest["aria-label"]
    left, right = page.text.index("← "), page.text.index(" better →")
    better_right = "B" if metric == "accuracy" else "A"
    assert page.text[left : left + 3] == ("← A" if metric == "accuracy" else "← B")
    assert page.text[right - 1] == better_right


def test_several_seeds_decide_the_verdict_and_open_ends_are_written(tmp_path):
    wide = {"value": 0.1, "low": -0.2, "high": None, "n": 2, "method": "random effects"}
    keys = ("over_tasks", "over_seeds", "both", "bootstrap")
    found = comparison(0.1, 0.01, over_seeds=dict.fromkeys(keys, wide))
    page = write([found | {"seeds": 2}], tmp_path / "c.html")
    assert (
        "The difference is not significant: +10.00 [−20.00, ∞], over seeds and tasks." in page.text
    )
    assert "new seeds and new tasks (random effects)" in page.text
    assert "One training seed" not in page.text


@pytest.mark.parametrize(
    ("base", "other", "told"),
    [
        ([1000], [2000], "They had different numbers of outer steps: A 1,000, B 2,000."),
        ([5], [5, 7], "They had different numbers of outer steps: A 5, B 5 or 7."),
        ([5], [5], None),
        (None, [5], None),
        (None, None, None),
    ],
)
def test_different_numbers_of_outer_steps_are_told(base, other, told, tmp_path):
    found = comparison(0.1, 0.1)
    for side, steps in (("base", base), ("other", other)):
        found[side] |= {} if steps is None else {"outer_steps": steps}
    text = write([found], tmp_path / "c.html").text
    assert "numbers of outer steps" in text if told else "numbers of outer steps" not in text
    assert told is None or told in text


def test_synthetic_domains_are_called_synthetic_and_others_are_not(tmp_path):
    drawn = write([comparison(0.1, 0.1, domain="synthetic-birds")], tmp_path / "a.html")
    photographed = write([comparison(0.1, 0.1)], tmp_path / "b.html")
    assert "synthetic data" in drawn.text
    assert "synthetic" not in photographed.text


def test_equal_methods_are_told_apart_and_names_are_escaped(tmp_path):
    found = [comparison(0.1, 0.1, other="<script>x", domain="<b>") for _ in range(2)]
    found[0]["other"]["runs"] = [str(tmp_path / "<u>one")]
    found[1]["other"]["runs"] = [str(tmp_path / "two")]
    page = write(found, tmp_path / "c.html")
    assert "<script>x (<u>one)" in page.text
    assert "<script>x (two)" in page.text
    assert str(tmp_path) not in page.text
    assert broken_laws((tmp_path / "c.html").read_text()) == []


def test_equal_comparisons_give_equal_bytes(tmp_path):
    for name in ("a.html", "b.html"):
        write([comparison(0.1, 0.1)], tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_what_is_no_comparison_is_refused_before_anything_is_written(tmp_path):
    out = tmp_path / "c.html"
    with pytest.raises(DataError, match="at least one"):
        write_comparison_report([], out)
    with pytest.raises(DataError, match="comparison 1 lacks"):
        write_comparison_report([comparison(0.1, 0.1), {"metric": "accuracy"}], out)
    with pytest.raises(DataError, match="comparison 1 is of mse"):
        write_comparison_report([comparison(0.1, 0.1), comparison(0.1, 0.1, metric="mse")], out)
    with pytest.raises(DataError, match="unknown metric"):
        write_comparison_report([comparison(0.1, 0.1, metric="luck")], out)
    assert not out.exists()
