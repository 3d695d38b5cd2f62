"""``torchemo export``: what is said and what is refused; the files are in tests/runs/sharing."""

import pytest

from tests.apps.cli.conftest import colour_picture


@pytest.fixture
def support(tmp_path):
    """Three classes of two images."""
    for c, (name, colour) in enumerate(
        {"dark": (20, 20, 30), "pale": (220, 220, 210), "red": (210, 30, 40)}.items()
    ):
        (tmp_path / "support" / name).mkdir(parents=True)
        for i in range(2):
            colour_picture(colour, 10 * c + i).save(tmp_path / "support" / name / f"{i}.png")
    return tmp_path / "support"


def test_an_adapted_classifier_is_written_and_told(torchemo, picture_runs, support, tmp_path):
    out = tmp_path / "a.pt2"
    found = torchemo("export", picture_runs / "memory", "--support", support, "--out", out)
    assert found.code == 0
    assert "dark, pale, red" in found.out
    assert "uint8 [batch, 3, 16, 16]" in found.out
    assert out.is_file()
    told = torchemo(
        *("export", picture_runs / "memory", "--support", support, "--out", out, "--json")
    ).json
    assert (told["file"], told["size"]) == (str(out), out.stat().st_size)
    assert told["difference"] < 1e-4
    assert told["checked"] == 14


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--out", "a.txt"), 2, ".onnx or .pt2"),
        (("--out", "a.pt2", "--format", "onnx"), 2, "ends with .onnx"),
        (("--out", "a.pt2", "--step", "7"), 4, "no checkpoint of step 7"),
    ],
)
def test_what_cannot_be_written_is_refused_first(
    torchemo, picture_runs, support, words, code, said
):
    found = torchemo("export", picture_runs / "memory", "--support", support, *words)
    assert (found.code, said in found.err) == (code, True)


def test_runs_and_folders_that_do_not_fit_are_refused(
    torchemo, point_runs, picture_runs, support, tmp_path
):
    out = ("--out", tmp_path / "a.pt2")
    assert torchemo("export", point_runs / "base", "--support", support, *out).code == 2
    assert torchemo("export", picture_runs / "memory", "--support", tmp_path / "no", *out).code == 3
    assert torchemo("export", tmp_path, "--support", support, *out).code == 2
    assert not (tmp_path / "a.pt2").exists()


def test_a_missing_package_is_named_before_anything_is_read(
    torchemo, picture_runs, support, monkeypatch
):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    found = torchemo("export", picture_runs / "memory", "--support", support)
    assert found.code == 2
    assert "onnxruntime" in found.err
    assert "torchemo[onnx]" in found.err
