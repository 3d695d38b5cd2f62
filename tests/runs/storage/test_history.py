"""The checkpoints of a run: the latest sound one, pruning that never loses it, rewinding, sweeping."""

import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchemo.core.errors import CheckpointError, ConfigError, ResourceError
from torchemo.runs.storage.checkpoint import (
    folder_of,
    load,
    publish,
    published,
    step_folder,
    step_of,
)
from torchemo.runs.storage.history import latest, prune, rewind, sweep


def save(run, *steps):
    for step in steps:
        publish(run, step, groups={"state": {"w": torch.full((3,), float(step))}})


def damage(run, step, name="state.safetensors"):
    file = step_folder(run, step) / name
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def steps(run):
    return [step_of(path) for path in published(run)]


def test_the_latest_is_the_highest_step(tmp_path):
    assert latest(tmp_path).path is None
    save(tmp_path, 3, 20, 7)
    found = latest(tmp_path)
    assert (found.path, found.skipped) == (step_folder(tmp_path, 20), ())


def test_damaged_ones_are_named_and_the_one_below_is_taken(tmp_path):
    save(tmp_path, 1, 2, 3, 4)
    damage(tmp_path, 4)
    damage(tmp_path, 3, "manifest.json")
    found = latest(tmp_path)
    assert found.path == step_folder(tmp_path, 2)
    assert [damaged.path.name for damaged in found.skipped] == ["step-00000004", "step-00000003"]
    assert "state.safetensors of step-00000004 is damaged" in found.skipped[0].reason
    assert "manifest.json of step-00000003 is damaged" in found.skipped[1].reason
    with pytest.raises(CheckpointError, match="step-00000004 is damaged"):
        latest(tmp_path, strict=True)


def test_when_all_are_damaged_there_is_no_latest_and_all_are_named(tmp_path):
    save(tmp_path, 1, 2)
    damage(tmp_path, 1)
    damage(tmp_path, 2)
    found = latest(tmp_path)
    assert found.path is None
    assert len(found.skipped) == 2


def test_nothing_is_taken_in_place_of_a_newer_format(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr("torchemo.runs.storage.manifest.FORMAT_VERSION", 2)
    save(tmp_path, 2)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"has format 2.*\nUpgrade torchemo"):
        latest(tmp_path)


def test_a_damaged_format_number_is_damage_and_not_a_newer_format(tmp_path):
    save(tmp_path, 1, 2)
    file = step_folder(tmp_path, 2) / "manifest.json"
    file.write_text(file.read_text().replace('"format_version": 1', '"format_version": 3'))
    assert latest(tmp_path).path == step_folder(tmp_path, 1)


def test_a_checkpoint_pruned_while_we_look_is_not_reported_as_damaged(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)

    def pruned_meanwhile(path):
        if step_of(path) == 2:
            shutil.rmtree(path)
            raise CheckpointError("gone")

    monkeypatch.setattr("torchemo.runs.storage.history.verify", pruned_meanwhile)
    found = latest(tmp_path)
    assert (found.path, found.skipped) == (step_folder(tmp_path, 1), ())


def test_an_unreadable_folder_is_not_an_empty_one(tmp_path):
    folder_of(tmp_path).write_text("not a folder")
    with pytest.raises(CheckpointError, match="cannot be read"):
        latest(tmp_path)


def test_pruning_keeps_the_last_two_and_the_pinned_ones(tmp_path):
    save(tmp_path, 1, 2, 3, 4, 5)
    removed = prune(tmp_path, keep=[1, 3, 99])
    assert [step_of(path) for path in removed] == [2]
    assert prune(tmp_path, keep=[1]) == [step_folder(tmp_path, 3)]
    assert steps(tmp_path) == [1, 4, 5]
    assert sorted(os.listdir(folder_of(tmp_path))) == [path.name for path in published(tmp_path)]


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 4)
    damage(tmp_path, 4, "manifest.json")
    (step_folder(tmp_path, 3) / "state.safetensors").unlink()
    assert prune(tmp_path, keep_last=1) == [step_folder(tmp_path, 1)]
    assert latest(tmp_path).path == step_folder(tmp_path, 2)


