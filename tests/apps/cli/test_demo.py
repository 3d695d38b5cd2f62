"""The demo, tiny. Oracles: numpy on its own errors, and what a memory must and must not change."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from torchemo.lab.demo import DemoConfig, run_demo
from torchemo.lab.demo import methods as m
from torchemo.lab.demo.findings import findings, meaning, sentences
from torchemo.lab.demo.runs import draw_visits

WORDS = ("--steps", 2, "--test-tasks", 6, "--visits", 3)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A tiny demo, run once: its folder."""
    out = tmp_path_factory.mktemp("demo")
    run_demo(out, DemoConfig(steps=2, test_tasks=6, visits=3))
    return out


def errors(**rows):
    """What was measured: given errors ``[visit, curve]``, and one for every other method."""
    base = rows.pop("base")
    names = (m.BASE, m.SLOPES, m.EMO, m.STRANGERS, m.REPLAY, m.OFFSETS, m.OFFSETS_EMO)
    found = dict.fromkeys(names, base) | {m.EMO: rows["emo"]}
    return m.Measured([None] * len(base), found, {}, {})  # type: ignore[list-item]


def test_findings_are_paired_differences_at_the_last_visit():
    torch.manual_seed(0)
    base, emo = torch.rand(3, 40) + 1, torch.rand(3, 40)
    found = findings(errors(base=base, emo=emo))
    a, b = emo[-1].double().numpy(), base[-1].double().numpy()
    assert found["memory"]["difference"]["value"] == pytest.approx((a - b).mean())
    assert found["memory"]["relative"]["value"] == pytest.approx(a.mean() / b.mean() - 1)
    assert found["memory"]["relative"]["low"] < a.mean() / b.mean() - 1 < -0.3
    assert found["errors"][m.EMO][1]["value"] == pytest.approx(float(emo[1].mean()))
    assert found["memory"]["verdict"] == "better"
    percent = f"{100 * (1 - np.mean(a) / np.mean(b)):.0f} % less error ["
    assert sentences(found)[0].startswith(f"At visit 3, {m.EMO} has {percent}")
    assert "gets better each time" in meaning(found)


@pytest.mark.parametrize(
    ("shift", "verdict", "said"),
    [
        (0.0, "not significant", "(not significant) against MAML"),
        (9.0, "worse", "times the error ["),
    ],
)
def test_the_words_say_no_more_than_the_interval(shift, verdict, said):
    torch.manual_seed(1)
    base = torch.rand(2, 30) + 1
    found = findings(errors(base=base, emo=base + torch.randn(2, 30) / 10 + shift))
    assert found["memory"]["verdict"] == verdict
    assert said in sentences(found)[0]
    assert "no significant" in meaning(found)


def test_visits_bring_new_points_of_the_same_curves():
    first, second = draw_visits(DemoConfig(test_tasks=4, visits=2))
    assert torch.equal(first.query.y, second.query.y)
    assert not torch.isin(first.support.x, second.support.x).any()


def test_at_the_first_visit_nothing_is_recalled(shown):
    found = json.loads((shown / "summary.json").read_text())
    firsts = {name: rows[0] for name, rows in found["errors"].items()}
    for name in (m.SLOPES, m.EMO, m.STRANGERS, m.REPLAY):
        assert firsts[name] == firsts[m.BASE]
    assert firsts[m.OFFSETS_EMO] == firsts[m.OFFSETS]
    lasts = {name: rows[-1]["value"] for name, rows in found["errors"].items()}
    assert len(set(lasts.values())) > 3


def test_the_page_shows_fits_numbers_and_limits(shown):
    page = (shown / "report.html").read_text()
    found = json.loads((shown / "summary.json").read_text())
    assert page.count("<svg") >= 3
    for text in (*found["sentences"], found["meaning"], "synthetic data", "one training seed"):
        assert text in page
    for name, rows in found["errors"].items():
        assert name in page
        assert f"{rows[-1]['value']:.2f}" in page
    for link in re.findall(r'href="([^"]+\.html)"', page):
        assert (shown / link).is_file()


def test_the_command_shows_a_table_and_makes_a_demo_anew(torchemo, shown, tmp_path):
    out = tmp_path / "demo"
    out.mkdir()
    (out / ".torchemo-demo").touch()
    (out / "old.txt").touch()
    said = torchemo("demo", *WORDS, "--out", out)
    assert said.code == 0
    assert not (out / "old.txt").exists()
    found = json.loads((shown / "summary.json").read_text())
    assert json.loads((out / "summary.json").read_text()) == found  # as the same seed gave before
    for line in found["sentences"]:
        assert line in said.out
    assert str(out / "report.html") in said.out


def test_the_demo_does_not_write_over_anything_else(torchemo, tmp_path):
    (tmp_path / "mine.txt").write_text("dear")
    found = torchemo("demo", "--out", tmp_path)
    assert found.code == 2
    assert "not a demo" in found.err
    assert (tmp_path / "mine.txt").exists()


def test_the_page_on_tasks_that_come_back_says_what_the_record_says():
    root = Path(__file__).parents[3]
    page = (root / "docs" / "lifelong.md").read_text()
    record = json.loads((root / "benchmarks" / "results" / "demo.json").read_text())
    assert len({run["seed"] for run in record["runs"]} - {0}) == record["seeds"]
    # Secant values diverge with some seeds: their mean says nothing.
    for name in record["over_seeds"]["errors"].keys() - {"MAML + EMO, secant"}:
        means = np.mean([run["errors"][name] for run in record["runs"]], axis=0)
        assert f"| {name} | {' | '.join(f'{mean:.2f}' for mean in means)} |" in page
    verdicts = [run["memory"]["difference"]["high"] < 0 for run in record["runs"]]
    assert f"in {sum(verdicts)} of {len(verdicts)} seeds" in page
    assert sum(verdicts) >= 0.9 * len(verdicts)
