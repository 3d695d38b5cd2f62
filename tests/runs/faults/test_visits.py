"""A store of visits under kills, power cuts, full disks, flipped bits and two writers."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from syscall_tap import READS, Tap, power_cuts
from test_disk_limits import as_nobody

from torchemo.core.errors import CheckpointError, ConfigError, ResourceError
from torchemo.memory.lifelong.visits import Sight
from torchemo.runs.folder import LOCK, OWNER
from torchemo.runs.storage.seal import seal
from torchemo.runs.visits import files
from torchemo.runs.visits.index import INDEX, Index, Settings
from torchemo.runs.visits.store import New, reading, writing

pytestmark = pytest.mark.faults

EMPTY = Index("0" * 64, "a run", Settings(capacity=8))
OWN = {LOCK, OWNER}
"""What says who the writer is."""
VICTIM = Path(__file__).with_name("visits_victim.py")


def new(seed, *classes):
    g = torch.Generator().manual_seed(seed)
    values = {"head.weight": torch.randn(2, len(classes), 5, generator=g)}
    means = {"features": torch.randn(len(classes), 5, generator=g)}
    return New(Sight((1,) * len(classes), means), values, classes)


def keep(path, seed, *classes):
    with writing(path, otherwise=EMPTY) as store:
        store.keep(new(seed, *classes), when=f"2026-11-{seed:02d}")


def keep_a_third(path):
    keep(path, 3, "a", "c")


def forget_one(path):
    with writing(path) as store:
        store.forget(classes=["b"])


def rename_one(path):
    with writing(path) as store:
        store.rename("a", "z")


def merge_others(path):
    with writing(path) as store:
        store.merge([reading(path.parent / "other")])


ACTIONS = (keep_a_third, forget_one, rename_one, merge_others)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A store of two visits, another store of two."""
    folder = tmp_path_factory.mktemp("base")
    keep(folder / "store", 1, "a", "b")
    keep(folder / "store", 2, "a", "c")
    keep(folder / "other", 4, "a", "d")
    keep(folder / "other", 5, "d", "c")
    return folder


@pytest.fixture
def fresh(base, ram):
    """Make a new copy of the stores for every trial."""

    def copy():
        shutil.rmtree(ram / "work", ignore_errors=True)
        shutil.copytree(base, ram / "work")
        return ram / "work" / "store"

    return copy


@pytest.fixture
def _no_real_sync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: None)


def state(path):
    """Return what a store holds, after checking every byte of it."""
    store = reading(path)
    assert store.faults() == []
    return [(v.id, v.classes) for v in store.index.by_age]


def outcomes(action, fresh):
    path = fresh()
    before = state(path)
    action(path)
    assert state(path) != before
    return before, state(path)


def assert_tidy(path):
    """The next writer leaves nothing but what the index names."""
    with writing(path) as store:
        named = {files.file_name(v.id, k) for v in store.index.visits for k in files.KINDS}
    found = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}
    assert found - OWN == named | {INDEX}


@pytest.mark.usefixtures("_no_real_sync")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("action", ACTIONS)
def test_dying_at_any_call_leaves_the_old_state_or_the_new(fresh, action, half):
    allowed = outcomes(action, fresh)
    path = fresh()
    with Tap() as tap:
        action(path)
    assert len(tap.calls) > 15
    for at in range(1, len(tap.calls) + 1):
        path = fresh()
        with Tap(at, half=half) as tap:
            action(path)
        assert tap.dead
        assert state(path) in allowed
        assert_tidy(path)


@pytest.mark.usefixtures("_no_real_sync")
@pytest.mark.parametrize("action", ACTIONS)
def test_a_power_cut_at_any_call_leaves_the_old_state_or_the_new(fresh, ram, action):
    allowed, at, cuts = outcomes(action, fresh), 0, 0
    dead = True
    while dead:
        at += 1
        path = fresh()
        with Tap(at) as tap:
            action(path)
        dead = tap.dead
        for copy in power_cuts(path, tap, ram):
            cuts += 1
            assert state(copy) in (allowed if dead else allowed[1:])
            assert_tidy(copy)
    assert cuts > 1.5 * at


