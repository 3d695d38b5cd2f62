"""Every call to the operating system, one after the other, fails, is the last one, or loses power."""

import errno
import os
import shutil

import pytest
import torch
from syscall_tap import READS, Tap, power_cuts

from torchemo.core.errors import ResourceError
from torchemo.runs.events import EventLog, JsonLines, read, truncate_after
from torchemo.runs.storage import durable
from torchemo.runs.storage.checkpoint import folder_of, load, publish, published, step_of, verify
from torchemo.runs.storage.history import latest, prune, rewind, sweep

pytestmark = pytest.mark.faults

PROBLEMS = [errno.EIO, errno.ENOSPC, errno.EACCES]


def state(step):
    return {"state": {"w": torch.full((5,), float(step))}, "memory": {"n": torch.tensor(step)}}


def save(run, step):
    return publish(run, step, groups=state(step), info={"step": step})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run with the steps 1 and 2."""
    run = tmp_path_factory.mktemp("base") / "run"
    save(run, 1)
    save(run, 2)
    return run


@pytest.fixture
def fresh(base, ram):
    """Make a new copy of the run for every trial."""

    def copy():
        run = ram / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(base, run)
        return run

    return copy


@pytest.fixture(autouse=True)
def _no_real_sync(monkeypatch):
    """A `Tap` knows what is synced; hundreds of trials need not wait for the device."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: None)


def calls_of(action, run):
    with Tap() as tap:
        action(run)
    return tap.calls


def save_3(run):
    return save(run, 3)


def save_3_and_prune(run):
    save(run, 3)
    prune(run, keep_last=2)


def assert_sound(run, allowed):
    """All published folders verify, and the latest one is of an allowed step and holds its state."""
    for path in published(run):
        verify(path)
    found = latest(run).path
    assert found is not None, "neither the old state nor the new"
    step = step_of(found)
    assert step in allowed
    assert load(found).groups["state"]["w"].tolist() == [float(step)] * 5


def assert_can_go_on(run):
    """A new process needs no help: it sweeps, finds the latest, and saves the next step."""
    sweep(run)
    step = step_of(latest(run).path)
    rewind(run, step)
    save(run, step + 1)
    assert step_of(latest(run).path) == step + 1
    assert [name for name in os.listdir(folder_of(run)) if name.startswith(".tmp")] == []


def test_the_order_is_files_then_folder_then_rename_then_parent(fresh):
    run = fresh()
    calls = calls_of(save_3, run)
    (rename,) = [i for i, (name, _) in enumerate(calls) if name == "rename"]
    temporary, parent = calls[rename][1], str(folder_of(run))
    synced = {path: i for i, (name, path) in enumerate(calls) if name == "fsync"}
    written = {path: i for i, (name, path) in enumerate(calls) if name == "write"}
    files = [
        f"{temporary}/{f}" for f in ("state.safetensors", "memory.safetensors", "manifest.json")
    ]
    assert sorted(written) == sorted(files)
    for file in files:
        assert written[file] < synced[file] < synced[temporary] < rename < synced[parent]
    assert written[files[2]] > max(synced[files[0]], synced[files[1]])
    assert synced[parent] > len(calls) - 3


def test_every_file_is_read_back_after_it_was_synced(fresh):
    calls = calls_of(save_3, fresh())
    for name in ("state.safetensors", "memory.safetensors", "manifest.json"):
        mine = [call for call, path in calls if path.endswith(name)]
        assert "read" in mine[mine.index("fsync") :]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("action", [save_3, save_3_and_prune])
def test_dying_at_any_call_leaves_the_old_state_or_the_new(fresh, action, half):
    total = len(calls_of(action, fresh()))
    assert total > 25
    for at in range(1, total + 1):
        run = fresh()
        with Tap(at, half=half) as tap:
            action(run)
        assert tap.dead
        assert_sound(run, (2, 3))
        assert_can_go_on(run)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_an_error_at_any_call_of_a_save_is_told_and_leaves_the_old_state_only(fresh, problem):
    total = len(calls_of(save_3, fresh()))
    for at in range(1, total + 1):
        run = fresh()
        with Tap(at, problem=problem) as tap, pytest.raises(ResourceError) as caught:
            save_3(run)
        assert "cannot save step 3" in caught.value.message, tap.calls[at - 1]
        assert os.strerror(problem) in caught.value.message
        assert "last good: step-00000002" in caught.value.message
        assert caught.value.exit_code == 6
        assert str(caught.value).count("\n") < 6
        assert sorted(os.listdir(folder_of(run))) == ["step-00000001", "step-00000002"]
        save_3(run)
        assert_sound(run, (3,))


