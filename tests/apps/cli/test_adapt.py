"""adapt and doctor from the command line: what they print, write and refuse."""

import json
import shutil
from dataclasses import replace

import pytest
from PIL import Image

from tests.apps.cli.conftest import COLOURS, colour_picture
from tests.report.conftest import answers
from torchemo.apps.cli.adapt import _show
from torchemo.lab import doctor
from torchemo.runs.storage import checkpoint


@pytest.fixture
def folders(tmp_path):
    """Support images of black and white, two and three of them, and a query of either."""
    support, query = tmp_path / "support", tmp_path / "query"
    query.mkdir()
    for seed, (name, shots) in enumerate((("black", 2), ("white", 3))):
        (support / name).mkdir(parents=True)
        for shot in range(shots):
            picture = colour_picture(COLOURS["test"][name], 1000 + 10 * seed + shot, size=40)
            picture.save(support / name / f"{shot}.jpg")
        colour_picture(COLOURS["test"][name], 2000 + seed).save(query / f"{name}.png")
    return support, query


def spoil(folder):
    for file in folder.iterdir():
        file.write_text("these are words")


def mixed(folder):
    """Twenty good images in a folder, and one each of six that are trouble."""
    for i in range(20):
        colour_picture(COLOURS["test"]["black"], i, size=40).save(folder / f"good {i:02}.jpg")
    whole = (folder / "good 00.jpg").read_bytes()
    (folder / "corrupt.jpg").write_bytes(whole[: len(whole) // 3])
    (folder / "words.jpg").write_text("these are words")
    good = Image.open(folder / "good 01.jpg")
    good.save(folder / "moves.gif", save_all=True, append_images=[good.rotate(90)])
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.from_pillow(good).save(folder / "telephone.heic")
    good.resize((9000, 7000)).save(folder / "63 megapixels.jpg", quality=60)
    good.resize((1, 1)).save(folder / "tiny.png")
    return {"corrupt.jpg", "words.jpg", "tiny.png"}


def words(run, folders, *more):
    support, query = folders
    return ("adapt", run, "--support", support, "--query", query, *more)


def test_queries_are_answered_in_a_table_and_two_files(torchemo, picture_runs, folders, tmp_path):
    out = tmp_path / "answers"
    found = torchemo(*words(picture_runs / "memory", folders, "--out", out))
    assert found.code == 0
    for text in (
        "black.png",
        "white.png",
        "runner-up",
        "recalled slots, with their distance: ",
        "(colours, ",
    ):
        assert text in found.out
    saved = json.loads((out / "predictions.json").read_text())
    assert saved["classes"] == {"black": 2, "white": 3}
    assert [p["file"] for p in saved["predictions"]] == ["black.png", "white.png"]
    page = (out / "sheet.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 2 + 5  # queries and support


@pytest.mark.slow
def test_trouble_in_a_folder_costs_no_other_answer_and_is_told_everywhere(
    torchemo, picture_runs, folders, tmp_path
):
    bad, out = mixed(folders[1]), tmp_path / "answers"
    found = torchemo(*words(picture_runs / "proto", folders, "--out", out))
    saved = json.loads((out / "predictions.json").read_text())
    names = {p.name for p in folders[1].iterdir()}
    assert found.code == 7
    assert {p["file"] for p in saved["predictions"]} == names - bad
    assert {one["name"] for one in saved["left_out"]} == bad
    assert all(one["reason"] for one in saved["left_out"])
    page = " ".join((out / "sheet.html").read_text().split())
    assert "3 files could not be read" in page
    for name in bad:
        assert f"left out: {name}: " in found.out
        assert name in page
    assert torchemo(*words(picture_runs / "proto", folders, "--json", "--out", out)).code == 7
    strict = torchemo(*words(picture_runs / "proto", folders, "--strict", "--out", out))
    assert strict.code == 3
    assert "corrupt.jpg: " in strict.err


def test_a_support_image_that_cannot_be_read_is_left_out(torchemo, picture_runs, folders, tmp_path):
    (folders[0] / "white" / "bad.png").write_bytes(b"")
    found = torchemo(*words(picture_runs / "proto", folders, "--out", tmp_path / "answers"))
    saved = json.loads((tmp_path / "answers" / "predictions.json").read_text())
    assert found.code == 7
    assert saved["classes"] == {"black": 2, "white": 3}
    assert "bad.png: is empty" in found.out
    words_of = (
        "export",
        picture_runs / "proto",
        "--support",
        folders[0],
        "--out",
        tmp_path / "a.pt2",
    )
    assert torchemo(*words_of).code == 7
    assert torchemo(*words_of, "--strict").code == 3


@pytest.mark.parametrize("familiar", [None, True, False])
def test_that_unlike_images_skip_recall_is_said(capsys, familiar):
    _show(replace(answers(recalled=()), familiar=familiar))
    said = "recall was skipped: these images are unlike the tasks of training"
    assert (said in capsys.readouterr().out) == (familiar is False)


@pytest.mark.parametrize("helpful", [None, True, False])
def test_that_slots_failed_validation_is_said(capsys, helpful):
    _show(replace(answers(recalled=()), familiar=True, helpful=helpful))
    said = "recall was skipped: the slots for such tasks failed validation"
    assert (said in " ".join(capsys.readouterr().out.split())) == (helpful is False)


def test_predictions_for_machines_are_those_in_the_file(torchemo, picture_runs, folders, tmp_path):
    run = shutil.copytree(picture_runs / "proto", tmp_path / "run")
    found = torchemo(*words(run, folders, "--json"))
    assert found.code == 0
    assert found.json == json.loads((run / "adapted" / "predictions.json").read_text())
    assert [p["predicted"] for p in found.json["predictions"]] == ["black", "white"]


def test_neither_the_data_nor_the_run_are_touched(torchemo, picture_runs, folders, tmp_path):
    run = shutil.copytree(picture_runs / "memory", tmp_path / "run")
    config = run / "config.toml"
    config.write_text(config.read_text().replace("/colours", "/gone"))
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert torchemo(*words(run, folders, "--out", tmp_path / "answers")).code == 0
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda support, query: shutil.rmtree(support), 3, "there is no such folder"),
        (lambda support, query: shutil.rmtree(query), 3, "there is no such folder"),
        (lambda support, query: (support / "third").mkdir(), 3, "'third' has no images"),
        (lambda support, query: spoil(query), 3, "black.png: is no readable"),
        (lambda support, query: spoil(support / "white"), 3, "None of 3 images can be read"),
        (lambda support, query: shutil.rmtree(support / "black"), 2, "two classes or more"),
    ],
)
def test_folders_that_cannot_be_used_are_refused(
    torchemo, picture_runs, folders, tmp_path, change, code, said
):
    change(*folders)
    found = torchemo(*words(picture_runs / "memory", folders, "--out", tmp_path / "answers"))
    assert found.code == code
    assert said in found.err
    assert not (tmp_path / "answers").exists()


