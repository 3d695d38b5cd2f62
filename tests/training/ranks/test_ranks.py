"""Ranks train what one process trains, bit for bit, and end together."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

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


@pytest.fixture
def as_ranks(warm):
    """Return ``as_ranks(number, *words)``: the ranks of a command, with a store as torchrun has it."""

    def run(number, *words):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        ranks = [
            warm.start(*words, cwd=ROOT, env={**shared, "RANK": str(n), "LOCAL_RANK": str(n)})
            for n in range(number)
        ]
        return [rank.wait() for rank in ranks]

    return run


def finished(process, *, timeout=300):
    out, _ = process.communicate(timeout=timeout)
    return out


@pytest.fixture(scope="module")
def alone():
    return {name: list(trained(name, HERE)) for name in CASES}


@pytest.mark.slow
def test_ranks_train_and_score_what_one_process_does(alone, tmp_path):
    process = torchrun(2, "-m", "tests.training.ranks.worker", tmp_path, port=29611, cwd=ROOT)
    out = finished(process)
    assert process.returncode == 0, out
    check_found(tmp_path, 2, alone)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks_do_so_too(ranks, as_ranks, alone, tmp_path):
    work = f"from tests.training.ranks.worker import main; main({str(tmp_path)!r})"
    for ended in as_ranks(ranks, "-c", work):
        assert ended.returncode == 0, ended.stderr
    check_found(tmp_path, ranks, alone)


def check_found(folder, ranks, alone):
    for rank in range(ranks):
        found = json.loads((folder / f"rank{rank}.json").read_text())
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


TRAIN = ["train", "--preset", "maml", "--data", "regression:sinusoid", "--shot", 5]
RUN = ["-m", "torchemo", *TRAIN]
SMALL = ["--options", "train.batched=no", "train.tasks=4", "train.validation_tasks=4"]
SMALL += ["train.validate_every=10"]
STEPS = ["--steps", 40]


def states(root):
    newest = max((root / "checkpoints").glob("step-*"))
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


@pytest.fixture(scope="module")
def whole(warm, tmp_path_factory):
    """What one process alone ends with."""
    root = tmp_path_factory.mktemp("whole") / "run"
    ended = warm.run(*TRAIN, *STEPS, "--out", root, *SMALL)
    assert ended.returncode == 0, ended.stderr
    return states(root)


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_nothing_differs(whole, tmp_path):
    broken = tmp_path / "broken"
    train = [*RUN, *STEPS, "--json", "--out", broken, *SMALL]
    process = torchrun(2, "--max-restarts", 2, *train, port=29614)
    wait_for(broken / "checkpoints" / "step-00000010")
    os.kill(child_of(process.pid), signal.SIGKILL)
    out = finished(process)
    assert process.returncode == 0, out
    assert '"event": "start", "step": 0' not in out.rpartition('"event": "start"')[2]
    assert states(broken) == whole


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_with_another_number_of_ranks(whole, as_ranks, tmp_path):
    stopped = tmp_path / "stopped"
    process = torchrun(2, *RUN, *STEPS, "--out", stopped, *SMALL, port=29616)
    wait_for(stopped / "checkpoints" / "step-00000010")
    os.kill(child_of(process.pid), signal.SIGTERM)  # one of the ranks alone
    out = finished(process)
    assert "continue with: torchemo train --resume" in out
    for ended in as_ranks(3, "train", "--resume", stopped):
        assert ended.returncode == 0, ended.stderr
    assert states(stopped) == whole


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up_with_a_clear_message(tmp_path):
    env = {TIMEOUT: "5"}
    process = torchrun(
        2, *RUN, "--steps", 5000, "--out", tmp_path / "a", *SMALL, port=29618, env=env
    )
    wait_for(tmp_path / "a" / "checkpoints" / "step-00000010")
    hung = child_of(process.pid)
    os.kill(hung, signal.SIGSTOP)
    message = "another rank has gone, or has not answered for 5 s"
    said = []
    with process.stdout as lines:
        for line in lines:
            said.append(line)
            if message in line:
                os.kill(hung, signal.SIGKILL)  # torchrun would do so, after half a minute
    assert process.wait(60) != 0
    assert message in "".join(said)
    assert "--max-restarts" in "".join(said)


@pytest.mark.slow
def test_ranks_that_would_be_idle_are_refused_once_and_leave_nothing(as_ranks, tmp_path):
    both = as_ranks(2, *TRAIN, "--steps", 5, "--out", tmp_path / "a")
    assert all(ended.returncode != 0 for ended in both)
    out = "".join(ended.stdout + ended.stderr for ended in both)
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
