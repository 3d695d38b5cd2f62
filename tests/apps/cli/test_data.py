"""data: which sets there are, whether they fit, and packing; nothing is changed by looking."""

import json

import numpy as np
import pytest

from tests.apps.cli.conftest import COLOURS, write_colours
from torchemo.data.load import load


def test_embedded_tasks_are_always_listed(torchemo, monkeypatch):
    monkeypatch.delenv("TORCHEMO_DATA", raising=False)
    found = {one["source"]: one for one in torchemo("data", "list", "--json").json}
    assert list(found) == [
        *("procedural", "regression:sinusoid", "regression:hsml4", "regression:arml6"),
        *("regression:sine", "regression:line", "regression:quadratic", "regression:cubic"),
    ]
    assert found["procedural"]["classes"] == 240
    assert found["procedural"]["splits"] == {"train": 152, "val": 40, "test": 48}
    shown = torchemo("data", "list")
    assert shown.code == 0
    assert "TORCHEMO_DATA" in shown.out


def test_sets_under_a_folder_are_listed_with_form_and_splits(torchemo, tmp_path, monkeypatch):
    write_colours(tmp_path / "colours", images=2)
    images = np.zeros((6, 8, 8), np.uint8)
    np.savez(tmp_path / "dark.npz", images=images, label=np.arange(6) // 2)
    (tmp_path / "broken.zip").write_bytes(b"no archive")
    (tmp_path / "notes.txt").write_text("not data")
    schemes = {"a": {"train": [0], "test": [1, 2]}, "b": {"train": [0, 1], "test": [2]}}
    (tmp_path / "splits.json").write_text(json.dumps({"dark.npz": schemes}))
    monkeypatch.setenv("TORCHEMO_DATA", str(tmp_path))
    found = {one["source"]: one for one in torchemo("data", "list", "--json").json}
    colours = found[str(tmp_path / "colours")]
    assert (colours["form"], colours["classes"], colours["images"]) == ("class folders", 9, 18)
    assert colours["splits"] == {"train": 3, "val": 3, "test": 3}
    dark = found[str(tmp_path / "dark.npz")]
    assert (dark["schemes"], dark["splits"]) == (["a", "b"], {"train": 1, "test": 2})
    assert found[str(tmp_path / "broken.zip")]["error"] is not None
    assert not any("notes" in source for source in found)
    assert "cannot be used" in torchemo("data", "list").out


def test_a_set_itself_can_be_listed(torchemo, colours):
    for place in (colours, colours / "test"):
        (found,) = [
            one
            for one in torchemo("data", "list", "--data", place, "--json").json
            if one["source"] == str(place)
        ]
        assert found["error"] is None


def test_a_folder_that_is_not_there_has_no_sets(torchemo, tmp_path):
    found = torchemo("data", "list", "--data", tmp_path / "nowhere")
    assert found.code == 3
    assert "there is no such file or folder" in found.err


def test_a_good_set_fits(torchemo, colours):
    found = torchemo("data", "check", colours, "--way", 3)
    assert found.code == 0
    assert found.out.endswith("ok: 3-way 1-shot + 15 query tasks can be drawn\n")
    report = torchemo("data", "check", colours, "--n-way", 3, "--json").json
    assert report["ok"] is True
    (domain,) = report["domains"]
    assert (domain["images"], domain["classes"]) == (162, {"train": 3, "val": 3, "test": 3})


@pytest.fixture
def bad_set(tmp_path):
    """Two broken files, an image of ``red`` again in ``black``, and a small class ``grey``."""
    root = write_colours(tmp_path / "set", images=4)
    (root / "train" / "red" / "00.png").write_bytes(b"")
    (root / "train" / "red" / "01.png").write_text("hello")
    (root / "test" / "black" / "99.png").write_bytes((root / "train/red/02.png").read_bytes())
    for number in range(3):
        (root / "val" / "grey" / f"{number:02d}.png").unlink()
    return root


def test_everything_wrong_with_a_set_is_told_at_once(torchemo, bad_set):
    words = ("data", "check", bad_set, "--n-way", 3, "--n-query", 1)
    found = torchemo(*words)
    assert found.code == 3
    lines = found.out.splitlines()
    assert (
        f"bad image, left out: {bad_set / 'train/red/00.png'}: is empty. Replace or remove the file."
        in lines
    )
    second = f"bad image, left out: {bad_set / 'train/red/01.png'}: "
    assert any(line.startswith(second) for line in lines)
    assert "small class: grey has 1 images, 2 are needed" in lines
    (leak,) = [line for line in lines if line.startswith("in two splits: ")]
    assert "99.png (test)" in leak
    assert "02.png (train)" in leak
    assert lines[-1].startswith("not ok: ")
    report = torchemo(*words, "--json")
    assert report.code == 3
    assert report.json["ok"] is False
    assert [small["name"] for small in report.json["small"]] == ["grey"]
    assert len(report.json["bad"]) == 2


def test_a_long_list_of_trouble_is_cut_for_people_only(torchemo, tmp_path):
    root = write_colours(tmp_path / "set", images=30, splits=("train",))
    for path in (root / "train" / "red").iterdir():
        path.write_bytes(b"")
    found = torchemo("data", "check", root, "--n-way", 2, "--n-query", 1)
    assert found.out.count("bad image, left out: ") == 21
    assert "bad image, left out: and 10 more (--json lists all)" in found.out
    assert len(torchemo("data", "check", root, "--json").json["bad"]) == 30


def test_splits_that_are_missing_for_training_are_named(torchemo, tmp_path):
    root = write_colours(tmp_path / "set", images=4, splits=("train", "test"))
    found = torchemo("data", "check", root, "--n-way", 2, "--n-query", 1)
    assert found.code == 3
    assert "no class has split 'val'" in found.out
    assert "--splits 64:16:20" in found.out


def test_one_of_several_schemes_of_splits_is_chosen(torchemo, tmp_path):
    np.savez(
        tmp_path / "dark.npz",
        images=np.arange(6 * 64, dtype=np.uint8).reshape(6, 8, 8),
        label=np.arange(6) // 2,
    )
    schemes = {"a": {"train": [0], "test": [1, 2]}, "b": {"train": [0, 1], "test": [2]}}
    (tmp_path / "splits.json").write_text(json.dumps({"dark.npz": schemes}))
    words = ("data", "check", tmp_path / "dark.npz", "--n-way", 2, "--n-query", 1, "--json")
    found = torchemo(*words)
    assert found.code == 3
    assert "Choose one: a, b" in found.err
    (domain,) = torchemo(*words, "--scheme", "b").json["domains"]
    assert domain["classes"] == {"train": 2, "val": 0, "test": 1}
    assert torchemo(*words, "--scheme", "c").code == 3
    assert torchemo(*words, "--splits", tmp_path / "none.json").code == 2


@pytest.mark.parametrize("words", [("--n-way", 1), ("--n-shot", 0), ("--n-query", 0)], ids=str)
def test_tasks_without_sense_are_refused(torchemo, colours, words):
    found = torchemo("data", "check", colours, *words)
    assert found.code == 2
    assert "should be at least" in found.err


def test_a_packed_set_holds_the_same_pictures(torchemo, colours, tmp_path):
    found = torchemo("data", "pack", colours, tmp_path / "packed")
    assert found.code == 0
    assert "162 images of 9 classes" in found.out
    packed, plain = load(tmp_path / "packed"), load(colours)
    assert packed.class_names == plain.class_names
    assert packed.class_split == plain.class_split
    assert (packed.images == plain.images).all()
    again = torchemo("data", "pack", colours, tmp_path / "packed")
    assert again.code == 3
    assert "exists already" in again.err


def test_features_are_packed_once_and_trained_on(torchemo, colours, tmp_path):
    network, packed = "tests.apps.web.conftest:averages", tmp_path / "packed"
    found = torchemo("data", "pack", colours, packed, "--features", network, "--size", 16)
    assert found.code == 0, found.err
    assert f"162 images seen by {network}, of 9 classes" in found.out
    assert load(packed).holds_features
    line = next(line for line in found.out.splitlines() if line.startswith("train with: "))
    words = [*line.removeprefix("train with: torchemo ").split()[:-1], tmp_path / "run"]
    few = ("train.steps=2", "train.tasks=2", "train.validation_tasks=2", "data.n_query=2")
    assert torchemo(*words, "--way", 2, "--options", *few).code == 0
    refused = torchemo("data", "pack", colours, tmp_path / "other", "--features", "conv4")
    assert (refused.code, "no pretrained weights" in refused.err) == (2, True)


def test_packing_can_resize_grey_and_leave_out_bad_pictures(torchemo, bad_set, tmp_path):
    words = ("data", "pack", bad_set, tmp_path / "packed", "--image-size", 8, "--channels", 1)
    found = torchemo(*words, "--strict")
    assert found.code == 3
    assert "red/00.png" in found.err
    assert not (tmp_path / "packed").exists()
    left = torchemo(*words, "--json")
    assert left.code == 7
    report = left.json
    classes = sum(len(names) for names in COLOURS.values())
    assert (report["images"], report["classes"], len(report["skipped"])) == (32, classes, 2)
    assert load(tmp_path / "packed").shape == (1, 8, 8)


def test_names_from_files_cannot_command_the_terminal(torchemo, tmp_path):
    root = write_colours(tmp_path / "set", images=2)
    (root / "train" / "red" / "\x1b[31m[bold].png").write_bytes(b"")
    found = torchemo("data", "check", root, "--n-way", 2, "--n-query", 1)
    assert found.code == 7
    assert "\x1b" not in found.out
    assert "\\x1b[31m[bold].png" in found.out
