"""What a run was computed with."""

import json
import os
import platform
import re
import socket

import numpy
import pytest
import torch

from torchemo.models.fused import Status
from torchemo.runs.environment import commit_of, differences, environment, since_the_start, versions
from torchemo.training.device import HERE

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def package(tmp_path):
    """A source tree with an empty repository."""
    folder = tmp_path / "src" / "torchemo"
    folder.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    return folder


def test_it_names_interpreter_torch_threads_and_packages():
    found = environment()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["python"].endswith(platform.python_version())
    assert found["torch"]["version"] == torch.__version__
    assert found["torch"]["threads"] == torch.get_num_threads()
    assert found["packages"]["numpy"] == numpy.__version__
    assert found["cpu"]["usable"] >= 1


def test_it_names_neither_the_machine_nor_its_folders():
    texts = re.findall(r'"([^"]*)"', json.dumps(environment() | {"cpu": None}))
    assert socket.gethostname() not in texts
    assert not [text for text in texts if "/" in text]


def test_it_names_the_build_of_the_convolutions(monkeypatch):
    from torchemo.runs import environment as module

    monkeypatch.setattr(module, "status", lambda: Status(True, "somewhere", "cc", "12ab"))
    assert environment()["convolutions"] == "12ab"
    monkeypatch.setattr(module, "status", lambda: Status(False, "no compiler"))
    assert environment()["convolutions"] == "torch"


def test_differences_are_those_that_may_change_bits():
    now = environment()
    assert differences(now, now) == []
    assert differences({**now, "python": "other", "packages": {}}, now) == []
    assert differences({}, now) == differences({"torch": 3, "cpu": None}, now) == []
    other = {**now, "convolutions": "torch", "torch": {**now["torch"], "version": "2.4.0"}}
    assert differences(other, now) == [
        f"torch.version 2.4.0 -> {torch.__version__}",
        f"convolutions torch -> {now['convolutions']}",
    ]


def test_versions_are_those_that_are_running():
    assert versions()["torch"] == torch.__version__
    assert versions()["numpy"] == numpy.__version__


def test_the_commit_is_read_from_a_branch_a_packed_branch_and_a_detached_head(package):
    git = package.parent.parent / ".git"
    assert commit_of(package) is None
    (git / "packed-refs").write_text(
        f"# pack-refs\n{'f' * 40} refs/heads/other\n{COMMIT} refs/heads/main\n"
    )
    assert commit_of(package) == COMMIT
    (git / "refs" / "heads" / "main").write_text("a" * 40 + "\n")
    assert commit_of(package) == "a" * 40
    (git / "HEAD").write_text("b" * 40 + "\n")
    assert commit_of(package) == "b" * 40


def test_the_commit_of_a_linked_work_tree_is_found(package, tmp_path_factory):
    tree = tmp_path_factory.mktemp("tree")
    copy = tree / "src" / "torchemo"
    copy.mkdir(parents=True)
    (tree / "pyproject.toml").touch()
    git = package.parent.parent / ".git"
    own = git / "worktrees" / "tree"
    own.mkdir(parents=True)
    (own / "HEAD").write_text("ref: refs/heads/side\n")
    (own / "commondir").write_text("../..\n")
    (git / "refs" / "heads" / "side").write_text(COMMIT)
    (tree / ".git").write_text(f"gitdir: {own}\n")
    assert commit_of(copy) == COMMIT


def test_an_installed_package_has_no_commit_of_somebody_elses_repository(package):
    root = package.parent.parent
    (root / ".git" / "refs" / "heads" / "main").write_text(COMMIT)
    for place in (".venv/lib/site-packages", "vendor"):
        (root / place / "torchemo").mkdir(parents=True)
        assert commit_of(root / place / "torchemo") is None
    assert commit_of(package) == COMMIT


@pytest.mark.parametrize("head", ["ref: ../../secret", "ref: refs/../../secret", "nonsense", ""])
def test_a_strange_head_gives_no_commit(package, head):
    root = package.parent.parent
    (root / "secret").write_text(COMMIT)
    (root / ".git" / "HEAD").write_text(head)
    assert commit_of(package) is None


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_the_environment_is_told_at_once(tmp_path):
    os.mkfifo(tmp_path / "environment.json")
    said = since_the_start(tmp_path / "environment.json", HERE)
    assert "cannot be read (not a regular file)" in said
