"""Predictions: answers after the steps that are asked for, with what was recalled for them."""

import pytest
import torch

from tests.laws.cases import (
    LEARNER_CASES,
    OFFSETS,
    STEPS,
    fitting_memories,
    make_episode,
    make_learner,
    make_memory,
    make_params,
    pairs,
)
from torchemo.core.tree import select
from torchemo.learners.learner import network_names, start_of, steps_of
from torchemo.memory.aggregators import Sum
from torchemo.memory.emo import EMO
from torchemo.memory.recall import Retrieval
from torchemo.memory.store import EpisodicMemory
from torchemo.training.predict import groups_of, predict, recalled

GOOD = make_episode()


@pytest.mark.parametrize("steps", [None, 0, 3])
@pytest.mark.parametrize("case", LEARNER_CASES)
def test_the_answer_after_the_last_step_alone_is_that_of_all_steps(case, steps):
    learner = make_learner(case)
    params = make_params(learner)
    kinds = fitting_memories(case)
    memory = make_memory(OFFSETS if OFFSETS in kinds else "sum", learner).eval()
    answers = predict(learner, params, GOOD, memory=memory, steps=steps).outputs
    (last,) = predict(learner, params, GOOD, memory=memory, steps=steps, every_step=False).outputs
    taken = steps_of(learner) if steps is None else steps
    assert len(answers) == (1 + taken if learner.traits.inner_loop else 1)
    assert torch.equal(last, answers[-1])


def assert_same_recall(a, b):
    for name, one, other in zip(a._fields, a, b, strict=True):
        if isinstance(one, dict):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[n], other[n]) for n in one), name
        else:
            assert (one is None and other is None) or torch.equal(one, other), name


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("case", "memory_case"), [p for p in pairs() if p[1] in ("sum", OFFSETS)])
def test_the_recall_of_a_prediction_is_what_the_memory_recalls(case, memory_case, batched):
    learner = make_learner(case)
    params, memory = make_params(learner), make_memory(memory_case, learner).eval()
    found = predict(learner, params, GOOD, memory=memory, batched=batched).recall
    with torch.no_grad():
        expected = memory.recall(memory.encode(GOOD.support), index=GOOD.index)
    assert found.m > 0
    assert_same_recall(found, expected)


def test_without_a_memory_nothing_is_recalled():
    learner = make_learner("maml")
    assert predict(learner, make_params(learner), GOOD).recall is None


@pytest.mark.parametrize("case", ["maml", "anil", "protonet"])
@pytest.mark.parametrize("batched", [False, True])
def test_tasks_are_encoded_and_recalled_once(case, batched, monkeypatch):
    """One pass, however many inner steps are shown and however tasks are grouped."""
    learner = make_learner(case)
    params, memory, seen = make_params(learner), make_memory(OFFSETS, learner).eval(), []
    for name in ("encode", "recall", "offset"):
        real = getattr(memory, name)

        def counted(*args, real=real, name=name, **more):
            seen.append(name)
            return real(*args, **more)

        monkeypatch.setattr(memory, name, counted)
    predict(learner, params, GOOD, memory=memory, batched=batched)
    assert seen == ["encode", "recall", "offset"]


@pytest.mark.parametrize("case", LEARNER_CASES)
def test_each_task_is_fitted_once_without_a_graph(case, monkeypatch):
    learner = make_learner(case)
    params, seen = make_params(learner), []
    inner = type(learner)
    real = inner.fit

    def counted(self, start, support, **more):
        seen.append((len(support.x), more["steps"], more["graph"]))
        return real(self, start, support, **more)

    monkeypatch.setattr(inner, "fit", counted)
    found = predict(learner, params, GOOD, batched=True)
    assert seen == [(2, steps_of(learner), False)]
    assert not any(out.requires_grad for out in found.outputs)


def test_the_description_of_a_task_is_the_key_where_the_memory_has_no_key_network():
    learner = make_learner("arml")
    params = make_params(learner)
    memory = make_memory("sum", learner, filled=False)
    theta = select(params, network_names(params))
    start = start_of(learner, params, GOOD.support, base={n: p[None] for n, p in theta.items()})
    own = recalled(memory, theta, GOOD, start).recall.keys
    assert torch.equal(own, memory.encode(GOOD.support))
    bare = EMO(EpisodicMemory(4, learner.key_dim, key_dtype=torch.float64), Retrieval(2), Sum())
    described = recalled(bare, theta, GOOD, start).recall.keys
    assert torch.equal(described, start.about["key"])


@pytest.mark.parametrize(("batched", "groups"), [(True, [3]), (False, [1, 1, 1]), (None, [3])])
def test_tasks_go_through_the_network_in_one_call_or_one_by_one(batched, groups):
    learner = make_learner("maml")
    episode = make_episode(tasks=3)
    found = groups_of(make_params(learner), episode, batched)
    assert [len(range(3)[group]) for group in found] == groups


def test_evaluation_may_take_more_steps_than_training():
    learner = make_learner("maml")
    params = make_params(learner)
    few = predict(learner, params, GOOD).outputs
    many = predict(learner, params, GOOD, steps=STEPS + 2).outputs
    assert len(many) == len(few) + 2
    assert all(torch.equal(a, b) for a, b in zip(few, many, strict=False))
