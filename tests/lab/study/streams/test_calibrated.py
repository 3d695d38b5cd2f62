"""What validation visits decide: recall where it helps, nothing where it does not."""

from dataclasses import replace

import pytest
import torch

from tests.lab.study.streams.test_game import (
    DIM,
    LOOP,
    USERS,
    VISITS,
    WAY,
    make_moment,
)
from torchemo.core.rng import generator_for
from torchemo.lab.study.streams.calibrated import Validation, settings_of, told_of
from torchemo.lab.study.streams.game import Game
from torchemo.lab.study.streams.play import Player
from torchemo.lab.study.streams.visits import Streams, Visits
from torchemo.learners.gradient.anil import ANIL
from torchemo.memory.lifelong.ratio import SameClass


def validation(*, telling: bool, monkeypatch: pytest.MonkeyPatch) -> Validation:
    learner = ANIL(LOOP)
    spread = 20.0 if telling else 1e-3
    same = SameClass(torch.zeros(DIM), torch.eye(DIM), torch.full((DIM,), spread), unit=False)
    player = Player(learner, learner.init(generator_for(1)), WAY, same)
    seen = [player.see(make_moment(number)) for number in range(VISITS)]
    monkeypatch.setattr(Validation, "_visits", lambda self, visits: seen)
    return Validation(player, None)  # type: ignore[arg-type]


def test_recall_that_helps_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Visits(Streams(), find="shares", calibrated=True)
    own = validation(telling=True, monkeypatch=monkeypatch)
    chosen = own.calibrated(asked)
    assert chosen.find == "shares"
    assert set(told_of(chosen)) == {"trust", "new"}
    settings = settings_of(replace(asked, calibrated=False))
    *scores, best, none = (
        float(one.mean()) for one in own._scored([*settings, chosen, Visits(Streams())])
    )
    assert best == max(scores) > none


def test_nothing_is_recalled_where_nothing_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    own = validation(telling=False, monkeypatch=monkeypatch)
    chosen = own.calibrated(Visits(Streams(), find="task ratio", calibrated=True))
    assert told_of(chosen) == {"recall": "nothing"}


def test_weights_of_answers_are_fitted_to_the_same_recall(monkeypatch: pytest.MonkeyPatch) -> None:
    own = validation(telling=True, monkeypatch=monkeypatch)
    visits = Visits(Streams(), find="names", answer="mixture", calibrated=True)
    weights = own.calibrated(visits).weights
    assert len(weights) == 5
    assert len(weights[0]) == 3  # the network, features and inputs
    assert own.calibrated(Visits(Streams(), find="names")).weights == ()


def test_a_kind_that_is_not_calibrated_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    visits = Visits(Streams(), find="task ratio", threshold=2.0)
    assert validation(telling=True, monkeypatch=monkeypatch).calibrated(visits) is visits


def test_tasks_are_taken_for_others_on_purpose() -> None:
    learner = ANIL(LOOP)
    player = Player(learner, learner.init(generator_for(1)), WAY)
    first, second = (
        make_moment(i)._replace(task=torch.full((USERS,), i), visit=torch.zeros(USERS).long())
        for i in range(2)
    )
    again = make_moment(2)._replace(task=first.task, classes=first.classes)
    for right in (1.0, 0.0):
        game = Game(player, [Visits(Streams(), find="task", right=right)], USERS, 3)
        for moment in (first, second):
            new = game.meet(player.see(moment))[0]
            assert (new.right + new.wrong).sum() == 0
        met = game.meet(player.see(again))[0]
        assert (met.right + met.wrong == WAY).all()
        # Another task may share some of its classes, but not all.
        assert bool((met.right == WAY).all()) == (right == 1.0)
