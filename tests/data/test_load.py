"""load: one door for every form, the same images behind each."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchemo.core.errors import DataError
from torchemo.data.episodes import EpisodeSpec, sample_episodes
from torchemo.data.load import find, load
from torchemo.data.splits import Proportions, SplitFile

TREE = {
    f"{name}/{i}.png": 10 * c + i for c, name in enumerate(["jay", "tit", "wren"]) for i in range(4)
}
LISTED = {"train": ["wren"], "val": ["tit"], "test": ["jay"]}


def test_folder_zip_and_npz_of_the_same_pictures_have_the_same_fingerprint(tree, zipped, tmp_path):
    folder = load(tree(TREE), splits=LISTED, domain="birds")
    archive = load(zipped(TREE), splits=LISTED, domain="birds")
    np.savez(
        tmp_path / "set.npz",
        images=folder.images.transpose(0, 2, 3, 1),
        label=folder.label,
        class_names=np.array(folder.class_names),
    )
    arrays = load(tmp_path / "set.npz", splits=LISTED, domain="birds")
    assert folder.fingerprint() == archive.fingerprint() == arrays.fingerprint()
    assert folder.class_names == ("wren", "tit", "jay")
    assert folder.class_split == ("train", "val", "test")


def test_pixels_are_those_of_the_files(tree):
    root = tree(TREE)
    index = load(root, splits=LISTED)
    for c, name in enumerate(index.class_names):
        for i, image in enumerate(index.images_of(c)):
            expected = np.asarray(Image.open(root / name / f"{i}.png"))
            assert np.array_equal(index.images[image].transpose(1, 2, 0), expected)
    assert index.domains == ("set",)


def test_size_channels_and_resampling_are_obeyed(tree):
    root = tree(TREE)
    index = load(root, image_size=4, channels=1, resample="box")
    assert index.shape == (1, 4, 4)
    grey = np.asarray(
        Image.open(root / "jay" / "0.png").resize((4, 4), Image.Resampling.BOX).convert("L")
    )
    jay = index.class_names.index("jay")
    assert np.array_equal(index.images[index.images_of(jay)[0], 0], grey)


@pytest.mark.parametrize("place", ["set/splits.json", "splits.json"])
def test_a_split_file_inside_or_beside_the_data_is_found(tree, tmp_path, place):
    root = tree(TREE)
    content = LISTED if place.startswith("set") else {"set": {"mine": LISTED}}
    (tmp_path / place).write_text(json.dumps(content))
    assert load(root).class_split == ("train", "val", "test")
    asked = load(root, splits=Proportions(0, 0, 1))
    assert asked.class_split == ("test",) * 3
    listed = load(root, splits=SplitFile(tmp_path / place))
    assert listed.class_names == ("wren", "tit", "jay")


def test_a_split_file_beside_that_speaks_of_other_data_is_passed_over(tree, tmp_path):
    root = tree(TREE)
    (tmp_path / "splits.json").write_text(json.dumps({"other.zip": {"mine": {"train": ["dodo"]}}}))
    assert len(load(root).class_names) == 3


def test_a_bad_picture_stops_by_name_unless_bad_ones_may_be_skipped(tree):
    root = tree(TREE | {"tit/9.png": b"no image", "moa/1.png": b""})
    with pytest.raises(DataError, match=r"moa.1\.png: is empty|9\.png: is no readable"):
        load(root)
    bad = []
    index = load(root, on_bad=bad.append)
    assert len(index) == 12
    assert sorted((Path(one.name).name, one.reason.split(".")[0]) for one in bad) == [
        ("1.png", "is empty"),
        ("9.png", "is no readable PNG/JPEG/WEBP/BMP/GIF/TIFF image"),
    ]
    assert index.counts[index.class_names.index("moa")] == 0


def test_progress_reaches_the_end(tree):
    told = []
    load(tree(TREE), progress=lambda *seen: told.append(seen))
    assert told == [(i, 12) for i in range(1, 13)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, None, "no such file"),
        ("a.rar", b"", "no form of image data that is known"),
        ("a.zip", b"", "no readable zip archive"),
        ("a.npz", b"", "no readable zip archive"),
    ],
)
def test_what_is_not_image_data_is_refused_by_name(tmp_path, name, content, message):
    path = tmp_path / (name or "nothing")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path.name}: .*{message}"):
        find(path)


def nearest_mean_accuracy(index, *, split, tasks=200):
    """Five-way one-shot accuracy of the nearest class mean on raw pixels."""
    spec = EpisodeSpec(5, 1, 5)
    episode = sample_episodes(index, spec, seed=0, split=split, start=0, count=tasks)
    distance = torch.cdist(episode.query.x.flatten(2), episode.support.x.flatten(2))
    guess = episode.support.y.gather(1, distance.argmin(2))
    return float((guess == episode.query.y).float().mean())


@pytest.mark.parametrize(
    ("name", "scheme", "splits", "accuracy"),
    [
        ("omniglot28.npz", None, (1028, 172, 423), 0.447),
        ("icons32.npz", None, (146, 36, 62), 0.571),
        ("cifar100_32.npz", "cifar_fs", (64, 16, 20), 0.327),
    ],
)
def test_real_pictures_give_the_known_nearest_mean_accuracy(
    real_data, name, scheme, splits, accuracy
):
    file = None if scheme is None else SplitFile(real_data / "splits.json", scheme)
    index = load(real_data / name, splits=file)
    (row,) = index.summary()
    assert tuple(row.classes.values()) == splits
    # The known figures are for all classes, 300 tasks; here it is 200 tasks of test classes.
    assert abs(nearest_mean_accuracy(index, split="test") - accuracy) < 0.06


def test_data_with_several_schemes_ask_for_one(real_data):
    with pytest.raises(DataError, match="Choose one: cifar_fs, fc100"):
        find(real_data / "cifar100_32.npz")
