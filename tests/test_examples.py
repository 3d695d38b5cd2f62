"""Every example runs: small and in this process in the unit tier, as a user runs it in the slow tier."""

import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.interop import learn2learn_stand_in

ROOT = Path(__file__).parent.parent
LOOPS = sorted(path.name for path in (ROOT / "examples").glob("0[1-5]_*.py"))
SECOND_ORDER = [name for name in LOOPS if not name.startswith("01")]
HOST = "learn2learn.algorithms.maml"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run an example with few iterations; returns the lines it printed."""

    def run_example(name: str) -> list[str]:
        argv = [name, "--iterations", "4", "--test-tasks", "6"]
        monkeypatch.setattr(sys, "argv", argv)
        with torch.random.fork_rng(devices=()):
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    for package in ("learn2learn", "learn2learn.algorithms", HOST):
        monkeypatch.setitem(sys.modules, package, learn2learn_stand_in)
    return run_example


def errors(line: str) -> tuple[float, float]:
    before, after = re.search(r"MSE before (\S+)  after 3 steps (\S+)$", line).groups()
    return float(before), float(after)


def check_printed(lines: list[str]) -> None:
    without, with_memory = lines
    assert "EMO" not in without
    assert "+ EMO" in with_memory
    assert all(math.isfinite(x) and x > 0 for line in lines for x in errors(line))
    assert errors(without) != errors(with_memory)


@pytest.mark.parametrize("name", LOOPS)
def test_the_example_prints_finite_errors_without_and_with_memory(run, name):
    check_printed(run(name))


def test_all_second_order_hosts_print_the_same_errors(run):
    reference, *others = ([errors(line) for line in run(name)] for name in SECOND_ORDER)
    assert len(others) == 3
    for other in others:
        for got, expected in zip(other, reference, strict=True):
            # Three decimals are printed: one unit in the last place is rounding.
            assert got == pytest.approx(expected, abs=0.0011)


def test_without_learn2learn_one_line_says_so(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, HOST, None)
    with pytest.raises(SystemExit) as end:
        run("05_learn2learn.py")
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("learn2learn is not installed")
    assert len(out.splitlines()) == 1


@pytest.mark.parametrize("name", LOOPS)
def test_an_example_is_short_and_marks_the_three_verbs(name):
    text = (ROOT / "examples" / name).read_text()
    assert len(text.splitlines()) <= 120
    verbs = ("recall", "combine", "remember")
    assert [text.count(f"# [EMO] {verb}") for verb in verbs] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_the_example_runs_from_the_shell_with_its_defaults(name, tmp_path):
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / name)]
    ended = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    if lines[0].startswith("learn2learn is not installed"):
        assert len(lines) == 1
    else:
        check_printed(lines)
