"""What stands beside the checkpoints of a run: damage is named, and no reason to lose the run."""

import json
import os
import shutil

import pytest

from tests.apps.cli.conftest import flip_a_bit
from torchemo.runs import events
from torchemo.runs.storage import checkpoint


@pytest.fixture
def stopped(point_runs, tmp_path):
    """A run with two further steps to do."""
    root = shutil.copytree(point_runs / "memory", tmp_path / "run")
    shutil.rmtree(checkpoint.published(root)[-1])
    return root


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"step": 2, ', b'"step": 9, '),
        (b'"step": 1, ', b'"step": -1, '),
        (b'"event": "validation"', b'"event": "valudation"'),
        (b'"event"', b"event"),
        (b'"loss": ', b'"loss": 1'),
    ],
)
def test_a_changed_line_of_the_log_is_named_and_the_run_continues(torchemo, stopped, old, new):
    log = stopped / "events.jsonl"
    whole, data = events.read(log), log.read_bytes()
    assert old in data
    log.write_bytes(data.replace(old, new, 1))
    found = torchemo("train", "--resume", stopped)
    assert found.code == 0, found.err
    (kept,) = stopped.glob("damaged-*-events.jsonl")
    said = " ".join(found.err.split())
    assert "of the log is damaged and was left out" in said
    assert str(kept) in found.err
    assert kept.read_bytes() == data.replace(old, new, 1)
    now = events.read(log)
    lost = [event for event in whole if event["step"] <= 4 and event not in now]
    assert len(lost) == 1
    assert now[-1]["step"] == 6


@pytest.mark.parametrize("kept", [0, 2])
def test_a_log_that_ends_before_the_checkpoint_is_told(torchemo, stopped, kept):
    log = stopped / "events.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:kept]))
    found = torchemo("train", "--resume", stopped)
    assert found.code == 0, found.err
    assert "the events between are lost" in " ".join(found.err.split())
    assert events.read(log)[-1]["step"] == 6


def test_a_log_that_lost_exactly_its_last_line_is_told(torchemo, stopped):
    log = stopped / "events.jsonl"
    saved = sum(event["step"] <= 4 for event in events.read(log))
    lines = log.read_bytes().splitlines(keepends=True)[: saved - 1]
    log.write_bytes(b"".join(lines))
    assert events.read(log)[-1]["step"] == 4  # the line before it is of the same step
    found = torchemo("train", "--resume", stopped)
    assert found.code == 0, found.err
    said = " ".join(found.err.split())
    assert f"the log has {saved - 1} of {saved} events up to step 4" in said


def test_a_whole_log_is_not_said_to_have_lost_events(torchemo, stopped):
    found = torchemo("train", "--resume", stopped)
    assert found.code == 0
    assert "lost" not in found.err


def test_a_damaged_best_checkpoint_is_named_and_the_best_is_sought_anew(torchemo, stopped):
    (newest,) = checkpoint.published(stopped)
    saved = checkpoint.load(newest)
    older = checkpoint.publish(stopped, 2, groups=saved.groups)
    info = {**saved.info, "progress": {**saved.info["progress"], "best_step": 2, "best_score": 0.0}}
    shutil.rmtree(newest)
    checkpoint.publish(stopped, saved.step, groups=saved.groups, info=info)
    flip_a_bit(older / "params.safetensors")
    found = torchemo("train", "--resume", stopped)
    assert found.code == 0
    assert "It was the best one" in " ".join(found.err.split())
    best = checkpoint.load(checkpoint.published(stopped)[-1]).info["progress"]
    assert best["best_step"] == 6
    assert torchemo("eval", stopped, "--tasks", 4).code == 0


def test_a_run_that_may_only_be_read_is_evaluated(torchemo, stopped, tmp_path, monkeypatch):
    real = os.open

    def read_only(path, flags, *more, **options):
        if flags & os.O_CREAT and str(path).startswith(str(stopped)):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", read_only)
    found = torchemo("eval", stopped, "--tasks", 4, "--split", "val")
    assert found.code == 6
    assert "mse" in found.out or "error" in found.out
    assert "the result was computed, but cannot write" in found.err
    assert "--out FILE.json" in found.err
    out = tmp_path / "result.json"
    assert torchemo("eval", stopped, "--tasks", 4, "--split", "val", "--out", out).code == 0
    assert json.loads(out.read_text())["protocol"]["split"] == "val"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"seed": 0', '"seed": 1'),
        ('"metric": "mse"', '"metric": "accuracy"'),
        ('"domain": [', '"domain": ["a", '),
        ('"per_task": [[', '"per_task": [[1'),
        ('"method": "', '"method": "Our '),
    ],
)
def test_a_result_that_was_changed_is_refused(torchemo, point_runs, tmp_path, old, new):
    root = shutil.copytree(point_runs / "base", tmp_path / "run")
    file = root / "eval-test-standard.json"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    found = torchemo("compare", root, point_runs / "memory")
    assert found.code == 3
    assert "changed after it was written" in found.err


@pytest.mark.parametrize("content", ["[]", "5", '{"a": 1e999}', "[" * 100_000, '{"per_task": 5}'])
def test_a_result_that_is_none_is_refused(torchemo, point_runs, tmp_path, content):
    file = tmp_path / "result.json"
    file.write_text(content)
    found = torchemo("compare", file, point_runs / "memory")
    assert (found.code, "Traceback" in found.err) == (3, False)


def test_a_changed_environment_is_told_on_resume(torchemo, stopped):
    file = stopped / "environment.json"
    file.write_text(file.read_text().replace('"byteorder": "little"', '"byteorder": "big"'))
    found = torchemo("train", "--resume", stopped)
    assert found.code == 0
    assert "environment.json was changed after it was written" in " ".join(found.err.split())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, None])
def test_an_environment_that_cannot_be_read_is_told_on_resume(torchemo, stopped, content):
    file = stopped / "environment.json"
    file.write_bytes(content) if content is not None else file.unlink()
    found = torchemo("train", "--resume", stopped)
    assert found.code == 0
    assert "environment.json cannot be read" in " ".join(found.err.split())


@pytest.mark.parametrize("name", ["sha999", "shaXX6", "x"])
def test_a_digest_whose_name_is_damaged_is_no_sign_of_an_earlier_version(
    torchemo, point_runs, tmp_path, name
):
    root = shutil.copytree(point_runs / "memory", tmp_path / "run")
    file = root / "eval-test-standard.json"
    file.write_text(file.read_text().replace('"sha256"', f'"{name}"').replace("1", "2"))
    assert torchemo("compare", root, point_runs / "base").code == 3
