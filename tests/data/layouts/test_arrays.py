"""Published sets as arrays: tiny files of each layout, and what does not fit."""

import io
import os
import pickle

import numpy as np
import pytest
from PIL import Image

from torchemo.core.errors import DataError
from torchemo.data.load import find, load

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), np.uint8)
SPLITS = ("train", "val", "test")


def dump(path, content, protocol=2):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol))


def rows_of(split):
    """Each split has four of the twelve images, two classes of two."""
    start = 4 * SPLITS.index(split)
    return IMAGES[start : start + 4]


def check_pixels(index):
    """Every split holds its four images, two by two."""
    for split in SPLITS:
        ids = index.classes(split=split)
        got = np.concatenate([index.images[index.images_of(c)] for c in ids])
        assert np.array_equal(got.transpose(0, 2, 3, 1), rows_of(split))
        assert index.counts[ids].tolist() == [2, 2]


@pytest.mark.parametrize("middle", ["val", "validation"])
def test_the_mini_imagenet_cache(tmp_path, middle):
    for split in SPLITS:
        name = middle if split == "val" else split
        classes = {f"n0{split}b": [2, 3], f"n0{split}a": [0, 1]}
        dump(
            tmp_path / f"mini-imagenet-cache-{name}.pkl",
            {"image_data": rows_of(split), "class_dict": classes},
        )
    index = load(tmp_path)
    check_pixels(index)
    assert index.class_names[:2] == ("n0traina", "n0trainb")
    assert find(tmp_path).layout == "miniImageNet cache"


@pytest.mark.parametrize(
    "pattern",
    [
        "CIFAR_FS_{}.pickle",
        "FC100_{}.pickle",
        "cifar_fs_{}.pickle",
        "mini_imagenet_{}.pkl",
        "miniImageNet_category_split_{}.pickle",
    ],
)
@pytest.mark.parametrize("labels", [[0, 0, 1, 1], np.array([7, 7, 9, 9])])
def test_pickles_by_split(tmp_path, pattern, labels):
    for split in SPLITS:
        name = f"{split}_phase_train" if "category" in pattern and split == "train" else split
        dump(tmp_path / pattern.format(name), {"data": rows_of(split), "labels": labels})
    if "category" in pattern:
        for extra in ("val", "test"):
            more = {"data": rows_of("train")[::-1].copy(), "labels": labels}
            dump(tmp_path / pattern.format(f"train_phase_{extra}"), more)
    index = load(tmp_path)
    check_pixels(index)
    assert index.class_names[0] == f"train {int(labels[0]):04d}"


def test_two_sets_of_pickles_in_one_folder_are_refused(tmp_path):
    for name in ("CIFAR_FS_train.pickle", "FC100_train.pickle"):
        dump(tmp_path / name, {"data": IMAGES, "labels": [0] * 12})
    with pytest.raises(DataError, match="several sets of images: cifar_fs, fc100"):
        find(tmp_path)


def png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize("form", ["arrays of bytes", "bytes", "npz"])
@pytest.mark.parametrize("named", [True, False])
def test_tiered_imagenet(tmp_path, form, named):
    for split in SPLITS:
        labels = {"label_specific": np.array([0, 0, 1, 1]), "label_general": np.array([0, 0, 0, 0])}
        if named:
            labels["label_specific_str"] = [f"{split} cat", f"{split} dog"]
        dump(tmp_path / f"{split}_labels.pkl", labels)
        files = [png(pixels) for pixels in rows_of(split)]
        if form == "npz":
            np.savez(tmp_path / f"{split}_images.npz", images=rows_of(split))
        elif form == "bytes":
            dump(tmp_path / f"{split}_images_png.pkl", files)
        else:
            arrays = [np.frombuffer(file, np.uint8)[:, None] for file in files]
            dump(tmp_path / f"{split}_images_png.pkl", arrays)
    index = load(tmp_path)
    check_pixels(index)
    assert index.class_names[:2] == (
        ("train cat", "train dog") if named else ("train 0000", "train 0001")
    )
    assert find(tmp_path).layout == "tieredImageNet"


@pytest.mark.parametrize("labels", [["cat", "cat", "dog", "dog"], [b"cat", b"cat", b"dog", b"dog"]])
def test_labels_may_be_names(tmp_path, labels):
    dump(tmp_path / "my_train.pickle", {"data": rows_of("train"), "labels": labels})
    assert load(tmp_path).class_names == ("cat", "dog")


CACHE, SPLIT = "mini-imagenet-cache-train.pkl", "CIFAR_FS_train.pickle"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (CACHE, [1, 2], "should hold a dict of image_data and class_dict, holds list"),
        (CACHE, {"data": 1}, r"holds \['data'\]"),
        (CACHE, {"image_data": [1], "class_dict": {}}, r"uint8 \[n, h, w, c\]"),
        (CACHE, {"image_data": IMAGES, "class_dict": [1]}, "should hold a dict"),
        (
            CACHE,
            {"image_data": IMAGES, "class_dict": {"a": [0, 12]}},
            "images that are not there",
        ),
        (CACHE, {"image_data": IMAGES, "class_dict": {"a": [-1]}}, "images that are not there"),
        (CACHE, {"image_data": IMAGES, "class_dict": {"a": ["x"]}}, "images that are not there"),
        (SPLIT, {"data": IMAGES, "labels": [0]}, r"12 images, but labels int64 of shape \[1\]"),
        (SPLIT, {"data": IMAGES, "labels": [0.5] * 12}, "labels float64"),
        (SPLIT, {"data": IMAGES, "labels": [[0], [1, 2]]}, "not of one shape"),
        (SPLIT, {"data": IMAGES.astype(float), "labels": [0] * 12}, "got float64"),
    ],
)
def test_contents_that_do_not_fit_are_refused_by_name(tmp_path, name, content, message):
    dump(tmp_path / name, content)
    with pytest.raises(DataError, match=f"{name}: .*{message}"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        ({}, {"label_specific": [0]}, "should hold a list of PNG files, holds dict"),
        ([b""], {"label_specific": [3], "label_specific_str": ["a"]}, "label 3, but only 1 class"),
        ([b""], {"other": [3]}, "1 images, but labels"),
    ],
)
def test_tiered_files_that_do_not_fit_are_refused(tmp_path, images, labels, message):
    dump(tmp_path / "train_images_png.pkl", images)
    dump(tmp_path / "train_labels.pkl", labels)
    with pytest.raises(DataError, match=f"train_images_png.pkl: .*{message}"):
        find(tmp_path)


def test_a_stored_picture_of_another_kind_is_named_when_it_is_read(tmp_path):
    dump(tmp_path / "train_images_png.pkl", ["text"])
    dump(tmp_path / "train_labels.pkl", [0])
    with pytest.raises(DataError, match="image 0 is stored as str"):
        load(tmp_path, image_size=8, channels=3)


class Runs:
    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return os.mkdir, (self.canary,)


@pytest.mark.parametrize("name", [CACHE, SPLIT, "train_labels.pkl", "train_images_png.pkl"])
def test_code_in_the_file_of_any_layout_is_refused_and_never_runs(tmp_path, name):
    canary = tmp_path / "canary"
    for needed in ("train_labels.pkl", "train_images_png.pkl"):
        if name.startswith("train"):
            dump(tmp_path / needed, [0])
    dump(tmp_path / name, {"image_data": Runs(canary), "class_dict": {}, "data": 0, "labels": 0})
    with pytest.raises(DataError, match=f"{name}: refused, it contains code"):
        find(tmp_path)
    assert not canary.exists()
