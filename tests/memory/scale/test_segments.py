"""Values in files: the same memory in another place, versions instead of copies, damage by name."""

import errno
import gc
import json
import os
import shutil
import stat

import pytest
import torch

from torchemo.core.errors import CheckpointError, ResourceError
from torchemo.core.rng import generator_for
from torchemo.memory.controllers import CONTROLLERS
from torchemo.memory.scale import segment, segments, version
from torchemo.memory.scale.rows import Layout
from torchemo.memory.scale.segments import FileRows, check_folder
from torchemo.memory.slots import SlotAdam
from torchemo.memory.store import EpisodicMemory

SHAPES = {"w": (3, 2), "b": (), "x": (5,)}


def tasks(count, seed=0):
    g = generator_for(0, "tasks", seed)
    values = {n: torch.randn(count, *s, generator=g) for n, s in SHAPES.items()}
    return torch.randn(count, 2, generator=g), values


def filled(folder, count=7, *, dtype=torch.float32, capacity=5, controller="lru", seed=0):
    made = CONTROLLERS[controller]()
    memory = EpisodicMemory(capacity, 2, values_dir=folder, value_dtype=dtype, controller=made)
    for b in range(count):
        keys, values = tasks(1, seed=f"{seed} {b}")
        memory.write(keys, values)
    return memory


def blank(folder, memory):
    return EpisodicMemory(
        memory.capacity,
        2,
        values_dir=folder,
        value_dtype=memory.value_dtype,
        controller=memory.controller,
    )


def everything(memory):
    return memory.read(torch.arange(memory.capacity)[None])


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def live(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(".live-"))