def test_keeping_none_is_refused(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(ConfigError, match="keep_last should be 1 or more, got 0"):
        prune(tmp_path, keep_last=0)
    assert steps(tmp_path) == [1]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sound=st.lists(st.booleans(), max_size=7),
    keep_last=st.integers(1, 4),
    keep=st.sets(st.integers(0, 8), max_size=3),
)
def test_law_pruning_keeps_what_a_plain_list_says(tmp_path_factory, sound, keep_last, keep):
    run = tmp_path_factory.mktemp("run")
    for step, good in enumerate(sound):
        step_folder(run, step).mkdir(parents=True)
        if good:
            shutil.copytree(GOOD[step], step_folder(run, step), dirs_exist_ok=True)
    good_steps = [step for step, good in enumerate(sound) if good]
    oldest_kept = good_steps[-keep_last] if len(good_steps) >= keep_last else 0
    expected = [step for step in range(len(sound)) if step >= oldest_kept or step in keep]
    prune(run, keep_last=keep_last, keep=keep)
    assert steps(run) == expected


@pytest.fixture(scope="module", autouse=True)
def _good_checkpoints(tmp_path_factory):
    run = tmp_path_factory.mktemp("good")
    save(run, *range(8))
    GOOD.extend(published(run))
    yield
    GOOD.clear()


GOOD = []


def test_rewinding_puts_later_steps_aside_so_that_they_can_be_saved_again(tmp_path):
    save(tmp_path, 1, 2, 3)
    damage(tmp_path, 3)
    moved = rewind(tmp_path, 1)
    assert steps(tmp_path) == [1]
    assert [path.name.rpartition("-")[0] for path in moved] == [
        "aside-step-00000002",
        "aside-step-00000003",
    ]
    save(tmp_path, 2)
    assert load(moved[0]).groups["state"]["w"].tolist() == [2.0] * 3
    assert rewind(tmp_path, 2) == []


def test_rewinding_compares_steps_as_numbers(tmp_path):
    save(tmp_path, 99_999_999, 100_000_000)
    rewind(tmp_path, 99_999_999)
    assert steps(tmp_path) == [99_999_999]


def test_sweeping_deletes_leftovers_and_follows_no_link(tmp_path):
    run, precious = tmp_path / "run", tmp_path / "precious"
    save(run, 1)
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    unique = "0123456789abcdef" * 2
    (run / f".tmp-config.toml-{unique}").write_text("half")
    half = folder_of(run) / f".tmp-step-00000002-{unique}"
    half.mkdir()
    (half / "state.safetensors").write_bytes(b"half")
    (half / "link").symlink_to(precious)
    (folder_of(run) / f".tmp-trash-{unique}").symlink_to(precious)
    (run / ".tmp-mine").write_text("of the user")
    assert len(sweep(run)) == 3
    assert sorted(os.listdir(run)) == [".tmp-mine", "checkpoints"]
    assert os.listdir(folder_of(run)) == ["step-00000001"]
    assert (precious / "thesis.txt").read_text() == "years of work"
    assert sweep(tmp_path / "nowhere") == []


def test_pruning_a_linked_checkpoint_leaves_what_it_points_to(tmp_path):
    save(tmp_path / "run", 1, 2)
    save(tmp_path / "other disk", 0)
    there = step_folder(tmp_path / "other disk", 0)
    step_folder(tmp_path / "run", 0).symlink_to(there)
    assert latest(tmp_path / "run").path == step_folder(tmp_path / "run", 2)
    prune(tmp_path / "run", keep_last=2)
    assert steps(tmp_path / "run") == [1, 2]
    assert load(there).step == 0


def test_a_disk_that_refuses_to_tidy_up_is_named(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, 3)

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    for change in (lambda: prune(tmp_path), lambda: rewind(tmp_path, 1)):
        with pytest.raises(ResourceError, match=r"cannot tidy up .*Permission denied"):
            change()
    assert steps(tmp_path) == [1, 2, 3]
