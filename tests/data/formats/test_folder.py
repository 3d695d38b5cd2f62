"""Class folders: what is listed, what is passed over, and what cannot be read."""

import os

import pytest

from torchemo.core.errors import DataError
from torchemo.data.formats import folder
from torchemo.data.formats.folder import list_folder


def test_pictures_come_sorted_with_the_folders_above_them(tree, picture):
    root = tree({"wren/b.png": 1, "wren/a.JPEG": 2, "train/jay/c.webp": 3})
    pictures, empty = list_folder(root)
    assert [(folders, os.path.basename(p.name)) for folders, p in pictures] == [
        (("train", "jay"), "c.webp"),
        (("wren",), "a.JPEG"),
        (("wren",), "b.png"),
    ]
    assert pictures[2][1].read() == picture(1)
    assert empty == []


def test_hidden_files_and_other_files_are_passed_over(tree):
    root = tree({"wren/a.png": 1, "wren/.b.png": 2, "wren/notes.txt": b"", ".git/c.png": 3})
    tree({"__MACOSX/d.png": 4})
    assert [folders for folders, _ in list_folder(root)[0]] == [("wren",)]


def test_pictures_of_unreadable_formats_are_listed_so_that_they_can_be_refused(tree):
    assert len(list_folder(tree({"wren/a.gif": b"GIF89a", "wren/b.heic": b""}))[0]) == 2


def test_empty_folders_are_reported(tree):
    root = tree({"wren/a.png": 1, "notes/readme.txt": b""})
    (root / "jay").mkdir()
    assert sorted(list_folder(root)[1]) == [("jay",), ("notes",)]


@pytest.mark.parametrize(
    "name", ["with space", "new\nline", "日本語", "ends with dot.", "'quote\""]
)
def test_unusual_names_survive(tree, picture, name):
    ((folders, found),) = list_folder(tree({f"{name}/{name}.png": 1}))[0]
    assert folders == (name,)
    assert found.read() == picture(1)


def test_a_class_folder_may_be_a_link(tree, tmp_path):
    root = tree({"wren/a.png": 1})
    (root / "jay").symlink_to(tree({"b.png": 2}, name="elsewhere"), target_is_directory=True)
    assert [folders for folders, _ in list_folder(root)[0]] == [("jay",), ("wren",)]


def test_a_circle_of_links_ends(tree):
    root = tree({"wren/a.png": 1})
    (root / "wren" / "again").symlink_to(root, target_is_directory=True)
    assert len(list_folder(root)[0]) == 1


@pytest.mark.timeout(20)
def test_many_circles_of_links_end_soon(tree):
    root = tree({"wren/a.png": 1})
    for i in range(12):
        (root / f"again{i}").symlink_to(".", target_is_directory=True)
    assert [folders for folders, _ in list_folder(root)[0]] == [("wren",)]


def test_links_that_multiply_folders_are_refused(tree, monkeypatch):
    root = tree({"wren/a.png": 1})
    for i in range(12):
        (root / f"again{i}").symlink_to("wren", target_is_directory=True)
    monkeypatch.setattr(folder, "MAX_FOLDERS", 10)
    with pytest.raises(DataError, match="has more than 10 folders in it"):
        list_folder(root)


def test_a_picture_that_is_no_ordinary_file_or_is_gone_is_refused_by_name(tree):
    root = tree({"wren/a.png": 1})
    (root / "wren" / "b.png").symlink_to(os.devnull)
    (root / "wren" / "c.png").symlink_to(root / "nowhere")
    pictures = [picture for _, picture in list_folder(root)[0]]
    with pytest.raises(DataError, match=r"b\.png: is no ordinary file"):
        pictures[1].read()
    with pytest.raises(DataError, match=r"c\.png: cannot be read \(No such file"):
        pictures[2].read()


def test_a_huge_file_is_refused_before_it_is_read(tree):
    root = tree({"wren/a.png": 1})
    with (root / "wren" / "a.png").open("wb") as stream:
        stream.truncate(1 << 33)
    with pytest.raises(DataError, match=r"a\.png: has 8589934592 bytes, too many"):
        list_folder(root)[0][0][1].read()


def test_a_folder_that_may_not_be_listed_is_refused_by_name(tree, monkeypatch):
    root, scandir = tree({"wren/a.png": 1}), os.scandir

    def deny(path):
        if str(path).endswith("wren"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deny)
    with pytest.raises(DataError, match=r"wren: cannot be listed \(Permission denied\)"):
        list_folder(root)
