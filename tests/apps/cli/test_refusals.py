"""Every command refuses in words with its code, leaves what was there, and can speak JSON."""

import dataclasses
import json
import shutil
import tomllib
import types
import typing

import pytest

from tests.apps.cli.conftest import POINTS
from torchemo.apps.cli import COMMANDS, _command
from torchemo.core.errors import ResourceError
from torchemo.lab.bench import record
from torchemo.lab.commands.demo import MARK
from torchemo.runs.folder import lock


def leaves(command):
    """Return the commands that run, below those that only choose."""
    action = typing.get_type_hints(command).get("action")
    if isinstance(action, types.UnionType) or typing.get_origin(action) is typing.Union:
        return [leaf for part in typing.get_args(action) for leaf in leaves(part)]
    return [command]


def test_every_command_can_speak_json():
    found = [leaf for name in COMMANDS for leaf in leaves(_command(name))]
    assert len(found) >= len(COMMANDS) + 4  # data, memory and checkpoint have several
    for leaf in found:
        assert "json" in {field.name for field in dataclasses.fields(leaf)}, leaf


# -- train, eval, compare ------------------------------------------------------------------------


def test_a_run_that_somebody_else_writes_is_left_alone(torchemo, point_runs, tmp_path):
    root = shutil.copytree(point_runs / "base", tmp_path / "run")
    with lock(root):
        found = torchemo("train", "--resume", root)
    assert found.code == 6
    assert "is being written by process" in found.err
    assert found.out == ""


def test_a_place_where_no_run_can_be_written_is_named(torchemo, tmp_path):
    (tmp_path / "file").write_text("in the way")
    found = torchemo("train", "--out", tmp_path / "file" / "run", "--preset", "maml", *POINTS)
    assert found.code == 6
    assert str(tmp_path / "file") in found.err


def test_data_that_have_changed_or_gone_are_noticed(torchemo, picture_runs, tmp_path):
    root = shutil.copytree(picture_runs / "proto", tmp_path / "run")
    config = root / "config.toml"
    (source,) = tomllib.loads(config.read_text())["data"]["source"]
    other = shutil.copytree(source, tmp_path / "colours")
    (other / "train" / "red" / "00.png").write_bytes(
        (other / "train" / "red" / "01.png").read_bytes()
    )
    config.write_text(config.read_text().replace(source, str(other)))
    found = torchemo("train", "--resume", root)
    assert found.code == 3
    assert "the data differ" in found.err
    assert "--accept-new-data" in found.err
    shutil.rmtree(other)
    for command in ("eval", "train"):
        words = ("eval", root) if command == "eval" else ("train", "--resume", root)
        found = torchemo(*words)
        assert found.code == 3
        assert "there is no such file or folder" in found.err


@pytest.mark.parametrize("content", ["{", "[]", '{"run": "x"}', "\udcff"], ids=range(4))
def test_a_file_that_is_no_result_is_not_compared(torchemo, point_runs, tmp_path, content):
    file = tmp_path / "result.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    found = torchemo("compare", point_runs / "base", file, "--json")
    assert found.code == 3
    assert f"{file} is not a result file" in found.err
    assert found.out == ""


# -- report --------------------------------------------------------------------------------------


def test_reports_are_written_and_named(torchemo, point_runs, tmp_path):
    root = shutil.copytree(point_runs / "base", tmp_path / "run")
    found = torchemo("report", root, "--json")
    assert found.code == 0
    assert found.json == {"reports": [str(root / "report.html")]}
    assert (root / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "report needs a run folder"),
        (("nowhere",), 2, "nowhere is not a run"),
        (("{base}", "--comparison"), 2, "two runs or more"),
        (("{base}", "--against", "{memory}"), 2, "--against belongs to --comparison"),
        (("{base}", "nowhere", "--comparison"), 3, "nowhere is not a run"),
        (("{base}", "{memory}", "--comparison", "--split", "val"), 3, "on split 'val'"),
        (
            ("{base}", "{memory}", "--comparison", "--out", "{base}/config.toml/c.html"),
            6,
            "config.toml",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_reported_says_why(
    torchemo, point_runs, tmp_path, monkeypatch, words, code, said
):
    monkeypatch.chdir(tmp_path)
    runs = {name: point_runs / name for name in ("base", "memory")}
    found = torchemo("report", *(word.format(**runs) for word in words))
    assert found.code == code
    assert said in found.err
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_would_not_go_where_it_was_asked_to_is_refused(
    torchemo, point_runs, tmp_path
):
    found = torchemo("report", point_runs / "base", "--out", tmp_path / "x.html")
    assert found.code == 2
    assert "--out belongs to --comparison" in found.err


# -- demo, data, doctor, bench -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--steps", "steps should be 1"),
        ("--test-tasks", "tasks should be 2"),
        ("--visits", "visits should be 2"),
    ],
)
def test_a_demo_that_cannot_be_made_leaves_the_one_before(torchemo, tmp_path, option, said):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / MARK).touch()
    (tmp_path / "demo" / "summary.json").write_text("{}")
    found = torchemo("demo", "--out", tmp_path / "demo", option, 0)
    assert found.code == 2
    assert f"{said} or more, got 0" in found.err
    assert (tmp_path / "demo" / "summary.json").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("pack", "nowhere", "out"), 3, "nowhere: there is no such file or folder"),
        (("pack", "{colours}", "no/such/out"), 3, "no/such: is no folder"),
        (("pack", "{colours}", "out", "--scheme", "mine"), 3, "has no splits called 'mine'"),
        (("pack", "{colours}", "out", "--image-size", "0"), 2, "at least one pixel, got 0x0"),
        (("check", "nowhere"), 3, "nowhere: there is no such file or folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_data_that_cannot_be_used_are_refused(
    torchemo, colours, tmp_path, monkeypatch, words, code, said
):
    monkeypatch.chdir(tmp_path)
    found = torchemo("data", *(word.format(colours=colours) for word in words))
    assert found.code == code
    assert said in found.err
    assert list(tmp_path.iterdir()) == []


def test_benchmarks_are_recorded_printed_and_refused(torchemo, tmp_path, monkeypatch):
    def measured(name, request, *, keep):
        return {"rows": []}

    monkeypatch.setattr(record, "in_fresh_process", measured)
    monkeypatch.setitem(
        record.PLANS, "data", lambda *, quick: {"one": record.Case("data", {"a": 1})}
    )
    out = tmp_path / "data.json"
    found = torchemo("bench", "data", "--quick", "--json", "--out", out)
    assert found.code == 0
    assert found.json["cases"]["one"]["measurement"] == "data"
    assert json.loads(out.read_text())["quick"] is True
    assert torchemo("bench", "colour").code == 2

    def failed(name, request, *, keep):
        raise ResourceError("measurement 'data' failed: no compiler")

    monkeypatch.setattr(record, "in_fresh_process", failed)
    found = torchemo("bench", "data", "--json")
    assert (found.code, found.out) == (6, "")
    assert "no compiler" in found.err
