"""Published folders: tiny trees of each layout are recognised and read."""

import numpy as np
import pytest
import scipy.io
from PIL import Image

from torchemo.core.errors import DataError
from torchemo.data.layouts import LAYOUTS
from torchemo.data.layouts.btaf import BTAF
from torchemo.data.load import find, load
from torchemo.data.splits import Proportions, SplitFile


def names_by_split(index):
    return {
        split: [index.class_names[c] for c in index.classes(split=split)]
        for split in ("train", "val", "test")
    }


@pytest.mark.parametrize("parent", ["plainmulti", "meta-dataset", "artmulti", "."])
@pytest.mark.parametrize("art", [False, True])
def test_btaf_and_art_multi(tree, parent, art):
    domains = [d + s for d in BTAF for s in (("", "_blur", "_pencil") if art else ("",))]
    root = tree(
        {
            f"{parent}/{domain}/{split}/{split} {c}/{i}.jpg": 100 * c + i
            for domain in domains
            for split in ("train", "val", "test")
            for c in range(2)
            for i in range(2)
        }
    )
    listing = find(root)
    assert listing.layout == ("Art-Multi" if art else "Meta-Dataset-BTAF")
    index = load(root)
    assert index.shape == (3, 84, 84)
    assert index.domains == tuple(domains)
    assert index.summary()[0].classes == {"train": 2, "val": 2, "test": 2}


def omniglot_tree(tree):
    return tree(
        {
            f"python/{part}/{alphabet}/character0{c}/{c}_{i}.png": 10 * c + i
            for part, alphabet in (("images_background", "Greek"), ("images_evaluation", "Angelic"))
            for c in (2, 1)
            for i in range(2)
        }
    )


def test_omniglot_is_small_grey_and_inverted(tree):
    root = omniglot_tree(tree)
    index = load(root)
    assert index.shape == (1, 28, 28)
    assert names_by_split(index) == {
        "train": ["Greek/character01", "Greek/character02"],
        "val": [],
        "test": ["Angelic/character01", "Angelic/character02"],
    }
    file = Image.open(root / "python" / "images_background" / "Greek" / "character01" / "1_0.png")
    oracle = 255 - np.asarray(file.resize((28, 28), Image.Resampling.LANCZOS).convert("L")).astype(
        int
    )
    assert np.array_equal(index.images[index.images_of(0)[0], 0], oracle)


def test_omniglot_takes_splits_by_place_and_by_proportion(tree):
    root = omniglot_tree(tree)
    by_place = load(root, splits={"train": [0, 2], "val": [1], "test": [3]})
    assert names_by_split(by_place)["train"] == ["Greek/character01", "Angelic/character01"]
    assert [len(v) for v in names_by_split(load(root, splits=Proportions(2, 1, 1))).values()] == [
        2,
        1,
        1,
    ]


def test_omniglot_folders_have_the_classes_of_the_real_array_in_the_same_order(real_data, tree):
    arrays = find(real_data / "omniglot28.npz", splits=Proportions(1, 0, 0))
    stored = np.load(real_data / "omniglot28.npz")
    parts = {"background": "images_background", "evaluation": "images_evaluation"}
    columns = zip(
        stored["class_split"], stored["class_alphabet"], stored["class_character"], strict=True
    )
    root = tree({f"{parts[s]}/{a}/{c}/0001_01.png": b"" for s, a, c in columns})
    folders = find(root, splits=Proportions(1, 0, 0))
    assert [c.name for c in folders.classes] == [c.name for c in arrays.classes]