def test_runs_that_cannot_be_used_are_refused(
    torchemo, point_runs, picture_runs, folders, tmp_path
):
    assert torchemo(*words(point_runs / "base", folders)).code == 2
    assert torchemo(*words(tmp_path / "nowhere", folders)).code == 2
    assert torchemo(*words(picture_runs / "proto", folders, "--step", 99)).code == 4
    run = shutil.copytree(picture_runs / "proto", tmp_path / "run")
    for path in checkpoint.published(run):
        (path / "manifest.json").write_text("{}")
    found = torchemo(*words(run, folders))
    assert found.code == 4
    assert "no checkpoint that can be read" in found.err


def test_a_place_that_cannot_be_written_is_told_in_words(torchemo, picture_runs, folders, tmp_path):
    (tmp_path / "file").write_text("in the way")
    out = tmp_path / "file" / "answers"
    found = torchemo(*words(picture_runs / "proto", folders, "--out", out))
    assert found.code == 6
    assert str(tmp_path / "file") in found.err


# -- doctor --------------------------------------------------------------------------------------


def test_the_doctor_is_content_with_this_machine(torchemo):
    found = torchemo("doctor", "--json")
    assert found.code == 0
    assert found.json["ok"] is True
    assert found.json["environment"]["torch"]["version"]


def test_the_doctor_leaves_with_1_when_gradients_are_wrong(torchemo, monkeypatch):
    wrong = doctor.GradientErrors((0.0, "conv1.weight"), (0.02, "conv1.weight"))
    monkeypatch.setattr(doctor, "gradient_errors", lambda: wrong)
    found = torchemo("doctor")
    assert found.code == 1
    assert "something is wrong" in found.out
    assert torchemo("doctor", "--json").json["ok"] is False
