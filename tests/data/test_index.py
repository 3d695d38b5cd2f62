"""ClassIndex: what it refuses, what it finds, and what its fingerprint sees."""

import itertools

import numpy as np
import pytest

from torchemo.core.errors import DataError
from torchemo.data.index import ClassIndex, merge

NAMES = ("wren", "robin", "banded", "dotted", "jay")
SPLIT = ("train", "test", "train", "test", "val")
DOMAIN = ("birds", "birds", "textures", "textures", "birds")


def pictures(n=12, channels=3, size=4, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, channels, size, size), dtype=np.uint8)


def small_index(**changes):
    fields = {
        "images": pictures(),
        "label": np.array([0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 2], dtype=np.int16),
        "class_names": NAMES,
        "class_split": SPLIT,
        "class_domain": DOMAIN,
    }
    return ClassIndex(**(fields | changes))


def test_counts_and_picture_ids_agree_with_a_loop_over_the_labels():
    index = small_index()
    for c in range(5):
        expected = [i for i, label in enumerate(index.label.tolist()) if label == c]
        assert index.images_of(c).tolist() == expected
        assert index.counts[c] == len(expected)
    assert len(index) == 12
    assert index.shape == (3, 4, 4)


def test_classes_are_found_by_split_by_domain_and_by_both():
    index = small_index()
    for split, domain in itertools.product((None, "train", "val", "test"), (None, *index.domains)):
        expected = [
            c for c in range(5) if split in (None, SPLIT[c]) and domain in (None, DOMAIN[c])
        ]
        assert index.classes(split=split, domain=domain).tolist() == expected
    assert index.domains == ("birds", "textures")
    assert index.domain_of_class.tolist() == [0, 0, 1, 1, 0]


def test_a_subset_keeps_names_splits_and_the_very_pictures_of_its_classes():
    index = small_index()
    part = index.subset(domain="birds", min_images=2)
    assert part.class_names == ("wren", "robin")
    assert part.class_split == ("train", "test")
    for c, name in enumerate(part.class_names):
        whole = index.images[index.images_of(NAMES.index(name))]
        assert np.array_equal(part.images[part.images_of(c)], whole)


def test_a_subset_of_neighbouring_pictures_is_a_view_and_any_other_is_a_copy():
    label = np.repeat(np.arange(5), [3, 2, 2, 3, 2])
    index = small_index(label=label)
    assert np.shares_memory(index.select([0, 1]).images, index.images)
    assert not np.shares_memory(index.select([0, 2]).images, index.images)


def test_selected_classes_come_in_the_order_asked_for():
    index = small_index()
    part = index.select([3, 0])
    assert part.class_names == ("dotted", "wren")
    assert np.array_equal(part.images[part.images_of(0)], index.images[index.images_of(3)])


def test_merging_two_domains_keeps_both_and_renumbers_classes():
    index = small_index()
    birds, textures = (index.subset(domain=domain) for domain in index.domains)
    whole = merge([textures, birds])
    assert whole.domains == ("textures", "birds")
    assert len(whole) == len(index)
    for c, name in enumerate(whole.class_names):
        expected = index.images[index.images_of(NAMES.index(name))]
        assert np.array_equal(whole.images[whole.images_of(c)], expected)


def test_merging_refuses_other_picture_shapes_and_naming_a_class_twice():
    index = small_index()
    with pytest.raises(DataError, match=r"birds.*\(3, 4, 4\).*\(1, 4, 4\)"):
        merge([index, small_index(images=pictures(channels=1))])
    with pytest.raises(DataError, match="class 'wren' of domain 'birds' appears 2 times"):
        merge([index, index])
    with pytest.raises(DataError, match="nothing to merge"):
        merge([])


def test_the_summary_counts_by_domain_and_split():
    birds, textures = small_index().summary()
    assert birds == ("birds", {"train": 1, "val": 1, "test": 1}, 7, 1, 4)
    assert textures == ("textures", {"train": 1, "val": 0, "test": 1}, 5, 2, 3)


def test_the_fingerprint_ignores_where_pictures_lie_and_how_labels_are_stored(tmp_path):
    index = small_index()
    np.save(tmp_path / "images.npy", index.images)
    mapped = small_index(
        images=np.load(tmp_path / "images.npy", mmap_mode="r"), label=index.label.astype(np.uint8)
    )
    assert mapped.fingerprint() == index.fingerprint()
    assert len(index.fingerprint()) == 64


def test_the_fingerprint_sees_every_field():
    index = small_index()
    images = pictures()
    images[7, 1, 2, 3] ^= 1
    label = np.array(index.label)
    label[[0, 1]] = label[[1, 0]]
    others = [
        small_index(images=images),
        small_index(label=label),
        small_index(class_names=("Wren", *NAMES[1:])),
        small_index(class_split=("val", *SPLIT[1:])),
        small_index(class_domain=("bird", *DOMAIN[1:])),
    ]
    assert len({index.fingerprint(), *(other.fingerprint() for other in others)}) == 6


def test_the_fingerprint_does_not_depend_on_the_size_of_its_reading_steps(monkeypatch):
    index = small_index()
    whole = index.fingerprint()
    monkeypatch.setattr("torchemo.data.index._HASH_BYTES", 50)
    assert index.fingerprint() == whole


def test_pictures_and_labels_cannot_be_changed_through_the_index():
    images = pictures()
    index = small_index(images=images)
    with pytest.raises(ValueError, match="read-only"):
        index.images[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        index.label[0] = 1
    assert images.flags.writeable
    assert np.shares_memory(images, index.images)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": pictures().astype(np.float32)}, "uint8.*got float32"),
        ({"images": pictures()[:, 0]}, r"\[n, C, H, W\]"),
        ({"images": pictures(channels=2)}, "1 or 3 channels"),
        ({"images": pictures(n=0), "label": np.zeros(0, np.int64)}, "no images"),
        ({"label": np.zeros(11, np.int64)}, r"shape \[12\]"),
        ({"label": np.zeros(12)}, "float64"),
        ({"label": np.array([0] * 11 + [5])}, "image 11 has label 5; there are 5 classes"),
        ({"label": np.array([0, -1] + [0] * 10)}, "image 1 has label -1"),
        ({"class_split": SPLIT[:4]}, "5 class names, 4 splits"),
        ({"class_split": ("training", *SPLIT[1:])}, "class 'wren' has split 'training'"),
        ({"class_names": ("", *NAMES[1:])}, "empty name"),
        (
            {"class_names": ("jay", *NAMES[1:])},
            r"class 'jay' of domain 'birds' appears 2 times, in splits \['train', 'val'\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, message):
    with pytest.raises(DataError, match=message):
        small_index(**changes)


def test_asking_for_an_unknown_split_or_domain_names_the_known_ones():
    index = small_index()
    with pytest.raises(DataError, match=r"no split 'dev'(?s:.)*'train', 'val', 'test'"):
        index.classes(split="dev")
    with pytest.raises(DataError, match=r"no domain 'fungi'(?s:.)*'birds', 'textures'"):
        index.subset(domain="fungi")
    with pytest.raises(DataError, match="no class left"):
        index.subset(min_images=100)
