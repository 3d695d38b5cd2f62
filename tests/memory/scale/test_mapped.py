"""Values in mapped files: the same memory, in another place."""

import errno
import os

import psutil
import pytest
import torch

from torchemo.core.errors import ResourceError
from torchemo.memory.scale import mapped
from torchemo.memory.scale.mapped import mapped_zeros
from torchemo.memory.store import EpisodicMemory


def filled(folder, count=7, *, dtype=torch.float32):
    memory = EpisodicMemory(5, 2, values_dir=folder, value_dtype=dtype)
    g = torch.Generator().manual_seed(0)
    for _ in range(count):
        values = {"w": torch.randn(1, 3, 2, generator=g), "b": torch.randn(1, generator=g)}
        memory.write(torch.randn(1, 2, generator=g), values)
    return memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_read_and_saved_is_the_same_as_in_ram(tmp_path, dtype):
    ram, disk = filled(None, dtype=dtype), filled(tmp_path, dtype=dtype)
    slots = torch.tensor([[4, 0, 2]])
    for name, value in ram.read(slots).items():
        assert torch.equal(value, disk.read(slots)[name])
    saved = disk.state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in ram.state_dict().items())
    assert list(tmp_path.iterdir()) == []  # the files have no name


def test_a_restored_memory_keeps_its_values_in_files_again(tmp_path):
    memory = filled(tmp_path)
    other = EpisodicMemory(5, 2, values_dir=tmp_path)
    other.load_state_dict(memory.state_dict())
    assert _in_file(other.values["w"], tmp_path)
    before = memory.values["w"].clone()
    other.values["w"].zero_()
    assert torch.equal(memory.values["w"], before)
    assert not _in_file(filled(None).values["w"], tmp_path)


def test_numbers_that_nobody_looks_at_are_not_in_ram(tmp_path):
    """10^4 slots of 4 kB here; benchmarks/results/memory.json has 10^5 slots of 16 kB."""
    process = psutil.Process()
    before = process.memory_info().rss
    zeros = mapped_zeros((10_000, 1024), dtype=torch.float32, folder=tmp_path)
    assert process.memory_info().rss - before < 4_000_000
    zeros[77] = 1.0
    assert float(zeros[76:79].sum()) == 1024


def test_no_room_and_no_folder_are_told_before_anything_is_written(tmp_path, monkeypatch):
    with pytest.raises(ResourceError, match="no room"):
        mapped_zeros((2, 2), dtype=torch.float32, folder=tmp_path / "nowhere")

    def full(handle, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(mapped.os, "posix_fallocate", full)
    with pytest.raises(ResourceError, match=r"16 bytes.*No space left"):
        mapped_zeros((2, 2), dtype=torch.float32, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_needs_no_file(tmp_path):
    assert mapped_zeros((0, 3), dtype=torch.float32, folder=tmp_path).shape == (0, 3)


def _in_file(tensor, folder):
    """Whether the tensor's pages belong to a file that was in ``folder``."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if first <= tensor.data_ptr() < last:
                return str(folder) in line
    return False
