"""memory and checkpoint: what is saved, shown and verified; damage is found and has code 4."""

import shutil

import pytest
import torch

from tests.apps.cli.conftest import flip_a_bit
from torchemo.apps.cli.memory import scatter
from torchemo.runs.load import best_checkpoint
from torchemo.runs.storage import checkpoint
from torchemo.runs.storage.info import plain_progress
from torchemo.training.progress import Progress


@pytest.fixture
def broken(point_runs, tmp_path):
    """Return ``broken(change) -> run``: its newest memory is changed and saved with right checksums."""

    def make(change):
        root = shutil.copytree(point_runs / "memory", tmp_path / "run")
        newest = checkpoint.published(root)[-1]
        saved = checkpoint.load(newest)
        groups = {name: dict(group) for name, group in saved.groups.items()}
        change(groups["memory"])
        shutil.rmtree(newest)
        checkpoint.publish(
            root, saved.step, groups=groups, info=saved.info, nonfinite_ok=("memory",)
        )
        return root

    return make


def test_slots_are_shown_with_age_recalls_neighbour_and_a_map(torchemo, picture_runs):
    found = torchemo("memory", "show", picture_runs / "memory", "--rows", 2)
    assert found.code == 0
    saved = best_checkpoint(picture_runs / "memory")
    filled = int(saved.groups["memory"]["store.ledger.filled"])
    assert f"{filled} of 5 slots filled after {saved.step} batches" in found.out
    assert f"and {filled - 2} more slots" in found.out
    assert "a = colours" in found.out
    map_lines = [line for line in found.out.splitlines() if line.startswith("|")]
    assert 1 <= "".join(map_lines).count("a") <= filled


def test_the_most_recalled_slots_come_first(torchemo, broken):
    def recall(memory):
        memory["store.ledger.recalls"] = torch.tensor([4, 2, 1, 9, 3])

    root = broken(recall)
    newest = checkpoint.step_of(checkpoint.published(root)[-1])
    shown = torchemo("memory", "show", root, "--step", newest, "--rows", 3).out
    rows = [line.split("│")[1:4] for line in shown.splitlines() if line.startswith("│")]
    assert [(int(slot), int(recalls)) for slot, _, recalls in rows] == [(3, 9), (0, 4), (4, 3)]


def test_the_memory_for_machines_holds_every_slot(torchemo, picture_runs):
    view = torchemo("memory", "show", picture_runs / "memory", "--json").json
    saved = best_checkpoint(picture_runs / "memory").groups["memory"]
    filled = int(saved["store.ledger.filled"])
    assert (view["capacity"], view["filled"], len(view["slots"])) == (5, filled, filled)
    keys = saved["store.keys"].double()
    for slot in view["slots"]:
        i = slot["slot"]
        apart = [(float((keys[i] - keys[j]).norm()), j) for j in range(filled) if j != i]
        assert (pytest.approx(slot["distance"]), slot["nearest"]) == min(apart)
        assert slot["age"] == int(saved["store.ledger.iteration"] - saved["store.ledger.born"][i])
        assert slot["recalls"] == int(saved["store.ledger.recalls"][i])
        assert slot["generation"] == int(saved["store.ledger.generation"][i])
        values = [
            t[i].double().flatten() for n, t in saved.items() if n.startswith("store.values.")
        ]
        assert slot["norm"] == pytest.approx(float(torch.cat(values).norm()))
        assert slot["domain"] == "colours"
        assert len(slot["place"]) == 2


def test_a_run_without_memory_has_none_to_show(torchemo, point_runs):
    for action in ("show", "verify"):
        found = torchemo("memory", action, point_runs / "base")
        assert found.code == 2
        assert "has no memory" in found.err


def test_a_step_that_is_not_saved_is_not_shown(torchemo, point_runs):
    found = torchemo("memory", "show", point_runs / "memory", "--step", 999)
    assert found.code == 4
    assert "no checkpoint of step 999" in found.err


def test_a_sound_memory_verifies_in_every_checkpoint(torchemo, point_runs):
    found = torchemo("memory", "verify", point_runs / "memory")
    steps = checkpoint.published(point_runs / "memory")
    assert found.code == 0
    assert found.out.splitlines() == [f"{path.name}: memory is sound" for path in steps]
    machine = torchemo("memory", "verify", point_runs / "memory", "--json").json
    assert machine["sound"] is True
    assert [one["faults"] for one in machine["checkpoints"]] == [[]] * len(steps)


