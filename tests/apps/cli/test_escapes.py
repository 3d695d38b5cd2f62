"""Names that would command a terminal are spelt out by every command that shows them."""

import io
import shutil
import zipfile

import pytest

from tests.apps.cli.conftest import COLOURS, MEMORY, PICTURES, colour_picture
from torchemo.report.terminal import say

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r"
"""Sets the title, clears the screen, colours, turns the writing direction, returns the cursor."""


def quiet(found):
    text = found.out + found.err
    assert not [c for c in text if not c.isprintable() and c != "\n"], ascii(text)[:300]
    return text


@pytest.fixture
def evil_zip(tmp_path):
    """A zip of class folders whose classes and images have such names; one image cannot be read."""
    path = tmp_path / "evil.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for split, classes in COLOURS.items():
            for name, colour in classes.items():
                for number in range(18):
                    stream = io.BytesIO()
                    colour_picture(colour, number).save(stream, "PNG")
                    archive.writestr(f"{split}/{name}{EVIL}/{EVIL}{number}.png", stream.getvalue())
        archive.writestr(f"train/red{EVIL}/broken{EVIL}.png", b"no image")
    return path


def test_names_in_an_archive_are_spelt_out(torchemo, evil_zip, tmp_path):
    root = tmp_path / "run"
    words = ("train", "--out", root, "--preset", "maml-emo-paper", "--data", evil_zip)
    found = torchemo(*words, "--options", *PICTURES, *MEMORY)
    assert "broken\\x1b" in quiet(found)
    assert found.code == 7
    quiet(torchemo("data", "check", evil_zip))
    quiet(torchemo("memory", "show", root))
    folder = tmp_path / "images"
    for name, colour in list(COLOURS["test"].items())[:2]:
        (folder / f"{name}{EVIL}").mkdir(parents=True)
        colour_picture(colour, 1).save(folder / f"{name}{EVIL}" / "1.png")
    (folder / f"black{EVIL}" / f"bad{EVIL}.png").write_bytes(b"no image")
    quiet(torchemo("adapt", root, "--support", folder, "--query", folder / f"black{EVIL}"))


def test_keys_and_values_of_a_configuration_are_spelt_out(torchemo, point_runs, tmp_path):
    file = tmp_path / "evil.toml"
    for text in (f'"{EVIL!r}"=1'.replace("'", ""), '"\\u001b[2J" = 1', 'preset = "\\u001b[2J"'):
        file.write_text(text)
        found = torchemo("train", "--config", file, "--out", tmp_path / "run")
        assert found.code == 2
        quiet(found)
    root = shutil.copytree(point_runs / "base", tmp_path / "copy")
    with (root / "config.toml").open("a") as stream:
        stream.write('\n["\\u001b[2J"]\na = 1\n')
    quiet(torchemo("eval", root))
    quiet(torchemo("train", "--out", f"no{EVIL}/such/{EVIL}", "--data", f"nothing{EVIL}"))


def test_only_ends_of_lines_are_obeyed(capsys):
    say(f"a{EVIL}b\nc")
    assert capsys.readouterr().out == ("a\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202e\\rb\nc\n")


def test_letters_that_the_terminal_lacks_are_spelt_out():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    say("caf\u00e9", file=stream)
    assert stream.buffer.getvalue() == b"caf\\xe9\n"
