"""Packed sets: the same images, whole or not at all, and no silent damage."""

import errno
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from torchemo.core.errors import DataError, ResourceError
from torchemo.data.index import ClassIndex
from torchemo.data.listing import join, listing_of
from torchemo.data.load import find, load
from torchemo.data.packed import is_packed, open_packed, pack

TREE = {
    f"{name}/{i}.png": 10 * c + i for c, name in enumerate(["jay", "tit", "wren"]) for i in range(3)
}
LISTED = {"train": ["wren"], "val": ["tit"], "test": ["jay"]}


@pytest.fixture
def birds(tree):
    return find(tree(TREE), splits=LISTED, domain="birds")


def test_a_packed_set_is_the_same_set_as_a_memory_map(birds, tree, tmp_path):
    report = pack(birds, tmp_path / "packed")
    index = open_packed(tmp_path / "packed")
    assert isinstance(index.images, np.memmap)
    whole = load(tree(TREE), splits=LISTED, domain="birds")
    assert index.fingerprint() == whole.fingerprint()
    assert report == (tmp_path / "packed", 9, 3, ())
    assert sorted(p.name for p in (tmp_path / "packed").iterdir()) == ["images.npy", "index.json"]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".tmp")]


def test_load_opens_a_packed_set_and_resizes_it_when_asked(birds, tmp_path):
    pack(birds, tmp_path / "packed")
    assert isinstance(load(tmp_path / "packed").images, np.memmap)
    assert isinstance(load(tmp_path / "packed", image_size=8, channels=3).images, np.memmap)
    small = load(tmp_path / "packed", image_size=4, channels=1)
    assert small.shape == (1, 4, 4)
    assert small.class_split == ("train", "val", "test")
    assert load(tmp_path / "packed", splits={"test": ["wren"]}).class_names == ("wren",)


def test_options_reach_the_pictures(birds, tmp_path):
    told = []
    pack(
        birds,
        tmp_path / "packed",
        image_size=5,
        channels=1,
        resample="box",
        progress=lambda *seen: told.append(seen),
    )
    index = open_packed(tmp_path / "packed")
    assert index.shape == (1, 5, 5)
    assert told[-1] == (9, 9)
    assert json.loads((tmp_path / "packed" / "index.json").read_text())["resample"] == "box"


def test_several_sources_and_sets_in_memory_are_packed_together(birds, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 8), np.uint8)
    memory = ClassIndex(images, np.array([1, 0, 1, 0]), ["a", "b"], ["train", "test"], ["x", "x"])
    pack(join([birds, listing_of(memory, name="memory")]), tmp_path / "packed")
    index = open_packed(tmp_path / "packed")
    assert index.domains == ("birds", "x")
    part = index.subset(domain="x")
    assert np.array_equal(part.images[part.images_of(0)], images[[1, 3]])
    assert part.class_split == ("train", "test")


def test_bad_pictures_stop_packing_or_are_named_in_the_report(tree, tmp_path):
    listing = find(tree(TREE | {"tit/bad.png": b"text"}), splits=LISTED)
    with pytest.raises(DataError, match=r"bad\.png: is no readable"):
        pack(listing, tmp_path / "packed")
    assert os.listdir(tmp_path) == ["set"]
    report = pack(listing, tmp_path / "packed", skip_bad=True)
    assert [(pathlib.Path(bad.name).name, report.images) for bad in report.skipped] == [
        ("bad.png", 9)
    ]
    stored = json.loads((tmp_path / "packed" / "index.json").read_text())["skipped"]
    assert stored == [bad._asdict() for bad in report.skipped]


def test_an_existing_place_or_a_missing_parent_is_refused_and_kept(birds, tmp_path):
    (tmp_path / "packed").mkdir()
    with pytest.raises(DataError, match="packed: exists already"):
        pack(birds, tmp_path / "packed")
    with pytest.raises(DataError, match="nowhere: is no folder"):
        pack(birds, tmp_path / "nowhere" / "packed")


