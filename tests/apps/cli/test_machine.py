"""``--device`` and ``--precision``: every command that computes takes them, and refuses what is not there."""

import json
import shutil

import pytest

from tests.apps.cli.conftest import PICTURES
from tests.pretend import on_pretend
from torchemo.lab.demo import DemoConfig, run_demo
from torchemo.training.device import Place

COMPUTES = {
    "train": ("--out", "new"),
    "eval": ("run",),
    "adapt": ("run", "--support", "shots", "--query", "asked"),
    "serve": ("run",),
    "compare": ("run", "run", "--evaluate"),
    "demo": ("--out", "new"),
    "study": ("run", "T1", "--scale", "smoke", "--tasks", "regression", "--out", "new"),
    "bench": ("step", "--quick"),
    "doctor": (),
    "memory": ("build", "--from", "run", "--out", "new", "--slots", "5"),
}
"""Words of each command that would work on a device that is there."""


@pytest.fixture
def here(point_runs, tmp_path, monkeypatch):
    """A folder with a run of curves in it, as the present one."""
    shutil.copytree(point_runs / "memory", tmp_path / "run")
    for name in ("shots", "asked"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMPUTES)
def test_a_device_or_precision_that_is_not_there_is_refused_before_anything(
    command, here, torchemo
):
    before = sorted(here.rglob("*"))
    for words, told in (
        (
            ("--device", "cuda:7"),
            "there is no device 'cuda:7' on this machine. Use one of: auto, cpu",
        ),
        (("--precision", "tf32"), "cpu has no tf32. Use --precision float32."),
    ):
        found = torchemo(command, *COMPUTES[command], *words)
        assert (found.code, found.out) == (2, "")
        assert told in " ".join(found.err.split())
    assert sorted(here.rglob("*")) == before


def test_a_run_is_trained_evaluated_and_compared_in_bf16(torchemo, tmp_path):
    half = ("--precision", "bf16")
    for seed in (0, 1):
        run = tmp_path / str(seed)
        words = ("--preset", "maml", "--seed", seed, "--out", run, *half, "--options", *PICTURES)
        assert torchemo("train", *words).code == 0
    two = (tmp_path / "0", tmp_path / "1")
    alone = torchemo("compare", *two, *half)
    assert alone.code == 2
    assert "compare only reads results. Add --evaluate" in " ".join(alone.err.split())
    assert torchemo("eval", two[0], "--tasks", 4, *half).code == 0
    # The first has a result, of four tasks; the second is evaluated on 600.
    found = torchemo("compare", *two, "--evaluate", *half)
    assert found.code == 3
    assert "cannot be paired: their protocol differs (tasks: 600 and 4)" in found.err
    assert json.loads((two[1] / "eval-test-standard.json").read_text())["place"] == "cpu, bf16"


def test_steps_are_timed_in_bf16_against_the_cpu(torchemo):
    words = ("bench", "step", "--quick", "--precision", "bf16")
    record = torchemo(*words, "--json").json
    assert record["what"] == "torchemo bench step --device cpu --precision bf16"
    ((name, case),) = record["cases"].items()
    assert name == "maml, 16 px, cpu, bf16"
    assert list(case["rows"]) == ["cpu, float32", "cpu, bf16"]
    assert all(row["wall"]["median"] > 0 for row in case["rows"].values())


def test_what_is_no_matter_of_a_device_is_refused(torchemo, tmp_path):
    found = torchemo("bench", "limit", "--precision", "bf16")
    assert found.code == 2
    assert "are for bench step, got bench limit" in found.err
    (tmp_path / "kept").touch()
    found = torchemo("demo", "--out", tmp_path, "--precision", "bf16")
    assert (found.code, "the demo has curves" in found.err) == (2, True)


def test_the_demo_finds_the_same_on_a_device(tmp_path):
    config = DemoConfig(steps=2, test_tasks=4, visits=2)
    found = {}
    with on_pretend() as device:
        for name, place in (("there", Place(device)), ("here", Place())):
            (tmp_path / name).mkdir()
            found[name] = run_demo(tmp_path / name, config, place=place)
    for method, visits in found["here"]["errors"].items():
        there = found["there"]["errors"][method]
        assert [v["value"] for v in there] == pytest.approx([v["value"] for v in visits], rel=1e-3)