@pytest.fixture
def small_files(monkeypatch):
    """Segments of two rows, so that few writes make many files."""
    monkeypatch.setattr(segments, "rows_per_file", lambda capacity, size: 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_read_is_the_same_as_in_ram(tmp_path, dtype):
    ram, disk = filled(None, dtype=dtype), filled(tmp_path, dtype=dtype)
    slots = torch.tensor([[4, 0, 2], [2, 2, 1]])
    assert equal(ram.read(slots), disk.read(slots))
    assert all(value.is_contiguous() for value in disk.read(slots).values())
    assert equal(ram.values, disk.values)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("controller", CONTROLLERS)
def test_any_number_of_overwrites_reads_as_in_ram_and_takes_at_most_twice_the_rows(
    tmp_path, controller
):
    ram, disk = (filled(f, 2, controller=controller) for f in (None, tmp_path))
    for turn in range(60):
        keys, values = tasks(1 + turn % 7, seed=turn)  # also more tasks than slots
        recalled = torch.tensor([[turn % 2, 1]])
        for memory in (ram, disk):
            memory.touch(recalled)
            memory.write(keys, values)
        assert equal(everything(ram), everything(disk))
        assert sum(s.used for s in disk.contents._segments.values()) <= 2 * 5 + 2 + 7
    assert equal(
        {n: t for n, t in ram.state_dict().items() if not n.startswith("values")},
        {n: t for n, t in disk.state_dict().items() if n != "version"},
    )


def test_twenty_slots_are_twenty_reads_and_a_slot_is_read_once(tmp_path, monkeypatch):
    memory = filled(tmp_path, 30, capacity=30)
    reads = []
    real = segment.Segment.read
    monkeypatch.setattr(
        segment.Segment, "read", lambda self, row, into: reads.append(row) or real(self, row, into)
    )
    memory.read(torch.arange(20)[None])
    assert len(reads) == 20
    reads.clear()
    memory.read(torch.tensor([[3, 4, 3], [4, 3, 4]]))
    assert sorted(reads) == [3, 4]


def test_slots_that_learn_step_as_in_ram(tmp_path):
    memories = [filled(folder, 4) for folder in (None, tmp_path)]
    g = generator_for(1, "rows")
    for _ in range(3):
        rows = {n: torch.randn(2, *s, generator=g) for n, s in SHAPES.items()}
        slots, weights = torch.tensor([[0, 2], [3, 0]]), torch.rand(2, 2, generator=g)
        for memory in memories:
            memory.step_slots(rows, slots, weights=weights, optimizer=SlotAdam(update="lazy"))
    assert equal(*(everything(memory) for memory in memories))
    assert equal(*(memory.moments for memory in memories))


# -- versions ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_files")
def test_every_version_is_restored_bit_for_bit_whatever_was_written_since(tmp_path):
    memory = filled(tmp_path)
    versions = []
    for turn in range(12):
        memory.write(*tasks(1 + turn % 3, seed=100 + turn))
        state = {n: t.clone() for n, t in memory.state_dict().items()}
        versions.append((state, everything(memory)))
    for state, expected in reversed(versions):
        other = blank(tmp_path, memory)
        other.load_state_dict(state)
        assert equal(everything(other), expected)
        before = everything(memory)
        other.write(*tasks(3, seed=5))  # what is restored is written to without touching the rest
        assert equal(everything(memory), before)
        again = blank(tmp_path, memory)
        again.load_state_dict(state)
        assert equal(everything(again), expected)


def test_a_version_takes_no_second_copy_of_the_rows(tmp_path):
    memory = filled(tmp_path, 5)
    first = memory.contents.snapshot()
    memory.write(*tasks(1, seed=9))
    second = memory.contents.snapshot()
    a, b = (
        {path.stat().st_ino for path in (tmp_path / name).glob("*.rows")}
        for name in (first, second)
    )
    assert len(a) == 1
    assert a < b
    assert first != second == memory.contents.snapshot()  # nothing was written: nothing new is kept


def test_versions_outlive_their_process_and_its_other_files_do_not(tmp_path):
    memory = filled(tmp_path)
    state = {n: t.clone() for n, t in memory.state_dict().items()}
    expected = everything(memory)
    assert len(live(tmp_path)) == 1
    other = blank(tmp_path, memory)
    del memory
    gc.collect()
    assert live(tmp_path) == []
    other.load_state_dict(state)
    assert equal(everything(other), expected)


def test_what_a_dead_process_left_is_swept_and_what_a_living_one_has_is_not(tmp_path):
    node = segments.platform.node() or "host"
    dead = tmp_path / f".live-{node}-{2**22 + 1}-{'0' * 12}"
    elsewhere = tmp_path / f".live-other-{node}-{2**22 + 1}-{'0' * 12}"
    dead.mkdir()
    elsewhere.mkdir()
    memory = filled(tmp_path)
    assert not dead.exists()
    assert elsewhere.exists()
    other = filled(tmp_path)
    assert len(live(tmp_path)) == 3
    assert equal(everything(memory), everything(other))


@pytest.mark.usefixtures("small_files")
def test_versions_that_nobody_names_are_collected_and_those_of_others_are_not(tmp_path):
    mine, theirs = filled(tmp_path), filled(tmp_path)
    mine.contents.owner, theirs.contents.owner = "mine", "theirs"
    names = []
    for turn in range(4):
        mine.write(*tasks(2, seed=turn))
        names.append(mine.contents.snapshot())
    other = theirs.contents.snapshot()
    assert version.collect(tmp_path, "mine", keep={names[1], names[3]}) == sorted(
        [names[0], names[2]]
    )
    left = {path.name for path in tmp_path.glob("version-*")}
    assert left == {names[1], names[3], other}
    assert version.collect(tmp_path, "", keep=set()) == []
    restored = FileRows.opened(tmp_path, names[1])
    assert restored.digest == version.read(tmp_path, names[1]).digest


@pytest.mark.usefixtures("small_files")
def test_a_restored_memory_may_lose_the_version_it_came_from_once_it_made_its_own(tmp_path):
    memory = filled(tmp_path)
    state = {n: t.clone() for n, t in memory.state_dict().items()}
    other = blank(tmp_path, memory)
    other.load_state_dict(state)
    first = bytes(state["version"].tolist()).decode()
    own = other.contents.snapshot()
    assert own != first
    shutil.rmtree(tmp_path / first)
    other.write(*tasks(1, seed=8))
    expected = everything(other)
    last = FileRows.opened(tmp_path, other.contents.snapshot())
    assert torch.equal(last.layout.unpack(last.read(torch.arange(5)))["w"], expected["w"][0])


def test_equal_contents_have_equal_digests_wherever_the_rows_lie(tmp_path):
    one, other = filled(tmp_path), filled(tmp_path)
    assert one.contents.digest == other.contents.digest
    name, twin = one.contents.snapshot(), other.contents.snapshot()
    assert name != twin
    assert name[:20] == twin[:20]
    other.write(*tasks(1, seed=3))
    assert other.contents.digest != one.contents.digest


def test_a_state_with_values_in_it_opens_in_files(tmp_path):
    ram = filled(None, 9, capacity=2000)
    disk = EpisodicMemory(2000, 2, values_dir=tmp_path)
    disk.load_state_dict(ram.state_dict())
    assert equal(everything(ram), everything(disk))


def test_a_disk_without_links_gets_copies(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(version.os, "link", refuse)
    memory = filled(tmp_path)
    other = blank(tmp_path, memory)
    other.load_state_dict(memory.state_dict())
    assert equal(everything(memory), everything(other))


# -- refusals ----------------------------------------------------------------------------------------


def test_a_full_disk_refuses_a_write_and_nothing_is_lost(tmp_path, monkeypatch):
    memory = filled(tmp_path, 5)
    before = {n: t.clone() for n, t in memory.state_dict().items()}
    expected = everything(memory)

    def full(handle, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(segment.os, "posix_fallocate", full)
    with pytest.raises(ResourceError, match=r"no room for .* bytes of values: No space left"):
        memory.write(*tasks(6, seed=3))
    assert equal(before, memory.state_dict())
    assert equal(everything(memory), expected)
    monkeypatch.undo()
    memory.write(*tasks(6, seed=3))
    ram = filled(None, 5)
    ram.write(*tasks(6, seed=3))
    assert equal(everything(memory), everything(ram))


def test_a_folder_that_is_missing_full_or_read_only_is_refused_before_the_first_step(
    tmp_path, monkeypatch
):
    with pytest.raises(ResourceError, match=r"no folder .*nowhere"):
        check_folder(tmp_path / "nowhere", 1)
    with pytest.raises(ResourceError, match=r"bytes, .* has .* free"):
        check_folder(tmp_path, 2**62)
    monkeypatch.setattr(segments.os, "access", lambda path, mode: False)
    with pytest.raises(ResourceError, match="may not be written"):
        check_folder(tmp_path, 1)
    monkeypatch.undo()
    check_folder(tmp_path, 1)
    with pytest.raises(ResourceError, match="no room"):
        filled(tmp_path / "nowhere")


def test_a_flipped_bit_is_told_by_slot_and_file_and_other_slots_are_read(tmp_path):
    memory = filled(tmp_path, 5)
    expected = everything(memory)
    name = memory.contents.snapshot()
    (file,) = (tmp_path / name).glob("*.rows")
    stride = memory.contents._segments[0].stride
    with file.open("r+b") as opened:
        opened.seek(3 * stride + 2)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CheckpointError, match=r"slot 3 is damaged: .*\.rows"):
        memory.read(torch.tensor([[3]]))
    kept = torch.tensor([[0, 1, 2, 4]])
    assert torch.equal(memory.read(kept)["w"], expected["w"][:, kept[0]])


def test_a_version_that_is_missing_damaged_or_short_is_told(tmp_path):
    memory = filled(tmp_path, 5)
    state = {n: t.clone() for n, t in memory.state_dict().items()}
    expected, name = everything(memory), bytes(state["version"].tolist()).decode()
    place = tmp_path / name
    (file,) = place.glob("*.rows")
    del memory

    def refused(match):
        other = EpisodicMemory(5, 2, values_dir=tmp_path)
        with pytest.raises(CheckpointError, match=match):
            other.load_state_dict(state)
        assert len(other) == 0

    for path in (place / "version.json", place / "slots.bin"):
        sound = path.read_bytes()
        for at in range(0, len(sound), max(1, len(sound) // 40)):
            path.write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
            refused("damaged")
        path.write_bytes(sound)
    rows = file.read_bytes()
    file.unlink()
    refused(r"\.rows cannot be read: No such file")
    file.write_bytes(rows[:100])
    refused(r"\.rows is damaged: it should hold 5 rows")
    file.write_bytes(rows)
    place.rename(tmp_path / "away")
    refused("values of this checkpoint are not in")
    (tmp_path / "away").rename(place)
    other = EpisodicMemory(5, 2, values_dir=tmp_path)
    other.load_state_dict(state)
    assert equal(everything(other), expected)
    with pytest.raises(CheckpointError, match=r"memory\.values_dir is not set"):
        EpisodicMemory(5, 2).load_state_dict(state)


def test_values_of_another_network_or_number_of_slots_are_refused_and_change_nothing(tmp_path):
    memory = filled(tmp_path, 5)
    other = EpisodicMemory(5, 2, values_dir=tmp_path)
    other.write(torch.zeros(1, 2), {"w": torch.ones(1, 4)})
    before = everything(other)
    with pytest.raises(CheckpointError, match=r"5 slots of 12 numbers in 3 tensors.*4 numbers"):
        other.load_state_dict(memory.state_dict())
    assert equal(everything(other), before)
    fewer = EpisodicMemory(4, 2, values_dir=tmp_path)
    with pytest.raises(CheckpointError, match="this memory holds 4"):
        fewer.load_state_dict(memory.state_dict())
    with pytest.raises(CheckpointError, match="other values than this memory"):
        other.contents.restore(memory.contents.snapshot())
    assert equal(everything(other), before)


def test_a_name_that_leads_elsewhere_is_refused(tmp_path):
    memory = filled(tmp_path, 5)
    name = memory.contents.snapshot()
    for wrong in (f"../{tmp_path.name}/{name}", "..", "segment", f"{name}/x"):
        with pytest.raises(CheckpointError, match="not in"):
            version.read(tmp_path, wrong)
    index = tmp_path / name / "version.json"
    body = json.loads(index.read_bytes())["body"]
    body["segments"] = {n: ["../../etc/passwd", 1] for n in body["segments"]}
    index.write_bytes(version._sealed(body))
    with pytest.raises(CheckpointError, match="damaged"):
        version.read(tmp_path, name)


def test_files_of_values_are_no_programs(tmp_path):
    name = filled(tmp_path, 5).contents.snapshot()
    for path in (tmp_path / name).iterdir():
        assert not path.stat().st_mode & stat.S_IXUSR


def test_small_rows_never_lie_in_two_pages_and_large_ones_begin_at_one():
    for size in (1, 63, 64, 65, 1024, 2048, 2049, 4096, 131_012):
        stride = segment.stride_of(size)
        assert stride >= size
        assert 4096 % stride == 0 or stride % 4096 == 0
    assert segments.rows_per_file(10**7, 1024) == 65_536
    assert segments.rows_per_file(100, 131_072) == 100
    assert -(-(10**8) // segments.rows_per_file(10**8, 131_072)) <= segments.MOST_FILES


def test_a_value_without_numbers_needs_no_read(tmp_path):
    rows = FileRows(tmp_path, 2, Layout({"w": torch.Size((0,))}), torch.float32)
    rows.write([0], rows.stage({"w": torch.zeros(1, 0)}), [0])
    assert rows.read(torch.tensor([0, 1])).shape == (2, 0)


def test_a_memory_that_keeps_no_versions_names_what_it_holds(tmp_path):
    memory, twin = filled(tmp_path), filled(tmp_path)
    memory.contents.owner = None
    name = bytes(memory.state_dict()["version"].tolist()).decode()
    assert list(tmp_path.glob("version-*")) == []
    assert twin.contents.snapshot().startswith(name)
    assert len(name) == version.DIGEST_ENDS
