"""Images that are there twice: the same verdict of ``data check`` and of ``train``, and one remedy."""

import numpy as np
import pytest
from PIL import Image

from torchemo.config.run import DataConfig
from torchemo.core.errors import DataError
from torchemo.data.check import check
from torchemo.data.duplicates import copies, refuse_leaks
from torchemo.data.episodes import EpisodeSpec
from torchemo.data.index import ClassIndex
from torchemo.data.source import open_source

SPEC = EpisodeSpec(2, 1, 1)


def index(values, *, label, split):
    images = np.stack([np.full((3, 2, 2), v, np.uint8) for v in values])
    names = tuple(f"class {c}" for c in range(len(split)))
    return ClassIndex(images, np.array(label), names, tuple(split), ("set",) * len(split))


def test_the_copy_that_training_does_not_see_stays():
    found = copies([b"a", b"b", b"a", b"c", b"c"], ["train", "train", "val", "test", "test"])
    assert [(same.places, same.across_splits) for same in found] == [
        ((2, 0), True),
        ((3, 4), False),
    ]


def test_dropping_keeps_every_image_once_and_refusing_names_both_places():
    whole = index([1, 2, 2, 3, 1], label=[0, 0, 0, 1, 1], split=["train", "test"])
    with pytest.raises(DataError, match=r"'class 1' \(test\) and 'class 0' \(train\)") as refused:
        refuse_leaks(whole, drop=False)
    assert "--drop-duplicates" in refused.value.hint
    kept, dropped = refuse_leaks(whole, drop=True)
    assert dropped == 2
    assert kept.images[:, 0, 0, 0].tolist() == [2, 3, 1]
    assert kept.label.tolist() == [0, 1, 1]
    within = index([1, 1, 3], label=[0, 0, 1], split=["train", "test"])
    assert refuse_leaks(within, drop=False) == (within, 0)


@pytest.fixture
def folder(tmp_path):
    """Two classes in each split; one image of training is there again in test."""
    for number, split in enumerate(("train", "val", "test")):
        for c in range(2):
            place = tmp_path / "set" / split / f"{split} {c}"
            place.mkdir(parents=True)
            for i in range(3):
                pixels = np.full((8, 8, 3), 80 * number + 20 * c + 5 * i, np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.png")
    again = tmp_path / "set" / "test" / "test 0" / "again.png"
    again.write_bytes((tmp_path / "set" / "train" / "train 0" / "0.png").read_bytes())
    return tmp_path / "set"


@pytest.mark.parametrize("drop", [False, True])
def test_check_and_training_judge_alike(folder, drop):
    report = check(folder, SPEC, drop_duplicates=drop)
    config = DataConfig(
        source=(str(folder),), version=2, drop_duplicates=drop, n_way=2, n_query=1, image_size=8
    )
    assert report.ok == drop
    if drop:
        assert open_source(config).dropped == report.dropped == 1
    else:
        with pytest.raises(DataError, match="in two splits"):
            open_source(config)


def test_a_missing_split_is_named_with_the_way_to_draw_it(folder):
    for place in sorted((folder / "val").rglob("*"), reverse=True):
        place.unlink() if place.is_file() else place.rmdir()
    (folder / "val").rmdir()
    config = DataConfig(
        source=(str(folder),), version=2, drop_duplicates=True, n_way=2, n_query=1, image_size=8
    )
    with pytest.raises(DataError, match="val") as refused:
        open_source(config)
    assert not check(folder, SPEC).ok
    assert "64:16:20" in str(refused.value)


def test_too_few_classes_are_refused_with_what_to_change(folder):
    config = DataConfig(
        source=(str(folder),), version=2, drop_duplicates=True, n_way=3, n_query=1, image_size=8
    )
    with pytest.raises(DataError, match="3-way needs 3") as refused:
        open_source(config)
    assert "--way" in refused.value.hint
    assert "about 18" in refused.value.hint