def test_a_disk_without_room_is_noticed_before_anything_is_written(birds, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1))
    with pytest.raises(ResourceError, match="needs 1728 bytes, the disk has 1 left"):
        pack(birds, tmp_path / "packed")
    assert os.listdir(tmp_path) == ["set"]


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_writes_is_not(birds, tmp_path):
    dead, alive = tmp_path / ".tmp-packed-00000000", tmp_path / ".tmp-packed-11111111"
    others = [
        tmp_path / name for name in (".tmp-packed-2", ".tmp-other-33333333", "packed-44444444")
    ]
    for folder in (dead, alive, *others):
        folder.mkdir()
        (folder / "images.npy").write_bytes(b"half an image")
    elsewhere = tmp_path / "precious"
    elsewhere.mkdir()
    (tmp_path / ".tmp-packed-55555555").symlink_to(elsewhere)
    code = (
        "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire();"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code + " print(1, flush=True); sys.stdin.read()", f"{alive}.lock"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout.readline()
    pack(birds, tmp_path / "packed")
    assert not dead.exists()
    assert all((folder / "images.npy").exists() for folder in (alive, *others))
    assert elsewhere.is_dir()
    holder.communicate()
    shutil.rmtree(tmp_path / "packed")
    pack(birds, tmp_path / "packed")
    assert not alive.exists()


def test_a_process_killed_while_packing_leaves_nothing_after_the_next_one(tree, tmp_path):
    root = tree(TREE)
    code = f"""
import os, signal
from torchemo.data.load import find
from torchemo.data.packed import pack
pack(find({str(root)!r}), {str(tmp_path / "packed")!r},
     progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".tmp-packed-")]
    pack(find(root), tmp_path / "packed")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".tmp-")]


class Faults:
    """Fail the N-th of the operations that reach the disk."""

    def __init__(self, monkeypatch, nth, error):
        self.left, self.error, self.names = nth, error, []
        for owner, name in ((os, "fsync"), (os, "rename"), (os, "mkdir")):
            monkeypatch.setattr(owner, name, self.wrap(name, getattr(owner, name)))
        real_open = pathlib.Path.open

        def opened(path, mode="r", *args, **options):
            if "w" in mode:
                self.step("open")
            stream = real_open(path, mode, *args, **options)
            if "w" in mode:
                stream.write = self.wrap("write", stream.write)
            return stream

        monkeypatch.setattr(pathlib.Path, "open", opened)

    def step(self, name):
        self.names.append(name)
        self.left -= 1
        if self.left == 0:
            raise OSError(self.error, os.strerror(self.error))

    def wrap(self, name, function):
        def wrapped(*args, **options):
            self.step(name)
            return function(*args, **options)

        return wrapped


@pytest.mark.parametrize(
    ("error", "expected"), [(errno.ENOSPC, ResourceError), (errno.EIO, DataError)]
)
def test_whichever_disk_operation_fails_the_set_is_there_in_full_or_not_at_all(
    birds, tmp_path, monkeypatch, error, expected
):
    for nth in range(1, 200):
        with monkeypatch.context() as patch:
            faults = Faults(patch, nth, error)
            try:
                pack(birds, tmp_path / "packed")
                failed = False
            except expected:
                failed = True
        left = sorted(os.listdir(tmp_path))
        if "packed" in left:
            assert len(open_packed(tmp_path / "packed")) == 9
            shutil.rmtree(tmp_path / "packed")
        else:
            assert failed
        assert sorted(os.listdir(tmp_path)) == ["set"]
        if nth > len(faults.names):
            assert not failed
            break
    order = [name for name in faults.names if name in ("fsync", "rename")]
    assert order == ["fsync", "fsync", "fsync", "rename", "fsync"]
    assert nth == len(faults.names) + 1


def test_what_did_not_reach_the_disk_is_noticed_before_publishing(birds, tmp_path, monkeypatch):
    real_fsync = os.fsync

    def lose(handle):
        real_fsync(handle)
        for index in tmp_path.glob(".tmp-*/index.json"):
            os.truncate(index.with_name("images.npy"), 100)

    monkeypatch.setattr(os, "fsync", lose)
    with pytest.raises(DataError, match=r"images\.npy: is damaged \(size 100"):
        pack(birds, tmp_path / "packed")
    assert os.listdir(tmp_path) == ["set"]


def test_every_flipped_bit_and_every_cut_is_noticed_and_the_file_is_named(birds, tmp_path):
    pack(birds, tmp_path / "packed")
    chance = random.Random(0)
    for name in ("images.npy", "index.json"):
        file = tmp_path / "packed" / name
        good = file.read_bytes()
        places = [(chance.randrange(len(good)), 1 << chance.randrange(8)) for _ in range(150)]
        damaged = [good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :] for at, bit in places]
        damaged += [good[:cut] for cut in (0, 1, 8, 64, len(good) // 2, len(good) - 1)]
        for content in damaged:
            file.write_bytes(content)
            with pytest.raises(DataError, match=name):
                open_packed(tmp_path / "packed")
        file.write_bytes(good)
    assert len(open_packed(tmp_path / "packed")) == 9


def test_the_checksum_of_the_pictures_can_be_passed_over_but_their_size_cannot(birds, tmp_path):
    pack(birds, tmp_path / "packed")
    file = tmp_path / "packed" / "images.npy"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert len(open_packed(tmp_path / "packed", verify=False)) == 9
    file.write_bytes(good[:-1])
    with pytest.raises(
        DataError, match=rf"is damaged \(size {len(good) - 1}, expected {len(good)}\)"
    ):
        open_packed(tmp_path / "packed", verify=False)


def forge(folder, **changes):
    """Rewrite an index and give it a fitting checksum, as someone with ill will could."""
    from torchemo.data.packed import _content_sha256

    file = folder / "index.json"
    content = json.loads(file.read_text()) | changes
    content.pop("sha256")
    content = {key: value for key, value in content.items() if value is not None}
    file.write_text(json.dumps(content | {"sha256": _content_sha256(content)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": None}, "'classes' is missing or garbled"),
        ({"classes": []}, "do not add up"),
        ({"classes": [{"name": "a", "split": "train", "domain": "d", "images": 10**15}]}, "add up"),
        ({"classes": [{"name": "a", "split": "dev", "domain": "d", "images": 9}]}, "split 'dev'"),
        (
            {
                "classes": [
                    {"name": name, "split": "train", "domain": "d", "images": images}
                    for name, images in (("a", 10), ("b", -1))
                ]
            },
            "add up",
        ),
        ({"shape": [9, 3, 8]}, "images.npy: should be uint8 of shape"),
        ({"shape": [float("inf"), 3, 8, 8]}, "Infinity is no number"),
        ({"shape": [float("nan"), 3, 8, 8]}, "NaN is no number"),
        ({"files": []}, "missing or garbled"),
        ({"shape": "all"}, "missing or garbled"),
        ({"files": {"images.npy": 7}}, "missing or garbled"),
        ({"version": 3}, r"has format version 3, this is 2.\nUpgrade"),
        ({"format": "zip"}, "is not the index of a packed set"),
    ],
)
def test_a_forged_index_is_refused(birds, tmp_path, changes, message):
    pack(birds, tmp_path / "packed")
    forge(tmp_path / "packed", **changes)
    with pytest.raises(DataError, match=message):
        open_packed(tmp_path / "packed")


def test_pictures_replaced_by_objects_are_refused(birds, tmp_path):
    pack(birds, tmp_path / "packed")
    file = tmp_path / "packed" / "images.npy"
    np.save(file, np.array([{}] * 9, dtype=object), allow_pickle=True)
    forge(tmp_path / "packed", files={"images.npy": {"bytes": file.stat().st_size, "sha256": ""}})
    with pytest.raises(DataError, match=r"images\.npy: cannot be mapped"):
        open_packed(tmp_path / "packed", verify=False)


def test_what_is_left_of_a_packed_set_is_still_seen_as_one(birds, tmp_path, tree):
    pack(birds, tmp_path / "packed")
    (tmp_path / "packed" / "images.npy").unlink()
    assert is_packed(tmp_path / "packed")
    with pytest.raises(DataError, match=r"images\.npy: is damaged \(size 0"):
        load(tmp_path / "packed")
    (tmp_path / "packed" / "images.npy").touch()
    (tmp_path / "packed" / "index.json").write_text("{}")
    with pytest.raises(DataError, match=r"index\.json: is not the index of a packed set"):
        load(tmp_path / "packed")
    assert not is_packed(tree({"wren/1.png": 1, "index.json": b"{}"}, name="other"))
