"""Commands keep freed memory unless told not to; importing the library sets nothing."""

import subprocess
import sys

import pytest

from torchemo.core import allocator as memory
from torchemo.core.workers import usable_cores
from torchemo.training.device import task_workers


@pytest.fixture
def kept(monkeypatch):
    calls = []
    monkeypatch.setattr(memory, "keep_memory", lambda: calls.append(1) or True)
    monkeypatch.delenv(memory.SWITCH, raising=False)
    return calls


def test_a_command_keeps_memory_unless_a_flag_or_the_environment_says_otherwise(kept, monkeypatch):
    task_workers()
    assert kept == [1]
    task_workers(release_memory=True)
    assert kept == [1]
    monkeypatch.setenv(memory.SWITCH, "0")
    task_workers()
    assert kept == [1]


def test_the_flag_reaches_the_allocator(kept, torchemo, point_runs):
    words = ("eval", point_runs / "base", "--tasks", 2, "--split", "val")
    assert torchemo(*words, "--release-memory").code == 0
    assert kept == []
    assert torchemo(*words).code == 0
    assert kept == [1]


def test_importing_the_library_leaves_the_allocator_alone():
    code = """
import ctypes
class Spy(ctypes.CDLL):
    def __getattr__(self, name):
        assert name != "mallopt", name
        return super().__getattr__(name)
ctypes.CDLL = Spy
import torchemo, torchemo.models.fused, torchemo.lab.bench
try:
    torchemo.models.fused.keep_memory()
except AssertionError:
    pass
else:
    raise SystemExit("the spy does not see it")
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("limit", ["two", "\u00b2", "-1", "0", "1.5", "", "9" * 5000])
def test_a_limit_of_threads_that_is_no_number_is_none(monkeypatch, limit):
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert task_workers(release_memory=True) == usable_cores()
