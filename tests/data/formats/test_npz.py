"""Arrays in .npz files: what is understood, and that nothing in them is ever executed."""

import os
import pickle
import zipfile

import numpy as np
import pytest

from torchemo.core.errors import DataError, ResourceError
from torchemo.data.formats import npz
from torchemo.data.formats.npz import list_npz
from torchemo.data.load import load

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), np.uint8)
LABEL = np.array([0, 1, 0, 2, 1, 1], np.int16)


def listed(tmp_path, **arrays):
    path = tmp_path / "set.npz"
    np.savez(path, **({"images": IMAGES, "label": LABEL} | arrays))
    return list_npz(path, domain="given")


def test_rows_are_sorted_into_classes(tmp_path):
    classes = listed(tmp_path, class_names=np.array(["wren", "jay", "tit"]))
    assert [(c.name, c.split, c.domain) for c in classes] == [
        ("wren", None, "given"),
        ("jay", None, "given"),
        ("tit", None, "given"),
    ]
    for c, listed_class in enumerate(classes):
        rows = [i for i, label in enumerate(LABEL.tolist()) if label == c]
        assert [p.name for p in listed_class.pictures] == [f"set.npz[{row}]" for row in rows]
        for row, picture in zip(rows, listed_class.pictures, strict=True):
            assert np.array_equal(picture.read(), IMAGES[row])


@pytest.mark.parametrize("images", [IMAGES.transpose(0, 3, 1, 2), IMAGES])
def test_channels_may_come_first_or_last(tmp_path, images):
    assert np.array_equal(listed(tmp_path, images=images)[0].pictures[0].read(), IMAGES[0])


def test_grey_pictures_need_no_channel_axis_and_a_class_may_be_empty(tmp_path):
    names = np.array(["wren", "jay", "tit", "dodo"])
    classes = listed(tmp_path, images=IMAGES[..., 0], labels=LABEL, class_name=names)
    assert classes[0].pictures[0].read().shape == (8, 8)
    assert [len(c.pictures) for c in classes] == [2, 3, 1, 0]


@pytest.mark.parametrize(
    ("arrays", "names"),
    [
        ({}, ["class 0000", "class 0001", "class 0002"]),
        (
            {
                "class_alphabet": np.array(["A", "A", "B"]),
                "class_character": np.array(["1", "2", "1"]),
            },
            ["A/1", "A/2", "B/1"],
        ),
    ],
)
def test_names_are_made_where_there_is_no_list_of_them(tmp_path, arrays, names):
    assert [c.name for c in listed(tmp_path, **arrays)] == names


def test_splits_and_domains_of_classes_are_read(tmp_path):
    classes = listed(
        tmp_path,
        class_split=np.array(["background", "evaluation", "validation"]),
        class_domain=np.array(["a", "b", "a"]),
    )
    assert [(c.split, c.domain) for c in classes] == [("train", "a"), ("test", "b"), ("val", "a")]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"label": LABEL[:5]}, r"label should be integers of shape \[6\]"),
        ({"label": LABEL.astype(float)}, "label should be integers"),
        ({"label": LABEL - 1}, "a label is negative"),
        ({"class_names": np.array(["wren", "jay"])}, "has label 2, but only 2 class names"),
        ({"class_split": np.array(["train", "test"])}, "class_split has 2 entries for 3 classes"),
        ({"class_split": np.array(["train", "dev", "test"])}, "class_split holds 'dev'"),
        ({"label": LABEL.astype(np.int64) * 2_000_000_000}, "has label 4000000000"),
        ({"label": LABEL.astype(np.int64) * 2**61}, "has label 4611686018427387904"),
        ({"label": np.array([0, 1, 0, 1, 1, 2**63 - 1])}, "has label 9223372036854775807"),
        ({"label": np.array([2**64 - 1] * 6, np.uint64)}, "has label 18446744073709551615"),
        ({"images": IMAGES[..., 0, 0]}, r"images should be uint8 of shape .* got uint8 of shape"),
        ({"images": np.uint8(3), "label": np.int64(0)}, "images should be uint8 of shape"),
        ({"images": IMAGES.astype(float)}, "images should be uint8 of shape"),
        (
            {"class_names": np.array("wren")},
            r"class_names should have shape \[classes\].* got \[\]",
        ),
        ({"class_split": np.array("train")}, "class_split should have shape"),
        ({"class_names": np.array([["a"], ["b"], ["c"]])}, "class_names should have shape"),
        (
            {"class_alphabet": np.array(["A"]), "class_character": np.array(["1", "2", "1"])},
            "class_alphabet has 1 entries, class_character 3",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, arrays, message):
    with pytest.raises(DataError, match=message):
        listed(tmp_path, **arrays)


