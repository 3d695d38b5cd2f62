"""The adversary at a small budget, and whether it would see what it looks for."""

import json
import random
import sys
from collections import Counter

import pytest

from tests.attack import harness, kinds_data, kinds_files, kinds_runs  # noqa: F401 -- they register themselves
from tests.attack.flips import flip, make_more
from tests.attack.harness import KINDS, Case, Failed, attack, check, command, verdict_of
from tests.attack.kills import BAD
from tests.attack.page import FLIPS, KILLS, PAGE, RECORD, whole
from tests.attack.world import make_world

UNHURRIED = {"real_kills"}
"""Kinds that start a program, which takes seconds."""


@pytest.mark.slow
def test_an_attack_of_a_few_seconds_finds_nothing():
    """Take fixed cases, so that a red run can be repeated; ``make attack`` goes on to others."""
    names = sorted(set(KINDS) - UNHURRIED)
    found = attack(names, seconds=300, seed=25, most=2)
    assert found["failures"] == []
    assert found["cases"] > len(names)  # a slow machine does not reach all of them


@pytest.fixture
def pretend(monkeypatch):
    """Return ``pretend(action)``: the verdict on a case that does this."""

    def judge(action):
        monkeypatch.setitem(KINDS, "pretend", action)
        return verdict_of("pretend", 1, None).verdict

    return judge


def shout(text):
    def run(case: Case) -> str:
        sys.argv = ["torchemo"]
        command("presets", text)
        return "ok"

    return run


def broken(case: Case) -> str:
    raise KeyError("internal")


def disappointed(case: Case) -> str:
    check(False, "the answer changed")
    return "ok"


def test_the_adversary_sees_an_internal_error_and_a_broken_promise(pretend):
    assert pretend(broken).startswith("FAILED KeyError: 'internal' (test_attack.py")
    assert pretend(disappointed) == "FAILED the answer changed"
    assert pretend(lambda case: "ok") == "ok"


def test_the_adversary_sees_an_exit_code_that_means_nothing_and_an_escape(pretend, monkeypatch):
    def leave(words):
        print(words[0])
        sys.exit(1 if words[0] == "bad" else 0)

    monkeypatch.setattr("torchemo.apps.cli.main", leave)
    assert pretend(lambda case: command("bad") and "ok").startswith("FAILED ('bad',) left with 1")
    assert "on the terminal" in pretend(lambda case: command("\x1b[2J") and "ok")
    assert "a traceback" in pretend(lambda case: command("Traceback (most") and "ok")
    assert pretend(lambda case: command("fine") and "ok") == "ok"


def test_the_adversary_sees_memory_that_is_taken(pretend, monkeypatch):
    monkeypatch.setattr(harness, "MEMORY", -1)
    assert pretend(lambda case: "ok") == "FAILED took 0 MB"


def test_a_seed_repeats_a_case():
    seen = []
    for _ in range(2):
        rng = random.Random("pickles/7")
        seen.append(kinds_data.mutated(rng, bytes(100)) + repr(kinds_data.structure(rng)).encode())
    assert seen[0] == seen[1]
    with pytest.raises(Failed):
        check(False, "no")


def test_the_figures_of_the_page_are_those_that_were_recorded():
    found = json.loads(RECORD.read_text())
    assert whole() == PAGE.read_text()
    assert set(found["kinds"]) == set(KINDS)
    assert found["failures"] == []
    counted = Counter({name: about["cases"] for name, about in found["kinds"].items()})
    assert counted.total() == found["cases"]
    assert not [n for n, e in json.loads(FLIPS.read_text())["files"].items() if "silent" in e]
    killed = json.loads(KILLS.read_text())
    assert not [name for name in BAD if killed[name]]


@pytest.mark.faults
def test_flipped_bits_of_a_run_are_noticed(tmp_path):
    found = flip(make_more(make_world(tmp_path)), 200, seed=25)["files"]
    assert not [name for name, ends in found.items() if "silent" in ends], found
    assert sum(ends.get("noticed", 0) for ends in found.values()) > 170
    assert len(found) == 15
