"""Processes that are killed, stopped, or in each other's way."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults

SERVER = Path(__file__).with_name("fork_server.py")


def observe(scenario, folder, count, seed=0, before=()):
    command = [*before, sys.executable, str(SERVER), scenario, str(folder), str(count), str(seed)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=550,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("kills", "seed"), [(200, 0), pytest.param(1000, 1, marks=pytest.mark.slow)]
)
def test_kill_9_at_any_time_loses_no_acknowledged_save(tmp_path, kills, seed):
    seen = observe("kill", tmp_path, kills, seed)
    assert seen["kills"] == kills
    assert seen["errors"] == []
    assert seen["lost"] == []
    assert seen["torn"] == []
    assert seen["last_exit"] == 0
    assert seen["left_over"] == []
    assert seen["log_is_whole"]
    # A loop that never hits a save or a pruning would prove nothing.
    assert seen["saved"] > kills / 10
    assert seen["in_save"] > kills / 10
    assert seen["in_prune"] > 0


@pytest.mark.parametrize(("times", "seed"), [(45, 0), pytest.param(200, 1, marks=pytest.mark.slow)])
def test_asked_to_stop_it_saves_and_leaves_with_the_right_code(tmp_path, times, seed):
    seen = observe("stop", tmp_path, times, seed)
    assert seen["errors"] == []
    assert seen["wrong"] == []
    assert seen["slowest"] < 10
    assert {143, 130} == set(seen["ends"])


@pytest.mark.parametrize("times", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_four_processes_that_race_for_a_run_hold_it_one_at_a_time(tmp_path, times):
    seen = observe("race", tmp_path, times)
    assert seen["errors"] == []
    assert seen["codes"] == [0] * 4
    assert sum(seen["held"]) + seen["refused"] == 4 * times
    assert sum(seen["held"]) > times
    assert seen["refused"] > 10
    assert seen["names_who"] > 0


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare to mount a small disk")
def test_a_full_disk_is_told_with_exit_code_6_and_can_be_resumed_from(tmp_path):
    own = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=2m tmpfs {tmp_path}"
    if subprocess.run([*own, mount], capture_output=True).returncode:
        pytest.skip("small disks cannot be mounted here")
    seen = observe("disk_full", tmp_path, 30, before=[*own, f'{mount} && exec "$@"', "sh"])
    code, message = seen["refused"]
    assert code == 6
    assert "space" in message
    assert seen["latest"] == seen["saved"] > 1
    assert seen["skipped"] == 0
    assert not [name for name in seen["names"] if name.startswith(".tmp")]
    assert seen["resumed"] == 1000
