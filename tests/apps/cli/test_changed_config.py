"""A config.toml that was changed after its checkpoints were saved is noticed by every command."""

import shutil
from pathlib import Path

import pytest

from torchemo.runs.storage import checkpoint

GOLDEN = Path(__file__).parent / "golden" / "earlier-run"
CHANGE = "learner.inner_lr is 0.02, was 0.003"


@pytest.fixture
def edited(point_runs, tmp_path):
    """A run whose inner rate was changed in its config.toml."""
    root = shutil.copytree(point_runs / "memory", tmp_path / "run")
    edit(root, "inner_lr = 0.003", "inner_lr = 0.02")
    return root


def edit(root, old, new):
    path = root / "config.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    "words",
    [("eval", "--tasks", 4, "RUN"), ("memory", "show", "RUN"), ("train", "--resume", "RUN")],
)
def test_a_changed_option_is_refused_and_named(torchemo, edited, words):
    before = sorted(path.name for path in edited.rglob("*"))
    found = torchemo(*(edited if word == "RUN" else word for word in words))
    assert found.code == 4
    assert CHANGE in found.err
    assert f"torchemo checkpoint accept-config {edited}" in found.err
    assert sorted(path.name for path in edited.rglob("*")) == before


def test_adapting_refuses_a_changed_option(torchemo, picture_runs, colours, tmp_path):
    root = shutil.copytree(picture_runs / "memory", tmp_path / "run")
    edit(root, "inner_lr = 0.001", "inner_lr = 0.02")
    support = colours / "test"
    found = torchemo("adapt", root, "--support", support, "--query", support / "black")
    assert (found.code, "learner.inner_lr is 0.02" in found.err) == (4, True)


@pytest.mark.parametrize("command", ["checkpoint", "memory"])
def test_verifying_says_which_option_was_changed(torchemo, edited, command):
    found = torchemo(command, "verify", edited)
    assert found.code == 4
    assert found.out.count(CHANGE) == len(checkpoint.published(edited))


def test_the_report_says_which_option_was_changed(torchemo, edited):
    assert torchemo("report", edited).code == 0
    assert CHANGE in (edited / "report.html").read_text()


def test_a_deliberate_change_is_accepted_by_a_command_and_then_used(torchemo, edited):
    said = torchemo("checkpoint", "accept-config", edited)
    assert (said.code, said.out) == (0, f"accepted: {CHANGE}\n")
    assert torchemo("checkpoint", "verify", edited).code == 0
    assert torchemo("eval", edited, "--tasks", 4).code == 0
    edit(edited, "inner_lr = 0.02", "inner_lr = 0.03")  # that one was not accepted
    assert torchemo("eval", edited, "--tasks", 4).code == 4
    edit(edited, "inner_lr = 0.03", "inner_lr = 0.003")  # as it was saved
    assert torchemo("eval", edited, "--tasks", 4).code == 0


def test_a_damaged_acceptance_accepts_nothing(torchemo, edited):
    torchemo("checkpoint", "accept-config", edited)
    path = edited / "accepted.toml"
    path.write_text(path.read_text().replace("inner_lr = 0.02", "inner_lr = 0.12"))
    assert torchemo("eval", edited, "--tasks", 4).code == 4
    path.write_bytes(b"\xff")
    assert torchemo("eval", edited, "--tasks", 4).code == 4


def test_a_run_is_made_longer_by_an_accepted_change(torchemo, edited):
    edit(edited, "inner_lr = 0.02", "inner_lr = 0.003")
    edit(edited, "steps = 6", "steps = 8")
    assert torchemo("train", "--resume", edited).code == 4
    assert torchemo("checkpoint", "accept-config", edited).code == 0
    assert torchemo("train", "--resume", edited).code == 0
    assert checkpoint.step_of(checkpoint.published(edited)[-1]) == 8
    assert torchemo("checkpoint", "verify", edited).code == 0


def test_what_does_not_change_the_meaning_is_no_change(torchemo, edited):
    edit(edited, "inner_lr = 0.02", "inner_lr = 3e-3  # the same")
    assert torchemo("checkpoint", "verify", edited).code == 0
    found = torchemo("checkpoint", "accept-config", edited)
    assert (found.code, "nothing to accept" in found.out) == (0, True)
    assert not (edited / "accepted.toml").exists()


@pytest.mark.filterwarnings("ignore:.*earlier version")
def test_checkpoints_of_an_earlier_version_know_only_a_digest(torchemo, tmp_path):
    """They hold no copy of the configuration: a change is refused, but cannot be named."""
    root = shutil.copytree(GOLDEN, tmp_path / "run")
    assert torchemo("checkpoint", "verify", root).code == 0
    edit(root, "inner_lr = 0.003", "inner_lr = 0.02")
    found = torchemo("checkpoint", "verify", root)
    assert (found.code, "digest" in found.out) == (4, True)
    assert torchemo("checkpoint", "accept-config", root).code == 0
    assert torchemo("checkpoint", "verify", root).code == 0


def test_data_may_be_moved(torchemo, picture_runs, colours, tmp_path):
    """Their fingerprint says that they are the same; other data are refused as before."""
    root = shutil.copytree(picture_runs / "proto", tmp_path / "run")
    edit(root, str(colours), str(shutil.copytree(colours, tmp_path / "colours")))
    assert torchemo("eval", root, "--tasks", 2).code == 0
    shutil.rmtree(tmp_path / "colours" / "train" / "red")
    found = torchemo("eval", root, "--tasks", 2)
    assert (found.code, "the data differ" in found.err) == (3, True)
