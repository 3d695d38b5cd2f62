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


def check_kills(folder, kills, seed):
    seen = observe("kill", folder, kills, seed)
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
    return seen


def check_stops(folder, times, seed):
    seen = observe("stop", folder, times, seed)
    assert seen["errors"] == []
    assert seen["wrong"] == []
    assert seen["slowest"] < 10
    assert set(seen["ends"]) == {130, 143}


def check_race(folder, times):
    seen = observe("race", folder, times)
    assert seen["errors"] == []
    assert seen["codes"] == [0] * 4
    assert seen["held"] == [times] * 4
    assert seen["refused"] > 0
    assert seen["names_who"] > 0


def test_100_times_kill_9_lose_no_acknowledged_save(ram):
    check_kills(ram, 100, seed=0)


@pytest.mark.slow
def test_200_times_kill_9_on_a_real_disk_lose_no_acknowledged_save(tmp_path):
    assert check_kills(tmp_path, 200, seed=1)["in_prune"] > 10


def test_asked_to_stop_it_saves_and_leaves_with_the_right_code(ram):
    check_stops(ram, 30, seed=0)


@pytest.mark.slow
def test_asked_60_times_to_stop_it_saves_on_a_real_disk(tmp_path):
    check_stops(tmp_path, 60, seed=1)


def test_four_processes_that_race_for_a_run_hold_it_one_at_a_time(tmp_path):
    check_race(tmp_path, 15)


@pytest.mark.slow
def test_four_processes_race_60_times(tmp_path):
    check_race(tmp_path, 60)


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