@pytest.mark.usefixtures("_no_real_sync")
@pytest.mark.parametrize("problem", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("action", ACTIONS)
def test_an_error_at_any_call_is_told_and_the_store_stays_whole(fresh, action, problem):
    before, after = outcomes(action, fresh)
    path = fresh()
    with Tap() as tap:
        action(path)
    for at, (name, target) in enumerate(tap.calls, start=1):
        if name == "close" and Path(target).name in OWN:
            continue  # everything is done and told by then
        path, told = fresh(), None
        with Tap(at, problem=problem):
            try:
                action(path)
            except (ResourceError, CheckpointError) as error:
                told = error
        if told is None:
            # What the lock can do without, and reading back what was synced.
            assert name in ("open", *READS) or Path(target).name in OWN or Path(target) == path
        else:
            assert os.strerror(problem) in told.message
        assert state(path) in (before, after)
        assert_tidy(path)


def test_a_file_that_may_not_grow_stops_the_visit_and_keeps_the_store(fresh, no_large_files):
    path = fresh()
    before = state(path)
    big = new(9, "a", "b")._replace(values={"w": torch.zeros(2, 40_000)})
    with writing(path) as store, pytest.raises(ResourceError, match="File too large"):
        store.keep(big, when="2026-11-09")
    assert state(path) == before
    assert len(list((path / files.FOLDER).iterdir())) == 4


@pytest.fixture
def no_large_files():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_every_flipped_bit_of_every_file_is_found_and_the_file_is_named(fresh):
    path = fresh()
    targets = [p for p in sorted(path.rglob("*")) if p.is_file() and p.name not in OWN]
    assert len(targets) == 5
    for target in targets:
        raw = target.read_bytes()
        for place in range(len(raw)):
            target.write_bytes(
                raw[:place] + bytes([raw[place] ^ 1 << place % 8]) + raw[place + 1 :]
            )
            try:
                found = reading(path).faults()
            except CheckpointError as error:
                found = [error.message]
            assert len(found) == 1
            assert target.name in found[0]
        target.write_bytes(raw)
    assert reading(path).faults() == []


def test_a_damaged_visit_is_refused_where_it_is_needed_and_can_be_forgotten(fresh):
    path = fresh()
    first = reading(path).index.by_age[0]
    target = path / files.file_name(first.id, "gradients")
    target.write_bytes(target.read_bytes()[:-4] + b"oops")
    memory = reading(path).memory(("head.weight",))
    with pytest.raises(CheckpointError, match="is damaged") as damaged:
        memory.visits[0].values["head.weight"]
    assert f"--visits {first.id}" in damaged.value.hint
    assert memory.visits[1].values["head.weight"].shape == (2, 2, 5)
    with writing(path) as store:
        store.forget(visits=[first.id])
    assert reading(path).faults() == []


def test_a_damaged_export_is_never_merged(fresh, tmp_path):
    path = fresh()
    other, out = reading(path.parent / "other"), tmp_path / "other.zip"
    files.export(other.source, other.index, out)
    raw, before, rng = out.read_bytes(), state(path), random.Random(0)
    for _ in range(150):
        place = rng.randrange(len(raw))
        out.write_bytes(
            raw[:place] + bytes([raw[place] ^ 1 << rng.randrange(8)]) + raw[place + 1 :]
        )
        try:
            with writing(path) as store:
                store.merge([reading(out)])
        except CheckpointError:
            assert state(path) == before
        else:  # a bit that means nothing, such as one of a date
            assert len(state(path)) == 4
            path = fresh()
    out.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CheckpointError):
        reading(out)


def test_a_zip_that_unfolds_to_more_than_it_says_is_not_read(tmp_path):
    out = tmp_path / "bomb.zip"
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(INDEX, b"0" * (files.MAX_INDEX + 1))
    with pytest.raises(CheckpointError, match="more than"):
        reading(out)


def test_a_second_writer_is_told_who_the_first_is(fresh):
    path = fresh()
    program = f"""
from pathlib import Path
from torchemo.runs.visits.store import writing
with writing(Path({str(path)!r})):
    print("ready", flush=True)
    input()
"""
    first = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout.readline() == "ready\n"
        with pytest.raises(
            ResourceError, match=rf"is being written by process {first.pid} on"
        ) as no:
            keep_a_third(path)
        assert "use another store" in no.value.hint
        assert len(state(path)) == 2  # looking is free
    finally:
        first.communicate("\n")
    keep_a_third(path)
    assert len(state(path)) == 3


def test_a_place_that_cannot_be_written_is_refused_before_any_work(tmp_path):
    place = tmp_path / "locked"
    place.mkdir(mode=0o755)
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(0o755)

    def work():
        with writing(place / "store", otherwise=EMPTY):
            os.write(2, b"work was done")

    assert as_nobody(work).startswith("6 cannot write")


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"image")
    with (
        pytest.raises(ConfigError, match=r"is not a store: it holds 'holiday\.jpg'"),
        writing(tmp_path, otherwise=EMPTY),
    ):
        pass
    assert os.listdir(tmp_path) == ["holiday.jpg"]
    for wrong in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="is not a store"):
            reading(wrong)


def test_100_times_kill_9_lose_no_visit_and_bring_none_back(ram):
    check_kills(ram, 100, longest=0.05)


@pytest.mark.slow
def test_60_times_kill_9_on_a_real_disk_lose_no_visit_and_bring_none_back(tmp_path):
    check_kills(tmp_path, 60, longest=0.4)


def check_kills(folder, kills, longest):
    done = subprocess.run(
        [sys.executable, str(VICTIM), str(folder / "store"), str(kills), str(longest)],
        capture_output=True, text=True, timeout=550, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["kills"] == kills
    assert seen["wrong"] == []
    assert min(seen["kept"], seen["forgotten"], seen["left_over"]) > kills / 20


@pytest.mark.parametrize(
    "change", [{"hand": 7}, {"now": 2**63 - 1}, {"now": 0}, {"hand": -1}, {"now": 2**62}]
)
def test_an_index_that_no_controller_leaves_behind_is_refused(fresh, change):
    path = fresh()
    body = json.loads((path / INDEX).read_text())
    body.pop("seal")
    (path / INDEX).write_bytes(seal({**body, **change}))
    with pytest.raises(CheckpointError, match="is not the index of a store"):
        reading(path)


def test_a_large_capacity_takes_no_memory_before_it_is_used(fresh):
    path = fresh()
    body = json.loads((path / INDEX).read_text())
    body.pop("seal")
    (path / INDEX).write_bytes(seal({**body, "settings": {**body["settings"], "capacity": 10**15}}))
    keep(path, 7, "a", "e")
    assert len(reading(path)) == 3