def _nan_value(memory):
    name = next(n for n in memory if n.startswith("store.values."))
    memory[name] = memory[name].clone()
    memory[name][1] = torch.nan


def _future(memory):
    memory["store.ledger.born"] = memory["store.ledger.born"] + 1000


def _overfull(memory):
    memory["store.ledger.filled"] = torch.tensor(6)


def _wrong_shape(memory):
    memory["store.ledger.recalls"] = memory["store.ledger.recalls"][:3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_nan_value, "slot 1: value '"),
        (_future, "was written in a batch to come"),
        (_overfull, "6 slots are said to be filled, the memory has 5"),
        (_wrong_shape, "ledger.recalls"),
        (dict.clear, "no keys of a memory"),
    ],
)
def test_a_memory_that_cannot_be_right_is_found(torchemo, broken, change, said):
    found = torchemo("memory", "verify", broken(change))
    assert found.code == 4
    assert said in found.out
    assert "memory is sound" in found.out  # the checkpoint before it


def test_a_flipped_bit_of_a_memory_is_found(torchemo, point_runs, tmp_path):
    root = shutil.copytree(point_runs / "memory", tmp_path / "run")
    newest = checkpoint.published(root)[-1]
    flip_a_bit(newest / "memory.safetensors")
    found = torchemo("memory", "verify", root, "--json")
    assert found.code == 4
    assert found.json["sound"] is False
    assert "damaged" in found.json["checkpoints"][-1]["faults"][0]


def test_checkpoints_are_listed_with_the_best_one(torchemo, point_runs):
    found = torchemo("checkpoint", "list", point_runs / "memory", "--json").json
    assert [one["step"] for one in found] == [
        checkpoint.step_of(path) for path in checkpoint.published(point_runs / "memory")
    ]
    assert found[-1]["best_step"] == best_checkpoint(point_runs / "memory").step


def test_the_newest_checkpoint_says_which_one_is_best(torchemo, point_runs, tmp_path):
    (tmp_path / "config.toml").write_text((point_runs / "memory" / "config.toml").read_text())
    for step, best in ((2, 2), (4, 4), (6, 4)):
        groups = {"params": {"w": torch.zeros(1)}}
        known = plain_progress(Progress(best, 0.5))
        checkpoint.publish(tmp_path, step, groups=groups, info={"progress": known})
    shown = torchemo("checkpoint", "list", tmp_path).out
    (line,) = [line for line in shown.splitlines() if " best " in line]
    assert line.split("│")[1].strip() == "4"


def test_checkpoints_verify_until_a_bit_flips(torchemo, point_runs, tmp_path):
    root = shutil.copytree(point_runs / "memory", tmp_path / "run")
    assert torchemo("checkpoint", "verify", root).code == 0
    first, *_, last = checkpoint.published(root)
    flip_a_bit(first / "params.safetensors")
    flip_a_bit(last / "manifest.json")
    found = torchemo("checkpoint", "verify", root)
    assert found.code == 4
    lines = found.out.splitlines()
    assert "params.safetensors" in lines[0]
    assert "manifest.json" in lines[-1]
    machine = torchemo("checkpoint", "verify", root, "--json")
    assert machine.code == 4
    assert [bool(one["error"]) for one in machine.json["checkpoints"]] == [
        path in (first, last) for path in checkpoint.published(root)
    ]
    listed = torchemo("checkpoint", "list", root)
    assert listed.code == 0
    assert "damaged" in listed.out


def test_a_run_without_checkpoints_cannot_be_verified(torchemo, point_runs, tmp_path):
    (tmp_path / "config.toml").write_text((point_runs / "memory" / "config.toml").read_text())
    for command in ("memory", "checkpoint"):
        found = torchemo(command, "verify", tmp_path)
        assert found.code == 4
        assert "has no checkpoint" in found.err
    assert torchemo("checkpoint", "list", tmp_path, "--json").json == []


def test_a_map_puts_points_where_they_belong():
    drawn = scatter(
        [((0.0, 0.0), "x"), ((1.0, 1.0), "y"), ((1.0, 0.0), None), ((0.0, 0.0), "y")],
        width=3,
        height=2,
    )
    assert drawn == ["+---+", "|  b|", "|* o|", "+---+", "a = x, b = y"]


def test_a_map_of_equal_points_is_one_place():
    assert scatter([((2.0, 2.0), "x")] * 3, width=2, height=1) == ["+--+", "|a |", "+--+", "a = x"]
