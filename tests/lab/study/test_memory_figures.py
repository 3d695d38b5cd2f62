"""Figures of what memory changes: which learners are paired, and when they are worth a figure."""

import pytest

from torchemo.lab.study.pages.drawings import Pair, with_and_without
from torchemo.lab.study.pages.memory_figures import memory_figures


def cell(preset, world="mixed", *, role="base", scores=(1.0, 2.0), suffix="", of=None):
    title = preset.upper()
    tests = {world: {"metric": "mse", "seed_means": list(scores)}}
    return {
        **{"name": preset + suffix, "preset": preset, "title": title, "role": role},
        **{"world": world, "tests": tests, "of": of},
    }


def test_learners_are_paired_by_name_and_world_and_the_worst_comes_first():
    bases = [cell("maml"), cell("anil", scores=(5.0, 7.0)), cell("bmg"), cell("hsml")]
    given = [
        cell(f"{n}-offsets", role="memory", scores=(0.5, 0.7)) for n in ("maml", "anil", "bmg")
    ]
    others = [cell("maml", "surfaces", suffix=" on surfaces"), cell("maml", suffix=" longer")]
    (drawn,) = memory_figures({"cells": [*bases, *given, *others]}).items()
    world, (caption, figure) = drawn
    assert world == "mixed"
    assert "small dots are seeds" in caption
    text = str(figure)
    assert text.index(">ANIL<") < text.index(">MAML<")
    assert "HSML" not in text  # it has no memory
    assert "of 3 learners" in text


def test_what_is_trained_once_more_is_left_to_the_tables():
    names = ("maml", "anil", "bmg")
    usual = [cell(n, of=None if n == "maml" else "maml") for n in names]
    usual += [cell(f"{n}-offsets", role="memory", of=n) for n in names]
    again = [
        cell(f"{n}{kind}", role="memory" if kind else "base", suffix=" longer", of=f"{n}{kind}")
        for n in names
        for kind in ("", "-offsets")
    ]
    (_, figure) = memory_figures({"cells": [*usual, *again]})["mixed"]
    assert "of 3 learners" in str(figure)


def test_learners_of_one_step_stand_beside_themselves_with_all_their_steps():
    names = ("maml", "anil", "meta-sgd")
    whole = [cell(n, scores=(3.0, 3.5)) for n in names]
    one = [cell(n, scores=(4.0, 4.5), suffix=" in one step") for n in names]
    given = [
        cell(f"{n}-offsets", role="memory", scores=(2.0,), suffix=" in one step") for n in names
    ]
    for found in (*one, *given):
        found["title"] += ", one inner step"
    (_, figure) = memory_figures({"cells": [*whole, *one, *given]})["mixed"]
    text = str(figure)
    assert "without memory, all steps" in text
    assert ">MAML, one inner step<" in text
    (_, usual) = memory_figures({"cells": [*whole, *(cell(f"{n}-offsets") for n in names)]})[
        "mixed"
    ]
    assert "all steps" not in str(usual)


def test_few_learners_are_left_to_the_table():
    assert memory_figures({"cells": [cell("maml"), cell("maml-offsets", role="memory")]}) == {}


@pytest.mark.parametrize(("worst", "ticks"), [(2.0, {"0.00", "0.25"}), (50.0, {"1", "10"})])
def test_errors_start_at_zero_unless_they_differ_by_far(worst, ticks):
    pairs = [Pair("a", [worst], [1.0]), Pair("b", [2.0], [1.5])]
    text = str(with_and_without(pairs, name="n", x="error", higher_is_better=False))
    assert all(f">{tick}<" in text for tick in ticks)