def test_an_error_at_any_call_of_a_pruning_is_told_or_keeps_more(fresh):
    def act(run):
        prune(run, keep_last=1)

    calls = calls_of(act, fresh())
    for at, (name, _) in enumerate(calls, start=1):
        run = fresh()
        told = None
        with Tap(at, problem=errno.EIO):
            try:
                act(run)
            except ResourceError as error:
                told = error.message
        if told is None:
            assert name in ("open", *READS)
            assert len(published(run)) == 2
        else:
            assert "cannot tidy up" in told
        assert_sound(run, (2,))
        assert_can_go_on(run)


@pytest.mark.parametrize("action", [save_3, save_3_and_prune])
def test_a_power_cut_at_any_call_leaves_the_old_state_or_the_new(fresh, ram, action):
    total, cuts = len(calls_of(action, fresh())), 0
    for at in range(1, total + 2):
        run = fresh()
        with Tap(at) as tap:
            action(run)
        assert tap.dead == (at <= total)
        for copy in power_cuts(run, tap, ram):
            cuts += 1
            assert_sound(copy, (2, 3) if tap.dead else (3,))
            sweep(copy)
    assert cuts > 2 * total


def test_a_rename_that_is_not_atomic_is_survived(fresh, monkeypatch):
    """Some network file systems copy: the new folder appears file by file, and the process dies."""
    for files in range(4):
        run = fresh()

        def copying(source, target, files=files):
            os.mkdir(target)
            for name in sorted(os.listdir(source))[:files]:
                shutil.copy(os.path.join(source, name), target)
            raise OSError(errno.EIO, "connection lost")

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", copying)
            with pytest.raises(ResourceError, match="connection lost"):
                save_3(run)
        found = latest(run)
        if files == 3:
            assert step_of(found.path) == 3
        else:
            assert step_of(found.path) == 2
            assert [damaged.path.name for damaged in found.skipped] == ["step-00000003"]
        assert_can_go_on(run)


def test_rewinding_can_die_anywhere_and_be_done_again(fresh):
    def act(run):
        rewind(run, 0)

    for at in range(1, len(calls_of(act, fresh())) + 1):
        run = fresh()
        with Tap(at):
            act(run)
        act(run)
        assert published(run) == []
        aside = sorted(path for path in folder_of(run).iterdir() if path.name.startswith("aside-"))
        assert [load(path).step for path in aside] == [1, 2]


@pytest.mark.parametrize("problem", [None, *PROBLEMS])
def test_a_replaced_file_is_the_old_or_the_new_one(tmp_path, problem):
    file = tmp_path / "config.toml"

    def act(run):
        durable.replace_file(run, b"new")

    file.write_bytes(b"old")
    calls = calls_of(act, file)
    for at in range(1, len(calls) + 1):
        file.write_bytes(b"old")
        if problem is None:
            with Tap(at, half=True):
                act(file)
        else:
            with Tap(at, problem=problem), pytest.raises(OSError, match=os.strerror(problem)):
                act(file)
        assert file.read_bytes() in (b"old", b"new")
        durable.sweep(tmp_path)
        assert os.listdir(tmp_path) == ["config.toml"]


def steps_of(path):
    return [event["step"] for event in read(path)]


def write_events(path):
    with EventLog(JsonLines(path)) as log:
        log.emit("train", 3)
        log.flush()
        log.emit("train", 4)


@pytest.mark.parametrize("problem", [None, *PROBLEMS])
def test_a_log_that_fails_or_dies_at_any_call_has_whole_lines_only(tmp_path, problem):
    path = tmp_path / "events.jsonl"

    def begin():
        path.unlink(missing_ok=True)
        with EventLog(JsonLines(path)) as log:
            log.emit("train", 1)

    begin()
    total = len(calls_of(write_events, path))
    for at in range(1, total + 1):
        begin()
        if problem is None:
            with Tap(at, half=True):
                write_events(path)
        else:
            with Tap(at, problem=problem), pytest.raises((ResourceError, OSError)):
                write_events(path)
            assert path.read_bytes().endswith(b"\n")
        assert steps_of(path) in ([1], [1, 3], [1, 3, 4])
        truncate_after(path, 2)
        write_events(path)
        assert steps_of(path) == [1, 3, 4]


def test_cutting_a_log_can_die_anywhere(tmp_path):
    path = tmp_path / "events.jsonl"
    for at in (1, 2):
        path.unlink(missing_ok=True)
        write_events(path)
        with Tap(at):
            truncate_after(path, 3)
        assert steps_of(path) in ([3], [3, 4])
