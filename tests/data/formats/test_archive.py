"""Zip archives: good ones are read, hostile ones are refused by the name of the member."""

import io
import stat
import time
import zipfile

import pytest

from torchemo.core.errors import DataError
from torchemo.data.formats.archive import Caps, list_zip


def test_pictures_are_listed_and_read_without_unpacking(zipped, picture, tmp_path):
    path = zipped({"wren/1.png": 1, "jay/2.JPG": picture(2, format="JPEG"), "readme.txt": b"hello"})
    before = sorted(tmp_path.iterdir())
    found = dict(list_zip(path))
    assert set(found) == {("wren",), ("jay",)}
    assert found["wren",].read() == picture(1)
    assert found["jay",].name == "set.zip:jay/2.JPG"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_packed_and_stored_members_give_the_same_bytes(zipped, picture, compression):
    path = zipped({"wren/1.png": 1}, compression=compression)
    assert list_zip(path)[0][1].read() == picture(1)


def test_system_and_hidden_files_are_passed_over(zipped):
    path = zipped(
        {"wren/1.png": 1, "__MACOSX/wren/1.png": b"", ".cache/2.png": b"", "wren/.3.png": b""}
    )
    assert [folders for folders, _ in list_zip(path)] == [("wren",)]


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        ("../../evil.png", "points outside the archive"),
        ("wren/../../evil.png", "points outside the archive"),
        ("/etc/evil.png", "is not a plain relative path"),
        ("C:/evil.png", "is not a plain relative path"),
        ("wren\\evil.png", "is not a plain relative path"),
        ("wren/more.zip", "is an archive itself"),
        ("wren/more.tar.gz", "is an archive itself"),
    ],
)
def test_members_that_could_land_elsewhere_or_hide_more_are_refused(zipped, member, reason):
    path = zipped({"wren/1.png": 1, member: b"x"})
    with pytest.raises(DataError, match=reason) as caught:
        list_zip(path)
    assert repr(member) in caught.value.message


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO])
def test_links_and_devices_are_refused(tmp_path, kind):
    member = zipfile.ZipInfo("wren/evil.png")
    member.create_system, member.external_attr = 3, (kind | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(member, "/etc/passwd")
    with pytest.raises(DataError, match=r"'wren/evil\.png', which is a link or a device"):
        list_zip(tmp_path / "a.zip")


def test_a_member_named_twice_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("wren/1.png", b"one")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("wren/1.png", b"two")
    with pytest.raises(DataError, match="is there twice"):
        list_zip(tmp_path / "a.zip")


def test_an_encrypted_member_is_refused(zipped):
    path = zipped({"wren/1.png": 1})
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="is encrypted"):
        list_zip(path)


def test_a_bomb_is_refused_by_its_ratio_and_a_small_blank_picture_is_not(zipped):
    bomb = zipped({"wren/1.bmp": bytes(50_000_000)}, compression=zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 100_000
    with pytest.raises(DataError, match=r"'wren/1\.bmp', which unpacks 10\d\d-fold"):
        list_zip(bomb)
    blank = zipped({"wren/1.bmp": bytes(500_000)}, compression=zipfile.ZIP_DEFLATED)
    assert len(list_zip(blank)) == 1


@pytest.mark.parametrize(
    ("caps", "message"),
    [
        (Caps(members=2), "has 3 members, at most 2"),
        (Caps(total_bytes=500), "unpacks to .* bytes, at most 500"),
        (Caps(member_bytes=100), "which unpacks to .* bytes"),
        (Caps(directory_bytes=100), "table of contents has .* bytes"),
    ],
)
def test_caps_are_kept(zipped, caps, message):
    with pytest.raises(DataError, match=message):
        list_zip(zipped({"a/1.png": 1, "b/1.png": 2, "c/1.png": 3}), caps=caps)


def many_members(path, n):
    """Write an archive of n empty members by hand; zipfile would take a minute."""
    one = io.BytesIO()
    with zipfile.ZipFile(one, "w") as archive:
        archive.writestr("a.png", b"")
    data = one.getvalue()
    directory = data[data.index(b"PK\x01\x02") : data.index(b"PK\x05\x06")]
    local, end = data[: data.index(b"PK\x01\x02")], data[data.index(b"PK\x05\x06") :]
    total = (len(directory) * n).to_bytes(4, "little")
    path.write_bytes(local + directory * n + end[:12] + total + end[16:])


def test_a_million_members_are_refused_at_once(tmp_path):
    many_members(tmp_path / "a.zip", 10**6)
    begin = time.process_time()
    with pytest.raises(DataError, match="table of contents"):
        list_zip(tmp_path / "a.zip")
    assert time.process_time() - begin < 1


def test_an_archive_with_the_long_form_of_the_table_of_contents_is_read(
    tmp_path, monkeypatch, picture
):
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for i in range(3):
            archive.writestr(f"wren/{i}.png", picture(i))
    assert b"PK\x06\x07" in (tmp_path / "a.zip").read_bytes()
    assert [p.read() for _, p in list_zip(tmp_path / "a.zip")] == [picture(i) for i in range(3)]
    data = bytearray((tmp_path / "a.zip").read_bytes())
    short = data.index(b"PK\x05\x06")
    data[short + 12 : short + 16] = bytes(4)
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(DataError, match="table of contents"):
        list_zip(tmp_path / "a.zip", caps=Caps(directory_bytes=100))


def test_a_member_that_lies_about_its_size_unpacks_to_no_more_than_it_said(zipped):
    path = zipped({"wren/1.bmp": bytes(50_000_000)}, compression=zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = (1000).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"set\.zip:wren/1\.bmp: cannot be read from the archive"):
        list_zip(path)[0][1].read()


def test_a_damaged_member_is_named(zipped):
    path = zipped({"wren/1.png": 1})
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"set\.zip:wren/1\.png: cannot be read .*CRC"):
        list_zip(path)[0][1].read()


@pytest.mark.parametrize("cut", [0, 1, 30, 100, -1])
def test_a_torn_archive_is_refused_by_name(zipped, cut):
    path = zipped({"wren/1.png": 1})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"set\.zip: is no readable zip archive"):
        list_zip(path)
