"""Laws of tasks that come back, for every learner with an inner loop."""

import pytest
import torch

from tests.laws.cases import LEARNER_CASES, N_WAY, TASKS, make_episode, make_learner, make_params
from torchemo.core.errors import ConfigError
from torchemo.core.types import Batch, Params
from torchemo.learners.learner import Learner
from torchemo.memory.lifelong.memory import LifelongMemory
from torchemo.memory.lifelong.recognise import ByName
from torchemo.training.lifelong import Revisit, revisit, takes_visits
from torchemo.training.predict import classifier

LOOPS = [
    case
    for case in LEARNER_CASES
    if takes_visits(make_learner(case), make_learner(case).init(torch.Generator()))
]
NAMES = ("ant", "bee", "cat")
POOLED = ("maml", "fomaml", "anil", "meta-sgd", "maml/shared_row", "anil/shared_row")
"""Learners whose first gradient is a mean over examples at a start that no example moves."""


def names(tasks: int, order: tuple[int, ...] = (0, 1, 2)) -> list[tuple[str, ...]]:
    return [tuple(f"{b}-{NAMES[c]}" for c in order) for b in range(tasks)]


def come_back(
    learner: Learner, params: Params, visits: list[Batch], order: list[int] | None = None
) -> Revisit:
    """Visit tasks in turn and return the last visit; earlier ones do not know of each other."""
    memory = LifelongMemory(ByName(), head=learner.model.head)
    past = []
    for support in visits[:-1]:
        alone = LifelongMemory(ByName(), head=learner.model.head)
        past.append(revisit(learner, params, support, alone, names=names(TASKS)))
    for i in order or range(len(past)):
        for visit in past[i].remember():
            memory.add(visit)
    return revisit(learner, params, visits[-1], memory, names=names(TASKS))


def joined(*batches: Batch) -> Batch:
    return Batch(torch.cat([b.x for b in batches], 1), torch.cat([b.y for b in batches], 1))


@pytest.mark.parametrize("case", LOOPS)
def test_a_task_that_is_new_is_the_base_learners_bit_for_bit(case: str) -> None:
    learner, episode = make_learner(case), make_episode(1)
    params = make_params(learner)
    memory = LifelongMemory(ByName(), head=learner.model.head)
    revisit(learner, params, make_episode(2).support, memory, names=names(TASKS)).remember()
    strangers = [("x", "y", "z")] * TASKS
    found = revisit(learner, params, episode.support, memory, names=strangers)
    for b in range(TASKS):
        one = Batch(episode.support.x[b : b + 1], episode.support.y[b : b + 1])
        base = classifier(learner, params, one)(episode.query.x[b])
        torch.testing.assert_close(found.outputs(episode.query.x)[b], base, rtol=1e-12, atol=1e-12)
    again = revisit(learner, params, episode.support, LifelongMemory(ByName()), names=strangers)
    assert torch.equal(again.outputs(episode.query.x), found.outputs(episode.query.x))


@pytest.mark.parametrize("case", ["musml", "protonet"])
def test_learners_that_past_visits_cannot_join_say_so(case: str) -> None:
    learner = make_learner(case)
    with pytest.raises(ConfigError, match=f"{learner.title} has no network of its own"):
        come_back(learner, make_params(learner), [make_episode(0).support])


@pytest.mark.parametrize("case", POOLED)
@pytest.mark.parametrize("past", [1, 3])
def test_the_first_step_is_that_of_all_examples_together(case: str, past: int) -> None:
    learner = make_learner(case)
    params = make_params(learner)
    visits = [make_episode(i).support for i in range(past + 1)]
    visits[0] = joined(visits[0], make_episode(9).support)  # twice as large as the others
    found = come_back(learner, params, visits)
    together = revisit(
        learner, params, joined(*visits), LifelongMemory(ByName()), names=names(TASKS)
    )
    for name, theta in together.fitted.path[1].items():
        torch.testing.assert_close(found.fitted.path[1][name], theta, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", LOOPS)
def test_the_order_of_past_visits_does_not_matter(case: str) -> None:
    learner = make_learner(case)
    params, query = make_params(learner), make_episode(0).query.x
    visits = [make_episode(i).support for i in range(4)]
    one = come_back(learner, params, visits, [0, 1, 2]).outputs(query)
    other = come_back(learner, params, visits, [2, 0, 1]).outputs(query)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "case",
    [
        *("maml", "anil", "meta-sgd", "proto-maml"),
        *("maml/shared_row", "anil/shared_row", "meta-sgd/shared_row"),
    ],
)
def test_another_order_of_labels_changes_nothing(case: str) -> None:
    learner = make_learner(case)
    params, query = make_params(learner), make_episode(0).query.x
    # Only heads with equal rows, and equal rates of rows, let labels be exchanged; shared_row makes them so.
    for name in params if "shared_row" not in case else ():
        if name.removeprefix("rate/") in learner.model.head:
            params[name] = params[name].mean(0, keepdim=True).expand_as(params[name]).clone()
    past, now, order = make_episode(1).support, make_episode(2).support, (2, 0, 1)
    place = torch.tensor(order).argsort()
    answers = []
    for shuffled in (False, True):
        memory = LifelongMemory(ByName(), head=learner.model.head)
        first = Batch(past.x, place[past.y]) if shuffled else past
        labels = names(TASKS, order) if shuffled else names(TASKS)
        revisit(learner, params, first, memory, names=labels).remember()
        found = revisit(learner, params, now, memory, names=names(TASKS))
        answers.append(found.outputs(query))
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-9, atol=1e-10)
    assert len(NAMES) == N_WAY
