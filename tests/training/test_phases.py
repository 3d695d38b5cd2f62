"""Phases: who is frozen when, and cosines against their closed form."""

import math

import pytest

from torchemo.core.errors import ConfigError
from torchemo.training.phases import Phases


@pytest.mark.parametrize(
    ("learner", "memory", "total", "turn"),
    [(None, None, None, None), (7, None, 7, None), (4, 3, 7, 4), (1, 1, 2, 1)],
)
def test_length_and_turn_follow_from_the_steps_of_both(learner, memory, total, turn):
    phases = Phases(learner, memory)
    assert (phases.total, phases.turn) == (total, turn)


def test_the_learner_is_frozen_from_the_turn_on_and_never_without_one():
    assert [Phases(4, 3).frozen(i) for i in range(9)] == [False] * 4 + [True] * 5
    assert not any(phases.frozen(i) for phases in (Phases(), Phases(4)) for i in range(9))


@pytest.mark.parametrize("phases", [Phases(), Phases(5), Phases(5, 3)])
def test_a_constant_rate_is_one_at_every_step(phases):
    assert {phases.rate_factor(i, "constant") for i in range(12)} == {1.0}


@pytest.mark.parametrize("steps", [1, 2, 5, 1000])
def test_one_phase_falls_along_half_a_cosine_and_stays_at_zero(steps):
    phases = Phases(steps)
    for i in range(steps):
        expected = 0.5 * (1 + math.cos(math.pi * i / steps))
        assert phases.rate_factor(i, "cosine") == pytest.approx(expected, rel=1e-14, abs=1e-15)
    for i in (steps, steps + 1, 10 * steps):
        assert phases.rate_factor(i, "cosine") == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(("learner", "memory"), [(4, 4), (5, 2), (1, 7)])
def test_each_of_two_phases_has_a_cosine_of_its_own(learner, memory):
    phases = Phases(learner, memory)
    found = [phases.rate_factor(i, "cosine") for i in range(learner + memory)]
    halves = [
        0.5 * (1 + math.cos(math.pi * i / steps))
        for steps in (learner, memory)
        for i in range(steps)
    ]
    assert found == pytest.approx(halves, rel=1e-14, abs=1e-15)
    # The first phase is that of a training without memory.
    assert found[:learner] == [Phases(learner).rate_factor(i, "cosine") for i in range(learner)]
    assert phases.rate_factor(learner + memory, "cosine") == pytest.approx(0, abs=1e-15)


def test_a_dense_stage_comes_first_with_a_schedule_of_its_own():
    phases = Phases(4, 3, dense=5)
    assert (phases.total, phases.turn) == (12, 9)
    found = [phases.rate_factor(i, "cosine") for i in range(12)]
    expected = [0.5 * (1 + math.cos(math.pi * i / n)) for n in (5, 4, 3) for i in range(n)]
    assert found == pytest.approx(expected, rel=1e-14, abs=1e-15)
    assert Phases(0, dense=2).total == 2


def test_rates_drop_at_milestones_of_each_phase():
    drops = ((0.5, 0.1), (0.75, 0.01))
    phases = Phases(8, dense=4)
    found = [phases.rate_factor(i, "steps", drops=drops) for i in range(12)]
    assert found == [1, 1, 0.1, 0.01, 1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]


def test_without_a_length_there_is_no_cosine_to_fall_along():
    assert Phases().rate_factor(3, "cosine") == 1.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"learner": 0}, "train.steps should be 1 or more, got 0"),
        ({"learner": 3, "memory": 0}, "memory.steps should be 1 or more, got 0"),
        ({"learner": 3, "dense": -1}, "train.dense.steps should be 0 or more, got -1"),
        ({"learner": 0, "memory": 2, "dense": 3}, "train.steps should be 1 or more, got 0"),
        ({"memory": 3}, "needs the learner's number of steps"),
    ],
)
def test_impossible_phases_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        Phases(**given)
