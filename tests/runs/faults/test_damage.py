"""Damaged checkpoints: every cut and every flipped bit is found, and the file is named."""

import random
import shutil
import struct

import pytest
import torch

from torchemo.core.errors import CheckpointError
from torchemo.runs.storage.checkpoint import load, publish, step_folder, step_of, verify
from torchemo.runs.storage.history import latest

pytestmark = pytest.mark.faults

FILES = ("state.safetensors", "memory.safetensors", "manifest.json")


@pytest.fixture
def run(ram):
    """A run with the steps 1200 and 1240."""
    generator = torch.Generator().manual_seed(0)
    for step in (1200, 1240):
        weights = {"w": torch.randn(7, 9, generator=generator), "b": torch.arange(5)}
        memory = {"keys": torch.randn(6, 4, generator=generator), "filled": torch.tensor(6)}
        publish(ram, step, groups={"state": weights, "memory": memory}, info={"best": 0.25, "é": 1})
    return ram


def complaints(path):
    """What loading and verifying say; None is silence."""
    said = []
    for check in (load, verify):
        try:
            check(path)
            said.append(None)
        except CheckpointError as error:
            said.append(str(error))
    return said


def cuts(raw):
    header = 8 + struct.unpack("<Q", raw[:8])[0] if raw[0] != ord("{") else 20
    return sorted({0, 1, 7, 8, 9, header - 1, header, header + 1, len(raw) // 2, len(raw) - 1})


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_found_and_the_step_before_is_used(run, name):
    path = step_folder(run, 1240)
    raw = (path / name).read_bytes()
    for size in cuts(raw):
        (path / name).write_bytes(raw[:size])
        for said in complaints(path):
            assert said is not None, f"cut to {size} of {len(raw)} bytes"
            assert f"{name} of step-00001240 is damaged" in said
            if name != "manifest.json":
                assert f"(size {size}, expected {len(raw)})" in said
        found = latest(run)
        assert step_of(found.path) == 1200
        assert [damaged.path for damaged in found.skipped] == [path]
    (path / name).write_bytes(raw)
    assert complaints(path) == [None, None]


@pytest.mark.parametrize("name", FILES)
def test_bytes_too_many_are_found(run, name):
    file = step_folder(run, 1240) / name
    raw = file.read_bytes()
    for extra in (b"\0", b" ", b"\n", b"{}", raw):
        file.write_bytes(raw + extra)
        assert all(name in str(said) for said in complaints(file.parent))


@pytest.mark.parametrize("flips", [2000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_flipped_bit_is_silent(run, flips):
    path = step_folder(run, 1240)
    raws = {name: (path / name).read_bytes() for name in FILES}
    rng = random.Random(flips)
    for _ in range(flips):
        name = rng.choice(FILES)
        raw = bytearray(raws[name])
        bit = rng.randrange(8 * len(raw))
        raw[bit // 8] ^= 1 << bit % 8
        (path / name).write_bytes(raw)
        for said in complaints(path):
            assert said is not None, f"bit {bit} of {name}"
            assert f"{name} of step-00001240" in said
            assert said.count("\n") < 6
        (path / name).write_bytes(raws[name])
    assert complaints(path) == [None, None]


@pytest.mark.slow
def test_no_bit_of_the_whole_checkpoint_can_be_flipped_in_silence(run):
    path = step_folder(run, 1240)
    for name in FILES:
        raw = (path / name).read_bytes()
        for bit in range(8 * len(raw)):
            flipped = bytearray(raw)
            flipped[bit // 8] ^= 1 << bit % 8
            (path / name).write_bytes(flipped)
            assert None not in complaints(path), f"bit {bit} of {name}"
        (path / name).write_bytes(raw)


@pytest.mark.parametrize("name", FILES)
def test_swapped_and_stale_files_are_found(run, name):
    """A file of another step is sound in itself, but it is not this checkpoint's."""
    shutil.copy(step_folder(run, 1200) / name, step_folder(run, 1240) / name)
    assert None not in complaints(step_folder(run, 1240))


def test_groups_cannot_trade_places(run):
    path = step_folder(run, 1240)
    (path / "state.safetensors").rename(path / "other")
    (path / "memory.safetensors").rename(path / "state.safetensors")
    (path / "other").rename(path / "memory.safetensors")
    assert None not in complaints(path)
