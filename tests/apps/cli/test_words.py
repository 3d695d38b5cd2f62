"""What is typed: help is quick, mistakes are answered with a suggestion, errors have their codes."""

import os
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.apps.cli.conftest import COMMAND, POINTS
from torchemo.apps.cli import COMMANDS, main
from torchemo.config.presets import names, parts_of
from torchemo.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Diverged,
    MemoryWriteError,
    ResourceError,
    ShapeError,
)

NESTED = {
    "data": ("list", "check", "pack"),
    "memory": ("show", "verify"),
    "checkpoint": ("list", "verify"),
}
ALL = [
    *((name,) for name in COMMANDS),
    *((name, action) for name, actions in NESTED.items() for action in actions),
]


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_every_command_explains_itself(torchemo, words):
    found = torchemo(*words, "--help")
    assert found.code == 0
    assert f"usage: torchemo {' '.join(words)}" in found.out


def test_help_lists_every_command_and_is_what_no_command_gets(torchemo):
    found = torchemo("--help")
    assert found.code == 0
    assert all(name in found.out for name in COMMANDS)
    assert torchemo() == found


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_the_version_is_told(torchemo, word):
    found = torchemo(word)
    declared = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "version"
    ]
    assert (found.code, found.out) == (0, f"torchemo {declared}\n")


def test_the_package_is_the_command_too():
    found = subprocess.run(
        [sys.executable, "-m", "torchemo", "trian"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert "Did you mean 'train'?" in found.stderr


def test_no_help_waits_for_torch():
    code = f"""
import sys
from torchemo.apps.cli import main
for words in {[list(words) for words in ALL]!r} + [[]]:
    try:
        main([*words, "--help"])
    except SystemExit as left:
        assert left.code == 0, words
heavy = {{"torch", "numpy", "scipy", "PIL", "matplotlib", "jinja2"}} & set(sys.modules)
sys.exit(str(heavy) if heavy else 0)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert found.returncode == 0, found.stderr


def test_help_takes_a_fraction_of_a_second_of_computing():
    def seconds():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*COMMAND, "train", "--help"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # 0.25 s where this was written; importing torch alone takes well over a second there.
    assert min(seconds() for _ in range(3)) < 0.6


def test_every_command_is_told_of():
    root = Path(__file__).parents[3]
    changes = (root / "CHANGELOG.md").read_text()
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    guide = "\n".join(page.read_text() for page in pages)
    for name in COMMANDS:
        assert re.search(rf"`{name}\b", changes), name
        assert re.search(rf"(`|torchemo ){name}\b", guide), name


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (("train", "--presett", "maml"), "--preset"),
        (("eval", "run", "--protocoll", "paper"), "--protocol"),
        (("compare", "a", "b", "--agianst", "c"), "--against"),
        (("demo", "--stesp", "3"), "--steps"),
        (("data", "check", "set", "--n-wya", "3"), "--n-way"),
        (("data", "pack", "set", "out", "--stricct"), "--strict"),
        (("memory", "show", "run", "--row", "3"), "--rows"),
        (("adapt", "run", "--suport", "x", "--query", "y"), "--support"),
        (("doctor", "--jsn"), "--json"),
        (("presets", "--shoot", "5"), "--shot"),
        (("options", "--jsn"), "--json"),
        (("train", "--sede", "3"), "--seed"),
        (("trian",), "Did you mean 'train'?"),
        (("chekpoint", "list", "run"), "Did you mean 'checkpoint'?"),
        (("data", "chek", "set"), "check"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_misspelt_word_is_usage_and_the_right_one_is_suggested(torchemo, words, suggestion):
    found = torchemo(*words)
    assert found.code == 2
    assert suggestion in found.err
    assert found.out == ""


def test_a_word_like_no_command_is_answered_with_all_of_them(torchemo):
    found = torchemo("zzz")
    assert found.code == 2
    assert ", ".join(COMMANDS) in found.err


def test_help_of_train_names_every_preset_and_where_they_come_from(torchemo):
    shown = " ".join(torchemo("train", "--help").out.replace("│", " ").split())
    assert "torchemo presets" in shown
    for name in names():
        base, _ = parts_of(name)
        assert base in shown
        assert name.removeprefix(base) in shown


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no", hint="do"), 2),
        (DataError("no", hint="do"), 3),
        (ShapeError("no", hint="do"), 3),
        (MemoryWriteError("no", hint="do"), 3),
        (CheckpointError("no", hint="do"), 4),
        (Diverged("no", hint="do"), 5),
        (ResourceError("no", hint="do"), 6),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_are_told_in_words_with_their_exit_code(torchemo, fake_command, error, code):
    def fail():
        raise error

    fake_command(fail)
    assert torchemo("fake") == (code, "", "torchemo: no\ndo\n")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (MemoryError(), 6, "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), 6, "not enough"),
        (PermissionError(13, "Permission denied", "runs/x"), 6, "runs/x: Permission denied"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_machine_refuses_is_told_too(torchemo, fake_command, error, code, said):
    def fail():
        raise error

    fake_command(fail)
    found = torchemo("fake")
    assert found.code == code
    assert said in found.err


def test_what_nobody_foresaw_stays_an_error_with_its_trace(fake_command):
    fake_command(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["fake"])


def test_debugging_shows_the_trace_of_every_error(fake_command, monkeypatch):
    def fail():
        raise DataError("no")

    fake_command(fail)
    monkeypatch.setenv("TORCHEMO_DEBUG", "1")
    with pytest.raises(DataError):
        main(["fake"])


def test_a_reader_that_leaves_early_is_no_error():
    code = """
import sys
from dataclasses import dataclass
from torchemo.apps import cli
from torchemo.lab.commands import doctor
@dataclass
class Long:
    def run(self):
        sys.stdin.read()
        print("somebody?")
        return 0
doctor.Long = Long
cli.COMMANDS["long"] = "torchemo.lab.commands.doctor:Long"
cli.main(["long"])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # With a buffer, as people have it: the pipe is found broken when it is flushed.
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    process.stdout.close()
    _, said = process.communicate()
    assert process.returncode == 0
    assert said == b""


@pytest.mark.faults
@pytest.mark.parametrize("reader", ["stdout", "stderr"])
def test_training_goes_on_when_nobody_reads_any_more(reader, tmp_path):
    words = ("train", "--preset", "maml", *POINTS, "--out", str(tmp_path / "run"))
    process = subprocess.Popen(
        [*COMMAND, *words, *(("--json",) if reader == "stdout" else ())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    getattr(process, reader).close()
    process.communicate()
    assert process.returncode == 0
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").is_dir()


@pytest.mark.faults
def test_a_table_that_nobody_reads_is_no_error():
    process = subprocess.Popen(
        [*COMMAND, "data", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    _, said = process.communicate()
    assert process.returncode == 0
    assert said == b""
