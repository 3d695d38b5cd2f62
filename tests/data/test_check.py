"""check: every trouble of an image set is listed at once, by name."""

from pathlib import Path

import pytest

from torchemo.core.errors import DataError
from torchemo.data.check import check
from torchemo.data.episodes import EpisodeSpec

SPEC = EpisodeSpec(n_way=2, n_shot=1, n_query=2)
TREE = {
    f"{split}/{name}/{i}.png": 100 * s + 10 * c + i
    for s, split in enumerate(["train", "test", "val"])
    for c, name in enumerate([f"{split} a", f"{split} b"])
    for i in range(3)
}


def test_a_good_set_is_ok_and_counted(tree):
    told = []
    report = check(tree(TREE), SPEC, progress=lambda *seen: told.append(seen))
    assert report.ok
    assert report.domains == (("set", {"train": 2, "val": 2, "test": 2}, 18, 3, 3),)
    assert (report.bad, report.small, report.duplicates, report.colliding, report.problems) == (
        (),
    ) * 5
    assert report.layout == "class folders"
    assert told[-1] == (18, 18)


def test_bad_files_are_listed_with_their_reasons_and_good_ones_counted(tree, picture):
    bad = {
        "train/train a/empty.png": b"",
        "train/train a/text.jpg": b"hello",
        "test/test b/torn.png": picture(0, size=64)[:500],
        "test/test b/film.gif": picture(0, format="GIF")[:20],
    }
    report = check(tree(TREE | bad), SPEC)
    reasons = {Path(name).name: reason for name, reason in report.bad}
    assert set(reasons) == {"empty.png", "text.jpg", "torn.png", "film.gif"}
    assert "is empty" in reasons["empty.png"]
    assert "is no readable" in reasons["text.jpg"]
    assert "cannot be decoded" in reasons["torn.png"]
    assert report.domains[0].images == 18
    assert report.ok  # training leaves them out


def test_pictures_of_different_sizes_are_no_trouble(tree, picture):
    report = check(tree(TREE | {"train/train a/large.png": picture(7, size=40)}), SPEC)
    assert report.ok


def test_small_classes_and_what_does_not_fit_are_named(tree):
    root = tree(TREE | {"train/rare/1.png": 999})
    (root / "test" / "empty").mkdir()
    report = check(root, SPEC)
    assert sorted(report.small) == [("set", "empty", 0, 3), ("set", "rare", 1, 3)]
    assert sorted(report.problems) == [
        "class 'empty' has 0 images; 1-shot + 2 query needs 3.",
        "class 'rare' has 1 images; 1-shot + 2 query needs 3.",
    ]
    assert not report.ok
    one_short = {f"birds/{place}": content for place, content in TREE.items()}
    one_short |= {f"fungi/train/a/{i}.png": 500 + i for i in range(3)}
    assert check(tree(one_short, name="two"), SPEC).problems == (
        "domain 'fungi' has 1 classes in split 'train'; 2-way needs 2.",
    )
    wide = check(tree(TREE, name="wide"), EpisodeSpec(3, 1, 2))
    assert "3-way needs 3" in "".join(wide.problems)


@pytest.mark.parametrize(
    ("copy", "across"),
    [("test/test b/copy.png", True), ("train/train b/copy.png", False)],
)
def test_copies_are_found_and_only_those_across_splits_spoil_the_set(tree, copy, across):
    report = check(tree(TREE | {copy: 1}), SPEC)
    (duplicate,) = report.duplicates
    names = {Path(duplicate.first).name, Path(duplicate.second).name}
    assert names == {"1.png", "copy.png"}
    assert duplicate.across_splits is across
    assert report.ok is not across


def test_class_names_that_differ_only_in_case_are_pointed_out(tree):
    report = check(tree(TREE | {f"train/Train A/{i}.png": 900 + i for i in range(3)}), SPEC)
    assert report.colliding == (("Train A", "train a"),)


def test_a_set_without_any_readable_picture_is_reported_and_an_unreadable_one_refused(
    tree, tmp_path
):
    report = check(tree({"wren/1.png": b"bad"}), SPEC)
    assert report.problems == ("no image can be read.",)
    assert not report.ok
    with pytest.raises(DataError, match="no such file"):
        check(tmp_path / "nothing", SPEC)


def test_the_known_copies_in_real_data_are_found(real_data):
    report = check(real_data / "fungi84_27classes.zip", EpisodeSpec(5, 5, 15), image_size=32)
    assert report.domains == (
        ("fungi84_27classes", {"train": 15, "val": 5, "test": 7}, 1620, 60, 60),
    )
    assert len(report.duplicates) == 6
    assert (report.bad, report.small, report.problems) == ((), (), ())
