"""A disk that is full, too small, or not ours to write to: named, exit code 6, and nothing is lost."""

import os
import resource
import warnings

import pytest
import torch

from torchemo.core.errors import ResourceError
from torchemo.runs.events import EventLog, JsonLines, read
from torchemo.runs.folder import RunFolder, lock
from torchemo.runs.storage.checkpoint import folder_of, publish, step_of, verify
from torchemo.runs.storage.history import latest

pytestmark = pytest.mark.faults

BIG = {"state": {"w": torch.zeros(20_000)}}
SMALL = {"state": {"w": torch.zeros(20)}}


@pytest.fixture
def no_large_files():
    """Files may grow to 16 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_may_not_grow_stops_the_save_and_keeps_the_old_state(tmp_path, no_large_files):
    publish(tmp_path, 1, groups=SMALL)
    with pytest.raises(ResourceError, match=r"cannot save step 2 .*File too large") as caught:
        publish(tmp_path, 2, groups=BIG)
    assert caught.value.exit_code == 6
    assert os.listdir(folder_of(tmp_path)) == ["step-00000001"]
    publish(tmp_path, 3, groups=SMALL)
    verify(latest(tmp_path).path)


def test_a_log_that_may_not_grow_keeps_whole_lines(tmp_path, no_large_files):
    log = EventLog(JsonLines(tmp_path / "log"))

    def fill():
        for step in range(1000):
            log.emit("train", step, fields={"text": "x" * 100})

    with pytest.raises(ResourceError, match=r"cannot write .*log: File too large"):
        fill()
    written = len(read(tmp_path / "log"))
    assert 50 < written < 200
    assert (tmp_path / "log").read_bytes().endswith(b"}\n")
    log.close()


def test_a_log_on_a_full_device_says_so():
    log = JsonLines("/dev/full")
    with pytest.raises(ResourceError, match="No space left on device"):
        log.write({"event": "train", "step": 1})
    os.close(log._handle)


def as_nobody(work):
    """Run ``work`` in a process without rights and return what it raised."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses no other thread
        pid = os.fork()
    if pid == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setuid(65534)
            work()
        except ResourceError as error:
            os.write(writer, f"{error.exit_code} {error.message}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader, "rb") as pipe:
        return pipe.read().decode()


def test_a_run_that_may_only_be_read_is_refused_at_once_and_left_alone(tmp_path):
    publish(tmp_path, 1, groups=SMALL)
    folders = [tmp_path, *tmp_path.parents[:3], folder_of(tmp_path)]
    modes = [folder.stat().st_mode for folder in folders]
    for folder in folders:
        folder.chmod(0o555)

    def locked():
        with lock(tmp_path):
            pass

    attempts = {
        "cannot write": locked,
        "cannot save step 2": lambda: publish(tmp_path, 2, groups=SMALL),
        "config.toml": lambda: RunFolder(tmp_path).save(tmp_path / "config.toml", "x"),
        "events.jsonl": lambda: JsonLines(tmp_path / "events.jsonl"),
    }
    try:
        for words, attempt in attempts.items():
            said = as_nobody(attempt)
            assert said.startswith("6 ")
            assert words in said
            assert "Permission denied" in said
    finally:
        for folder, mode in zip(folders, modes, strict=True):
            folder.chmod(mode)
    assert step_of(latest(tmp_path).path) == 1
    assert os.listdir(tmp_path) == ["checkpoints"]
