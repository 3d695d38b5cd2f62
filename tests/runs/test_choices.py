"""Choices of a person become a configuration, whatever their order."""

from itertools import permutations

import pytest

from torchemo.core.errors import ConfigError
from torchemo.runs.choices import Choices
from torchemo.runs.experiment import complete

CHOSEN = ("memory.k=3", "memory.name=gradients", "memory.key.dim=16", "memory.key.name=mean")


@pytest.mark.parametrize("options", list(permutations(CHOSEN)), ids=" ".join)
def test_the_order_of_options_does_not_matter(options):
    memory = complete(Choices("maml", options=options).resolved()).memory
    assert (memory.name, memory.options["k"]) == ("gradients", 3)
    assert (memory.options["key"].name, memory.options["key"].options["dim"]) == ("mean", 16)


def test_an_option_of_the_part_that_is_left_is_refused():
    chosen = Choices("maml-offsets", options=("memory.slot_lr=0.1", "memory.name=gradients"))
    with pytest.raises(ConfigError, match="slot_lr"):
        complete(chosen.resolved())


def test_later_options_win_over_earlier_ones_and_over_short_ones():
    options = ("train.steps=5", "train.steps=7")
    assert Choices("maml", short={"steps": 3}, options=options).resolved().train.steps == 7


@pytest.mark.parametrize("rate", ["-1", "0", "nan", "inf"])
def test_a_rate_that_is_not_above_zero_is_refused(rate):
    with pytest.raises(ConfigError, match=r"learner\.inner_lr'? should be (above 0|finite)"):
        complete(Choices("maml", options=(f"learner.inner_lr={rate}",)).resolved())


@pytest.mark.parametrize("name", ["way", "size"])
@pytest.mark.parametrize("preset", [None, "maml"])
def test_options_of_images_are_refused_for_regression(preset, name):
    with pytest.raises(ConfigError, match=f"{name} is for image tasks, and regression:hsml4"):
        Choices(preset, data=("regression:hsml4",), short={name: 3}).resolved()
    assert Choices(preset, data=("regression:hsml4",), short={"shot": 3}).resolved()
