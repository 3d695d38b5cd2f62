"""The folder of a run: one writer, and a message that says who it is."""

import os
import re
import socket

import pytest

from torchemo.core.errors import ResourceError
from torchemo.runs.folder import RunFolder, lock


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
        (tmp_path / ".lock").write_bytes(note)
        with (
            pytest.raises(ResourceError, match="is being written by another process"),
            lock(tmp_path),
        ):
            pass


def test_the_lock_file_is_not_followed_out_of_the_run(tmp_path):
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ResourceError, match=r"cannot write .*\.lock"), lock(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "years of work"


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(ResourceError, match="No locks available"), lock(tmp_path):
        pass