def test_mini_imagenet_with_lists_of_pictures(tree):
    rows = {
        "train": [("n01a.jpg", "n01"), ("n02a.jpg", "n02"), ("n01b.jpg", "n01")],
        "val": [("n03a.jpg", "n03")],
        "test": [("n04a.jpg", "n04")],
    }
    held = [name for pairs in rows.values() for name, _ in pairs]
    files = {f"images/{name}": i for i, name in enumerate(held)}
    lists = {
        f"{split}.csv": "\r\n".join(["filename,label", *(",".join(r) for r in held)]).encode()
        for split, held in rows.items()
    }
    root = tree(files | lists)
    index = load(root)
    assert names_by_split(index) == {"train": ["n01", "n02"], "val": ["n03"], "test": ["n04"]}
    expected = np.asarray(Image.open(root / "images" / "n01b.jpg")).transpose(2, 0, 1)
    assert np.array_equal(index.images[index.images_of(0)[1]], expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"filename,label\n../../secret.jpg,n01\n", "outside its folder: '../../secret.jpg'"),
        (b"filename,label\n/etc/secret.jpg,n01\n", "outside its folder"),
        (b"file,label\na.jpg,n01\n", "needs a filename and a label"),
        (b"filename,label\na.jpg\n", "needs a filename and a label"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_lists_of_pictures_that_do_not_fit_are_refused(tree, content, message):
    with pytest.raises(DataError, match=r"train\.csv: .*" + message):
        find(tree({"images/a.jpg": 1, "train.csv": content}))


def test_cifar_fs_folders_with_lists_of_classes(tree):
    root = tree(
        {
            f"cifar100/data/{name}/{i}.png": 10 * c + i
            for c, name in enumerate("abcde")
            for i in range(2)
        }
        | {
            "cifar100/splits/bertinetto/train.txt": b"a\nb\n",
            "cifar100/splits/bertinetto/val.txt": b"c\n",
            "cifar100/splits/bertinetto/test.txt": b"d",
            "cifar100/splits/another/train.txt": b"d\n",
        }
    )
    assert names_by_split(load(root)) == {"train": ["a", "b"], "val": ["c"], "test": ["d"]}
    assert find(root).layout == "CIFAR-FS folders (bertinetto)"


def gradient(size=40):
    x = np.arange(size, dtype=np.uint8)
    return np.stack(np.broadcast_arrays(x[None, :], x[:, None], np.uint8(7)), -1)


def as_png(tmp_path, pixels):
    Image.fromarray(pixels).save(tmp_path / "one.png")
    return (tmp_path / "one.png").read_bytes()


def test_cub_is_cut_to_its_boxes(tree, tmp_path):
    content = as_png(tmp_path, gradient())
    root = tree(
        {
            "CUB_200_2011/images/001.Wren/Wren_1.jpg": content,
            "CUB_200_2011/images/002.Jay/Jay_1.jpg": content,
            "CUB_200_2011/images.txt": b"1 001.Wren/Wren_1.jpg\n2 002.Jay/Jay_1.jpg\n",
            "CUB_200_2011/bounding_boxes.txt": b"1 10.0 20.0 8.0 8.0\n2 0.0 1.0 8.0 8.0\n",
        }
    )
    index = load(root, splits={"train": ["001.Wren"], "test": ["002.Jay"]}, image_size=8)
    assert np.array_equal(index.images[0].transpose(1, 2, 0), gradient()[20:28, 10:18])
    assert np.array_equal(index.images[1].transpose(1, 2, 0), gradient()[1:9, 0:8])
    assert load(root, boxes=False).shape == (3, 40, 40)


def test_fgvc_aircraft_is_sorted_by_variant_and_cut_to_its_boxes(tree, tmp_path):
    content = as_png(tmp_path, gradient())
    root = tree(
        {f"fgvc-aircraft-2013b/data/images/000{i}.jpg": content for i in range(4)}
        | {
            "fgvc-aircraft-2013b/data/images_variant_trainval.txt": b"0000 707-320\n0001 A300B4 new\n",
            "fgvc-aircraft-2013b/data/images_variant_train.txt": b"0000 707-320\n",
            "fgvc-aircraft-2013b/data/images_variant_test.txt": b"0002 707-320\n0003 A300B4 new\n",
            "fgvc-aircraft-2013b/data/images_box.txt": b"0000 1 1 8 8\n0001 11 21 18 28\n"
            b"0002 1 1 8 8\n0003 1 1 8 8\n",
        }
    )
    index = load(root, splits={"train": ["707-320"], "test": ["A300B4 new"]}, image_size=8)
    assert index.counts.tolist() == [2, 2]
    assert np.array_equal(index.images[0].transpose(1, 2, 0), gradient()[0:8, 0:8])
    assert np.array_equal(index.images[2].transpose(1, 2, 0), gradient()[20:28, 10:18])


def test_flowers_are_labelled_by_their_matlab_file(tree):
    root = tree({f"jpg/image_0000{i}.jpg": i for i in range(1, 6)})
    scipy.io.savemat(root / "imagelabels.mat", {"labels": np.array([[2, 1, 2, 77, 1]], np.uint8)})
    index = load(root, splits=Proportions(1, 0, 0))
    assert index.class_names == ("001", "002", "077")
    assert index.counts.tolist() == [2, 2, 1]
    expected = np.asarray(Image.open(root / "jpg" / "image_00003.jpg")).transpose(2, 0, 1)
    assert np.array_equal(index.images[index.images_of(1)[1]], expected)
    scipy.io.savemat(root / "imagelabels.mat", {"labels": np.array([[2, 1]], np.uint8)})
    with pytest.raises(DataError, match=r"imagelabels\.mat: has 2 labels for 5 images"):
        find(root)


@pytest.mark.parametrize("label", [np.nan, np.inf, -1.0, 1.5, 1e300])
def test_flowers_labels_that_are_no_whole_numbers_are_refused(tree, label):
    root = tree({f"jpg/image_0000{i}.jpg": i for i in range(1, 3)})
    scipy.io.savemat(root / "imagelabels.mat", {"labels": np.array([[2, label]])})
    with pytest.raises(DataError, match=r"imagelabels\.mat: its labels should be whole numbers"):
        find(root)


@pytest.mark.parametrize(
    "files",
    [
        {"dtd/images/{}/{}_01.jpg": 3, "dtd/labels/train1.txt": b"", "dtd/imdb/imdb.mat": b""},
        {"fgvc_fungi/images/{}/{}.JPG": 3, "fgvc_fungi/train.json": b"{}"},
        {"{}/{}.jpg": 3},
    ],
)
def test_dtd_fungi_and_other_class_folders_need_no_special_treatment(tree, files):
    placed = {}
    for pattern, content in files.items():
        for c, name in enumerate(["banded", "dotted"]):
            placed[pattern.format(name, name)] = (
                content + c if isinstance(content, int) else content
            )
    index = load(tree(placed), splits={"train": ["banded"], "test": ["dotted"]})
    assert index.class_names == ("banded", "dotted")


def test_a_split_file_overrides_the_splits_of_a_layout(tree, tmp_path):
    root = omniglot_tree(tree)
    (tmp_path / "mine.json").write_text('{"val": ["Greek/character01"]}')
    index = load(root, splits=SplitFile(tmp_path / "mine.json"))
    assert names_by_split(index) == {"train": [], "val": ["Greek/character01"], "test": []}


def test_a_folder_with_several_published_sets_asks_for_one(tree):
    root = tree({f"{part}/images_background/Greek/c1/1.png": 1 for part in ("one", "two")})
    with pytest.raises(
        DataError, match=r"holds several image sets: Omniglot in .*one, Omniglot in"
    ):
        find(root)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"images_background/Greek/1.png": 1}, "lies outside any folder of a character"),
        (
            {"images/a/1.jpg": 1, "images.txt": b"1\n", "bounding_boxes.txt": b""},
            r"images\.txt: expected a number and a name",
        ),
        (
            {
                "images/a/1.jpg": 1,
                "images.txt": b"1 a/1.jpg\n",
                "bounding_boxes.txt": b"1 x 0 1 1\n",
            },
            r"bounding_boxes\.txt: expected numbers",
        ),
        (
            {
                "images/1.jpg": 1,
                "images_variant_test.txt": b"1 A\n",
                "images_box.txt": b"1 1 1 2\n",
            },
            r"images_box\.txt: expected 4 numbers",
        ),
        (
            {"images/1.jpg": 1, "images_variant_test.txt": b"../../1 A\n"},
            "outside its folder",
        ),
    ],
)
def test_layouts_that_are_damaged_are_refused_by_name(tree, files, message):
    with pytest.raises(DataError, match=message):
        find(tree(files))


def test_no_reader_claims_a_plain_folder(tree):
    root = tree({"wren/1.png": 1, "jay/1.png": 2, "notes.txt": b""})
    assert [reader(root, "x") for reader in LAYOUTS.values()] == [None] * len(LAYOUTS)
