"""Every example runs as a user runs it: a process of its own, warnings as errors."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOOPS = sorted(path.name for path in (ROOT / "examples").glob("0[1-5]_*.py"))
SECOND_ORDER = [name for name in LOOPS if not name.startswith("01")]
ARGUMENTS = ["--iterations", "4", "--test-tasks", "6"]
STAND_IN = (
    "from tests.interop.learn2learn_stand_in import MAML as MAML, maml_update as maml_update\n"
)


def start(name: str, cwd: Path, python_path: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / name), *ARGUMENTS]
    return subprocess.Popen(
        command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> dict[str, tuple[int, str, str]]:
    """Exit code, stdout and stderr of every example, run at the same time."""
    folder = tmp_path_factory.mktemp("examples")
    stand_in = folder / "site" / "learn2learn" / "algorithms"
    stand_in.mkdir(parents=True)
    (stand_in / "maml.py").write_text(STAND_IN)
    path = f"{folder / 'site'}{os.pathsep}{ROOT}"
    running = {name: start(name, folder, path) for name in LOOPS}
    running["no learn2learn"] = start("05_learn2learn.py", folder, "")
    ended = {}
    for name, process in running.items():
        out, err = process.communicate(timeout=300)
        ended[name] = (process.returncode, out, err)
    return ended


def numbers(line: str) -> tuple[float, float]:
    before, after = re.search(r"MSE before (\S+)  after 3 steps (\S+)$", line).groups()
    return float(before), float(after)


@pytest.mark.parametrize("name", LOOPS)
def test_the_example_prints_finite_errors_without_and_with_memory(printed, name):
    code, out, err = printed[name]
    assert (code, err) == (0, "")
    without, with_memory = out.splitlines()
    assert "EMO" not in without
    assert "+ EMO" in with_memory
    assert all(math.isfinite(x) and x > 0 for line in (without, with_memory) for x in numbers(line))
    assert without.split("MSE")[1] != with_memory.split("MSE")[1]


def test_all_second_order_hosts_print_the_same_numbers(printed):
    reference = [numbers(line) for line in printed[SECOND_ORDER[0]][1].splitlines()]
    for name in SECOND_ORDER[1:]:
        for line, expected in zip(printed[name][1].splitlines(), reference, strict=True):
            # Printed with three decimals: one unit in the last place is rounding.
            assert numbers(line) == pytest.approx(expected, abs=0.0011), name


@pytest.mark.skipif(
    importlib.util.find_spec("learn2learn") is not None, reason="learn2learn is installed"
)
def test_without_learn2learn_one_line_says_so(printed):
    code, out, err = printed["no learn2learn"]
    assert (code, err) == (0, "")
    assert out.startswith("learn2learn is not installed")
    assert len(out.splitlines()) == 1


@pytest.mark.parametrize("name", LOOPS)
def test_an_example_is_short_and_marks_the_three_verbs(name):
    text = (ROOT / "examples" / name).read_text()
    assert len(text.splitlines()) <= 120
    assert [text.count(f"# [EMO] {verb}") for verb in ("recall", "combine", "remember")] == [
        1,
        1,
        1,
    ]