def test_missing_arrays_are_named(tmp_path):
    np.savez(tmp_path / "set.npz", pictures=IMAGES)
    with pytest.raises(DataError, match=r"no array 'images', only 'pictures'\."):
        list_npz(tmp_path / "set.npz", domain="x")


class Hostile:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def test_an_array_of_objects_is_refused_and_its_code_never_runs(tmp_path):
    canary = tmp_path / "canary"
    hostile = np.empty(1, dtype=object)
    hostile[0] = Hostile(canary)
    with pytest.raises(DataError, match="refused"):
        listed(tmp_path, class_names=hostile)
    with zipfile.ZipFile(tmp_path / "raw.npz", "w") as archive:
        archive.writestr("images.npy", pickle.dumps(Hostile(canary)))
    with pytest.raises(DataError, match="refused, its arrays cannot be read"):
        list_npz(tmp_path / "raw.npz", domain="x")
    assert not canary.exists()


def test_a_bomb_of_zeros_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "set.npz", images=np.zeros((1000, 100, 100, 3), np.uint8))
    with pytest.raises(DataError, match=r"'images\.npy', which unpacks"):
        list_npz(tmp_path / "set.npz", domain="x")


def test_a_header_that_promises_too_much_is_refused(tmp_path):
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (9000000000000000,), }\n"
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(tmp_path / "set.npz", "w") as archive:
        archive.writestr("images.npy", array)
    with pytest.raises(DataError, match="refused, its arrays cannot be read"):
        list_npz(tmp_path / "set.npz", domain="x")


def forged(path, header, content=b"", name="class_names.npy"):
    """Save an archive whose array has a header of its own choice."""
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content
    np.savez(path, images=IMAGES, label=LABEL)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, array)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{'descr': '<U0', 'fortran_order': False, 'shape': (900000000000,), }\n", "holds <U0"),
        (b"{'descr': '<U9', 'fortran_order': False, 'shape': (900000000000,), }\n", "should have"),
        (b"{'descr': 'V8', 'fortran_order': False, 'shape': (0,), }\n", "not plain numbers"),
        (b"{" * 9000, "cannot be read"),
        (b"{'shape': (" + b"1," * 6000 + b"),}", "cannot be read"),
    ],
)
def test_a_header_is_checked_before_anything_is_allocated(tmp_path, header, message):
    forged(tmp_path / "set.npz", header)
    with pytest.raises(DataError, match=message) as refused:
        list_npz(tmp_path / "set.npz", domain="x")
    assert "allow_pickle" not in refused.value.message  # no refusal says how to turn a check off


def test_arrays_of_no_use_are_never_unpacked(tmp_path):
    forged(tmp_path / "set.npz", b"{'descr': '|O', no sense", name="junk.npy")
    assert len(list_npz(tmp_path / "set.npz", domain="x")) == 3


def test_an_archive_that_memory_cannot_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(npz, "physical_memory", lambda: 100)
    with pytest.raises(ResourceError, match="this machine has 100 bytes"):
        listed(tmp_path)


def test_names_that_look_the_same_are_one_name(tmp_path):
    twins = np.array(["caf\u00e9", "cafe\u0301", "tit"])
    np.savez(tmp_path / "set.npz", images=IMAGES, label=LABEL, class_names=twins)
    with pytest.raises(DataError, match="appears 2 times"):
        load(tmp_path / "set.npz")
