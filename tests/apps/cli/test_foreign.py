"""Commands of other distributions, and warnings as notes."""

import sys
import warnings

import pytest

import torchemo as package

MODULE = """
from dataclasses import dataclass

@dataclass
class Greet:
    '''Greet somebody.'''

    name: str = "you"

    def run(self):
        print(f"hello {self.name}")
        return 7
"""


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Return ``distribution(entry points)``: one called ``fake-kit`` with a module ``fake_kit``."""

    def install(points):
        info = tmp_path / "fake_kit-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-kit\nVersion: 1.0\n")
        lines = "\n".join(f"{name} = {place}" for name, place in points.items())
        (info / "entry_points.txt").write_text(f"[torchemo.commands]\n{lines}\n")
        (tmp_path / "fake_kit.py").write_text(MODULE)
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    sys.modules.pop("fake_kit", None)


def test_a_command_of_another_distribution_is_run(torchemo, distribution):
    distribution({"greet": "fake_kit:Greet"})
    assert torchemo("greet", "--name", "world") == (7, "hello world\n", "")
    assert "usage: torchemo greet" in torchemo("greet", "--help").out
    found = torchemo("gret")
    assert found.code == 2
    assert "Did you mean 'greet'?" in found.err
    assert "greet" in torchemo("zzz").err


def test_help_lists_it_without_importing_it(torchemo, distribution):
    distribution({"greet": "fake_kit:Greet", "broken": "no_such_module:Nothing"})
    found = torchemo("--help")
    assert found.code == 0
    shown = " ".join(found.out.replace("│", " ").split())
    assert "greet A command of fake-kit." in shown
    assert "broken A command of fake-kit." in shown
    assert "fake_kit" not in sys.modules


def test_a_command_of_ours_wins(torchemo, distribution):
    distribution({"train": "fake_kit:Greet"})
    found = torchemo("train", "--help")
    assert "Train a learner" in found.out
    assert torchemo("--help").out.count("fake-kit") == 0


@pytest.mark.parametrize("place", ["no_such_module:Nothing", "fake_kit:Nothing"])
def test_a_command_that_cannot_be_imported_names_its_distribution(torchemo, distribution, place):
    distribution({"broken": place})
    found = torchemo("broken")
    assert found.code == 2
    assert f"command 'broken' cannot be imported from {place}" in found.err
    assert "Repair or remove the distribution fake-kit." in found.err


# -- notes ---------------------------------------------------------------------------------------


def warn_from(file, category=UserWarning, text="two\n  lines"):
    warnings.warn_explicit(text, category, file, 1)


@pytest.mark.filterwarnings("always")
def test_warnings_of_torchemo_are_notes_of_one_line_each_said_once(torchemo, fake_command):
    def act():
        for _ in range(2):
            warn_from(package.__file__)
        return 0

    fake_command(act)
    assert torchemo("fake") == (0, "", "torchemo: note: two lines\n")
    assert torchemo("fake").err == "torchemo: note: two lines\n"  # and again the next time


@pytest.mark.parametrize(
    ("file", "category"),
    [(package.__file__, RuntimeWarning), ("/elsewhere/theirs.py", UserWarning)],
    ids=["kind", "place"],
)
def test_other_warnings_stay_as_they_are(torchemo, fake_command, file, category):
    fake_command(lambda: warn_from(file, category) or 0)
    with pytest.warns(category, match="two"):
        found = torchemo("fake")
    assert "note" not in found.err


def test_what_shows_warnings_is_put_back(torchemo, fake_command):
    before = warnings.showwarning
    fake_command(lambda: 0)
    torchemo("fake")
    assert warnings.showwarning is before
