"""Files that are on the disk when we say so."""

import errno
import os

import pytest

from torchemo.runs.storage import durable


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path):
    target = tmp_path / "config.toml"
    durable.replace_file(target, b"old")
    durable.replace_file(str(target), b"new and longer")
    assert target.read_bytes() == b"new and longer"
    assert os.listdir(tmp_path) == ["config.toml"]


def test_a_failed_replacement_leaves_the_old_file_alone(tmp_path, monkeypatch):
    target = tmp_path / "config.toml"
    durable.replace_file(target, b"old")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        durable.replace_file(target, b"new")
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["config.toml"]


def test_a_write_that_comes_in_pieces_is_finished(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:3]))
    durable.write_new(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


@pytest.mark.parametrize("lie", [lambda d: b"?" + d[1:], lambda d: d[:-1] if len(d) < 9 else d[:8]])
def test_a_disk_that_gives_back_other_bytes_is_caught(tmp_path, monkeypatch, lie):
    real = os.write

    def careless(handle, data):
        real(handle, lie(bytes(data)))
        return len(data)

    monkeypatch.setattr(os, "write", careless)
    with pytest.raises(OSError, match="other bytes than were written"):
        durable.write_new(tmp_path / "file", b"01234567")


def test_an_existing_file_or_link_is_never_written_through(tmp_path):
    (tmp_path / "precious").write_bytes(b"years of work")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    for name in ("precious", "link"):
        with pytest.raises(FileExistsError):
            durable.write_new(tmp_path / name, b"x")
    assert (tmp_path / "precious").read_bytes() == b"years of work"


def test_pipes_are_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with (
        pytest.raises(OSError, match="not a regular file"),
        durable.open_regular(tmp_path / "pipe"),
    ):
        pass


def test_folders_that_cannot_be_synced_are_tolerated_and_sick_disks_are_not(tmp_path, monkeypatch):
    def fsync(handle):
        raise OSError(problem, os.strerror(problem))

    monkeypatch.setattr(os, "fsync", fsync)
    problem = errno.EINVAL
    durable.sync_folder(tmp_path)
    problem = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        durable.sync_folder(tmp_path)


def test_new_folders_are_synced_into_their_parents(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(durable, "sync_folder", synced.append)
    durable.make_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]
    durable.make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2


def test_ctrl_c_while_a_folder_is_deleted_stays_a_ctrl_c(tmp_path, monkeypatch):
    """At each closing of a descriptor in turn: whatever rmtree makes of it, the caller sees the Ctrl-C."""
    closings = []

    def close_then_interrupt(handle):
        real(handle)
        closings.append(handle)
        if len(closings) == at:
            raise KeyboardInterrupt

    real, at = os.close, 0
    for at in range(1, 5):
        (tmp_path / "folder" / "inner").mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / "inner" / "file").touch()
        closings.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "close", close_then_interrupt)
            try:
                durable.remove(tmp_path / "folder")
            except KeyboardInterrupt:
                continue
        assert len(closings) == at - 1 > 0  # every closing was interrupted once, none was left
        return
    raise AssertionError("rmtree closes more descriptors than this test goes through")


def test_sizes_are_written_for_people():
    assert durable.megabytes(9_999) == "9999 bytes"
    assert durable.megabytes(30_003_760) == "30.00 MB"
