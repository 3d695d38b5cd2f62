"""Ranks train what one process trains, bit for bit, and end together."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.ranks.worker import CASES, trained
from torchemo.core.errors import ConfigError
from torchemo.training.device import HERE
from torchemo.training.distributed import ALONE, TIMEOUT, refuse_idle

ROOT = Path(__file__).parents[3]
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
QUIET["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "src", ROOT)))


def torchrun(ranks, *words, port, **how):
    """Start ranks as a user does; a port of their own keeps tests apart."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(port), *map(str, words)]
    env = {**os.environ, **QUIET, **how.pop("env", {})}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, **how
    )


def finished(process, *, timeout=300):
    out, _ = process.communicate(timeout=timeout)
    return out


@pytest.fixture(scope="module")
def alone():
    return {name: list(trained(name, HERE)) for name in CASES}


@pytest.mark.parametrize(
    ("ranks", "port"),
    [(2, 29611), *(pytest.param(n, 29609 + n, marks=pytest.mark.slow) for n in (3, 4))],
)
def test_ranks_train_and_score_what_one_process_does(ranks, port, alone, tmp_path):
    process = torchrun(ranks, "-m", "tests.training.ranks.worker", tmp_path, port=port, cwd=ROOT)
    out = finished(process)
    assert process.returncode == 0, out
    for rank in range(ranks):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        troubles = found.pop("troubles")
        check_refusals(found.pop("refusals"), ranks)
        assert found == alone
        check_troubles(troubles, rank, ranks)


def check_troubles(found, rank, ranks):
    last = ranks - 1
    assert found["share"] == ["Diverged", "task 3 has a non-finite loss.\nLower the rate.", True]
    mine = ["ValueError", "no disk", True]
    assert found["first"] == (
        mine if rank == 0 else ["RuntimeError", "rank 0: ValueError: no disk", True]
    )
    assert found["agree"][:1] == ["ResourceError"]
    assert f"ranks differ in data: rank 0 has abc, rank {last} has def." in found["agree"][1]
    assert found["first value"] == 10
    assert found["any"] == [True, False]
    assert found["mixed"] == [[], [1], [2, 2], [3, 3, 3]]


def check_refusals(found, ranks):
    """Other options, data, versions or numbers in one rank are refused in all; nothing is made or saved."""
    last = f"rank {ranks - 1} has"
    for what, words in {
        "versions": "packages.torchemo",
        "data": "data",
        "options": "options",
        "drift": "their state after step 2, computed at cpu, float32",
    }.items():
        message, made = found[what]
        assert message.startswith(f"ranks differ in {words}: rank 0 has ")
        assert last in message
        assert not made
    assert found["versions"][0].endswith(f"{last} 9.9.")


def test_more_ranks_than_groups_of_tasks_are_refused():
    class Three:
        size = 3

    refuse_idle(Three(), 3)
    with pytest.raises(ConfigError, match=r"3 ranks for 1 group\(s\) of tasks") as caught:
        refuse_idle(Three(), 1)
    assert "train.batched=no" in caught.value.hint
    refuse_idle(ALONE, 1)


RUN = ["-m", "torchemo", "train", "--preset", "maml", "--data", "regression:sinusoid", "--shot", 5]
SMALL = ["--options", "train.batched=no", "train.tasks=4", "train.validation_tasks=4"]
SMALL += ["train.validate_every=10"]


def states(root):
    newest = max((root / "checkpoints").glob("step-*"))
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_nothing_differs(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train = [*RUN, "--steps", 60, "--json"]
    assert finished(torchrun(1, *train, "--out", whole, *SMALL, port=29613))
    process = torchrun(2, "--max-restarts", 2, *train, "--out", broken, *SMALL, port=29614)
    wait_for(broken / "checkpoints" / "step-00000010")
    os.kill(child_of(process.pid), signal.SIGKILL)
    out = finished(process)
    assert process.returncode == 0, out
    assert '"event": "start", "step": 0' not in out.rpartition('"event": "start"')[2]
    assert states(broken) == states(whole)


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_with_another_number_of_ranks(tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train = [*RUN, "--steps", 60]
    assert finished(torchrun(1, *train, "--out", whole, *SMALL, port=29615))
    process = torchrun(2, *train, "--out", stopped, *SMALL, port=29616)
    wait_for(stopped / "checkpoints" / "step-00000010")
    os.kill(child_of(process.pid), signal.SIGTERM)  # one of the ranks alone
    out = finished(process)
    assert "continue with: torchemo train --resume" in out
    again = torchrun(3, "-m", "torchemo", "train", "--resume", stopped, port=29617)
    out = finished(again)
    assert again.returncode == 0, out
    assert states(stopped) == states(whole)


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up_with_a_clear_message(tmp_path):
    env = {TIMEOUT: "5"}
    process = torchrun(
        2, *RUN, "--steps", 5000, "--out", tmp_path / "a", *SMALL, port=29618, env=env
    )
    wait_for(tmp_path / "a" / "checkpoints" / "step-00000010")
    os.kill(child_of(process.pid), signal.SIGSTOP)
    out = finished(process)
    assert process.returncode != 0
    assert "another rank has gone, or has not answered for 5 s" in out
    assert "--max-restarts" in out


@pytest.mark.slow
def test_ranks_that_would_be_idle_are_refused_once_and_leave_nothing(tmp_path):
    process = torchrun(2, *RUN, "--steps", 5, "--out", tmp_path / "a", port=29619)
    out = finished(process)
    assert process.returncode != 0
    assert out.count("torchemo: 2 ranks for 1 group(s) of tasks") == 1
    assert not (tmp_path / "a").exists()


def wait_for(path, *, seconds=120):
    for _ in range(10 * seconds):
        if path.exists():
            return
        time.sleep(0.1)
    pytest.fail(f"{path} was never made")


def child_of(pid):
    """Return the process of the last rank."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[-1])
