"""The folder of a run: one writer, and a message that says who it is."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock, SoftFileLock

import torchemo
from tests.runs.small import config
from torchemo.core import locks
from torchemo.core.errors import ResourceError, RunInUse
from torchemo.runs.folder import RunFolder, lock
from torchemo.runs.storage import heartbeat
from torchemo.runs.storage.heartbeat import read_note
from torchemo.runs.train import train_run


def test_everything_has_its_place(tmp_path):
    run = RunFolder(tmp_path)
    names = [p.name for p in (run.config, run.environment, run.events, run.checkpoints, run.report)]
    assert names == [
        "config.toml",
        "environment.json",
        "events.jsonl",
        "checkpoints",
        "report.html",
    ]


def test_texts_are_saved_whole_and_the_folder_is_made(tmp_path):
    run = RunFolder(tmp_path / "runs" / "first")
    run.save(run.config, "n_way = 5\n")
    run.save(run.config, "é")
    assert run.config.read_bytes() == "é".encode()


def test_a_text_that_cannot_be_saved_names_the_file(tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    run = RunFolder(tmp_path / "run")
    with pytest.raises(ResourceError, match=r"cannot write .*config\.toml"):
        run.save(run.config, "n_way = 5\n")


def test_a_second_writer_is_told_who_the_first_one_is(tmp_path):
    with lock(tmp_path), pytest.raises(ResourceError) as caught, lock(tmp_path):
        pass
    who = rf"process {os.getpid()} on {re.escape(socket.gethostname())} since \d{{4}}-\d\d-\d\d "
    assert re.search(who, caught.value.message)
    assert caught.value.exit_code == 6


def test_the_lock_is_free_again_after_the_block_and_its_file_stays(tmp_path):
    with lock(tmp_path / "new" / "run"):
        inode = (tmp_path / "new" / "run" / ".lock").stat().st_ino
    with pytest.raises(KeyError), lock(tmp_path / "new" / "run"):
        raise KeyError
    with lock(tmp_path / "new" / "run"):
        assert (tmp_path / "new" / "run" / ".lock").stat().st_ino == inode


@pytest.mark.parametrize("note", [b"", b"{", b"[1]", b'{"pid": 1}'])
def test_an_unreadable_note_is_no_reason_to_fail_differently(tmp_path, note):
    with lock(tmp_path):
        (tmp_path / ".owner").write_bytes(note)
        with (
            pytest.raises(ResourceError, match="is being written by another process"),
            lock(tmp_path),
        ):
            pass


system_locks = pytest.mark.skipif(
    locks.native is SoftFileLock, reason="the system has no locks of its own"
)


@system_locks
def test_the_lock_file_is_not_followed_out_of_the_run(tmp_path):
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ResourceError, match=r"cannot write .*\.lock"), lock(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "years of work"


@system_locks
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(ResourceError, match="No locks available"), lock(tmp_path):
        pass


@pytest.fixture
def without_locks(monkeypatch):
    """A system that has no locks of its own: a lock is a file that is there or not."""
    monkeypatch.setattr(locks, "native", SoftFileLock)


def test_without_the_systems_locks_there_is_still_one_writer(tmp_path, without_locks):
    with (
        lock(tmp_path),
        pytest.raises(ResourceError, match="is being written by process"),
        lock(tmp_path),
    ):
        pass
    with lock(tmp_path):
        pass


def test_without_the_systems_locks_a_killed_writer_keeps_nobody_out(tmp_path, without_locks):
    code = (
        "import os, sys, filelock as f; a = f.SoftFileLock(sys.argv[1]); a.acquire(); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / ".lock"], check=False)
    assert (tmp_path / ".lock").exists()
    with lock(tmp_path):
        pass


def test_one_module_knows_how_files_are_locked():
    root = Path(torchemo.__file__).parent
    sources = {p.relative_to(root).as_posix(): p.read_text() for p in root.rglob("*.py")}
    assert not [n for n, text in sources.items() if "fcntl" in text or "msvcrt" in text]
    assert [n for n, text in sources.items() if "filelock" in text] == ["core/locks.py"]


ELSEWHERE = '{"pid": 7, "host": "node-3", "since": "2026-01-01 00:00:00", "token": "abc"}'


def leave_note(root, *, silent_for):
    """The note of a process on another machine, whose last heartbeat is some seconds old."""
    note = root / ".owner"
    note.write_text(ELSEWHERE)
    then = time.time() - silent_for
    os.utime(note, (then, then))


def test_a_writer_on_another_machine_is_respected_where_locks_do_not_reach(tmp_path):
    leave_note(tmp_path, silent_for=30)
    with (
        pytest.raises(RunInUse, match=r"process 7 on node-3 .*heartbeat was 30 s ago") as caught,
        lock(tmp_path),
    ):
        pass
    assert "given up after 120 s" in caught.value.hint
    assert (tmp_path / ".owner").read_text() == ELSEWHERE


def test_a_writer_without_a_heartbeat_is_succeeded_with_a_sentence(tmp_path):
    leave_note(tmp_path, silent_for=200)
    said = r"process 7 on node-3 .*no heartbeat for 200 s"
    with pytest.warns(UserWarning, match=said), lock(tmp_path):
        assert read_note(tmp_path / ".owner").pid == os.getpid()
    assert not (tmp_path / ".owner").exists()


def test_a_lock_that_the_file_system_keeps_for_a_dead_machine_is_replaced(tmp_path):
    with FileLock(tmp_path / ".lock"):  # stands for the server, which does not know of the death
        leave_note(tmp_path, silent_for=30)
        with pytest.raises(RunInUse, match="node-3"), lock(tmp_path):
            pass
        leave_note(tmp_path, silent_for=200)
        with (
            pytest.warns(UserWarning, match="taken over"),
            lock(tmp_path),
            pytest.raises(RunInUse, match=f"process {os.getpid()}"),
            lock(tmp_path),
        ):
            pass
    with lock(tmp_path):
        pass
    assert not list(tmp_path.glob(".tmp-*"))


def test_of_two_that_find_a_lock_stale_one_takes_it_over(tmp_path):
    claim = tmp_path / ".tmp-taken-abc"
    claim.touch()
    leave_note(tmp_path, silent_for=200)
    with (
        FileLock(tmp_path / ".lock"),
        pytest.raises(RunInUse, match="takes it over") as caught,
        lock(tmp_path),
    ):
        pass
    assert f"delete {claim}" in caught.value.hint
    assert claim.exists()


def test_a_process_of_this_machine_is_never_succeeded_while_it_lives(tmp_path):
    with lock(tmp_path):
        then = time.time() - 9999
        os.utime(tmp_path / ".owner", (then, then))
        with pytest.raises(RunInUse), lock(tmp_path):
            pass


def test_a_note_that_a_killed_process_left_here_keeps_nobody_out(tmp_path):
    note = tmp_path / ".owner"
    note.write_text(ELSEWHERE.replace("node-3", socket.gethostname()))
    with lock(tmp_path):
        assert read_note(note).pid == os.getpid()


def test_heartbeats_reach_the_note_and_a_successor_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT", 0.01)
    with lock(tmp_path) as beat:
        note = tmp_path / ".owner"
        os.utime(note, (0, 0))
        deadline = time.monotonic() + 60
        while note.stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        beat.check()
        note.write_text(ELSEWHERE)
        os.utime(note, (0, 0))
        time.sleep(0.05)  # longer than two beats
        with pytest.raises(RunInUse, match="taken over by process 7 on node-3"):
            beat.check()
        assert note.stat().st_mtime == 0  # it beats for itself alone
    assert note.read_text() == ELSEWHERE


def test_the_clock_is_that_of_the_file_system(tmp_path, monkeypatch):
    leave_note(tmp_path, silent_for=50)
    note = read_note(tmp_path / ".owner")
    monkeypatch.setattr(heartbeat.time, "time", lambda: 0.0)  # a machine whose clock is wrong
    assert heartbeat.silence(tmp_path / ".owner", note) == pytest.approx(50, abs=20)


def test_a_run_that_was_taken_over_while_its_process_slept_writes_nothing_more(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(heartbeat, "BEAT", 0.0)  # every heartbeat is late
    monkeypatch.setattr(heartbeat.Beat, "_go_on", lambda self: None)
    kept = {}

    def take(event, step, fields):
        if event == "step" and step == 5:
            (tmp_path / ".owner").write_text(ELSEWHERE)
            kept.update(files())

    def files():
        found = (p for p in tmp_path.rglob("*") if p.is_file())
        # Without locks of the system, the file of the lock goes when the process lets go of it.
        return {p: p.read_bytes() for p in found if p.name != ".lock"}

    with pytest.raises(RunInUse, match="was taken over by process 7 on node-3"):
        train_run(tmp_path, config(), on_event=take)
    assert kept == files()
