"""Evaluation and the judging of slots against loops over single tasks."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.laws.cases import (
    OFFSETS,
    SLOTS,
    STEPS,
    make_episode,
    make_learner,
    make_memory,
    make_params,
    pairs,
)
from torchemo.core.errors import ConfigError
from torchemo.core.task_axis import take
from torchemo.core.types import Batch, Episode
from torchemo.memory.selective import BOUND, SkipUnfamiliar, SkipUnhelpful
from torchemo.training.evaluate import batches, evaluate, judge_slots
from torchemo.training.predict import predict

TASKS = 12


def episodes(size=5, tasks=TASKS):
    """Tasks of known domain and number, cut into batches of ``size``."""
    drawn = make_episode(tasks=tasks)
    whole = Episode(drawn.support, drawn.query, torch.arange(tasks) % 3, 100 + torch.arange(tasks))
    return [take(whole, slice(b, b + size)) for b in range(0, tasks, size)]


def scored_alone(learner, params, memory):
    """Loss and accuracy of every task by itself, ``[task][step]``."""
    losses, shares = [], []
    for one in episodes(size=1):
        outputs = predict(learner, params, one, memory=memory).outputs
        y = one.query.y[0]
        losses.append([float(F.cross_entropy(out[0], y)) for out in outputs])
        shares.append([float((out[0].argmax(1) == y).double().mean()) for out in outputs])
    return (torch.tensor(each, dtype=torch.float64) for each in (losses, shares))


@pytest.mark.parametrize(
    ("case", "memory_case"), [p for p in pairs(alone=True) if p[1] in (None, "sum", OFFSETS)]
)
def test_scores_are_those_of_a_loop_over_tasks(case, memory_case):
    learner = make_learner(case)
    params = make_params(learner)
    memory = None if memory_case is None else make_memory(memory_case, learner).eval()
    found = evaluate(learner, params, episodes(), memory=memory)
    losses, shares = scored_alone(learner, params, memory)
    steps = STEPS + 1 if learner.traits.inner_loop else 1
    assert found.loss.shape == (TASKS, steps)
    torch.testing.assert_close(found.loss, losses, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.accuracy, shares, rtol=1e-12, atol=1e-14)
    assert found.domain.tolist() == [i % 3 for i in range(TASKS)]
    assert found.episode.tolist() == [100 + i for i in range(TASKS)]
    assert (found.recalled is None) == (memory is None)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("size", [1, 5, 12])
def test_how_tasks_are_cut_into_batches_does_not_matter(size, batched):
    learner = make_learner("maml")
    params, memory = make_params(learner), make_memory(OFFSETS, learner)
    one, other = (
        evaluate(learner, params, episodes(s), memory=memory, batched=b)
        for s, b in ((size, batched), (4, False))
    )
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-12, atol=1e-14)
    assert torch.equal(one.accuracy, other.accuracy)
    last = evaluate(learner, params, episodes(size), memory=memory, every_step=False)
    torch.testing.assert_close(last.loss, other.loss[:, -1:], rtol=1e-12, atol=1e-14)


def test_regression_has_no_accuracy_and_unknown_tasks_have_no_number():
    learner = make_learner("maml")
    drawn = make_episode()
    target = lambda b: Batch(b.x, torch.zeros(*b.y.shape, 3).double())  # noqa: E731
    points = Episode(drawn.support, target(drawn.query))
    found = evaluate(learner, make_params(learner), [points])
    assert found.accuracy is None
    assert found.domain.tolist() == found.episode.tolist() == [-1, -1]
    outputs = predict(learner, make_params(learner), points).outputs
    expected = torch.stack([out.square().flatten(1).mean(1) for out in outputs], 1)
    torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("training", [True, False])
def test_a_memory_is_in_eval_mode_meanwhile_and_as_before_afterwards(training, monkeypatch):
    learner = make_learner("maml")
    memory = make_memory("sum", learner, recall_dropout=0.9).train(training)
    seen, real = [], memory.recall
    monkeypatch.setattr(
        memory, "recall", lambda *a, **k: (seen.append(memory.training), real(*a, **k))[1]
    )
    found = evaluate(learner, make_params(learner), episodes(), memory=memory)
    assert seen == [False] * 3
    assert found.recalled.all()  # no recall dropout in evaluation
    assert memory.training is training

    def broken(*args, **more):
        raise RuntimeError("no recall")

    monkeypatch.setattr(memory, "recall", broken)
    with pytest.raises(RuntimeError, match="no recall"):
        evaluate(learner, make_params(learner), episodes(), memory=memory)
    assert memory.training is training


def test_tasks_that_skip_recall_are_scored_as_without_a_memory():
    learner = make_learner("maml")
    params, memory = make_params(learner), make_memory(OFFSETS, learner)
    rule = SkipUnfamiliar(memory.store.key_dim, share=0.5)
    keys = torch.cat([memory.encode(e.support).detach() for e in episodes()])
    rule.see(keys[:8])
    memory.skip_unfamiliar = rule
    found = evaluate(learner, params, episodes(), memory=memory)
    assert 0 < found.recalled.sum() < TASKS
    alone = evaluate(learner, params, episodes())
    memory.skip_unfamiliar = None
    always = evaluate(learner, params, episodes(), memory=memory)
    expected = torch.where(found.recalled[:, None], always.loss, alone.loss)
    torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=1e-14)


def judged_by_hand(learner, params, memory):
    """Return gain less its bound for every slot, and every task's weights, one task at a time."""
    weights, gains = [], []
    for one in episodes(size=1):
        found = predict(learner, params, one, memory=memory)
        alone = predict(learner, params, one).outputs[-1][0]
        y = one.query.y[0]
        share = lambda out, y=y: float((out.argmax(1) == y).double().mean())  # noqa: E731
        own = [0.0] * SLOTS
        for slot, a in zip(found.recall.slots[0].tolist(), found.recall.weights[0], strict=True):
            own[slot] += float(a)
        weights.append(own)
        gains.append(share(found.outputs[-1][0]) - share(alone))
    bounds = []
    for j in range(SLOTS):
        total = sum(a[j] for a in weights)
        gain = sum(a[j] * d for a, d in zip(weights, gains, strict=True)) / total
        spread = sum((a[j] * (d - gain)) ** 2 for a, d in zip(weights, gains, strict=True))
        bounds.append(gain - BOUND * math.sqrt(spread) / total)
    return bounds, weights


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("case", ["maml", "anil", "protonet"])
def test_slots_are_judged_as_by_a_loop_over_tasks(case, size):
    learner = make_learner(case)
    params, memory = make_params(learner), make_memory(OFFSETS, learner)
    memory.eval()
    bounds, weights = judged_by_hand(learner, params, memory)
    least = (sorted(bounds)[1] + sorted(bounds)[2]) / 2  # two slots pass, two fail
    memory.skip_unhelpful = SkipUnhelpful(SLOTS, least=least)
    memory.skip_unhelpful.failed.fill_(True)  # what was judged before does not count
    memory.train()
    found = judge_slots(learner, params, episodes(size), memory=memory)
    failed = [not bound > least for bound in bounds]
    assert memory.skip_unhelpful.failed.tolist() == failed
    assert sum(failed) == 2
    assert memory.training
    uses = [
        sum(a for a, bad in zip(own, failed, strict=True) if bad) <= sum(own) / 2 for own in weights
    ]
    assert found.recalled.tolist() == uses
    assert any(uses)
    assert not all(uses)
    # The scores are those of an evaluation with the slots that passed.
    again = evaluate(learner, params, episodes(size), memory=memory, every_step=False)
    torch.testing.assert_close(found.loss, again.loss, rtol=1e-12, atol=1e-14)
    assert torch.equal(found.accuracy, again.accuracy)
    assert torch.equal(found.recalled, again.recalled)


def test_slots_that_are_not_there_yet_are_not_judged():
    learner = make_learner("maml")
    params, memory = make_params(learner), make_memory(OFFSETS, learner, filled=False)
    memory.skip_unhelpful = SkipUnhelpful(SLOTS, least=0.0)
    found = judge_slots(learner, params, episodes(), memory=memory)
    assert not memory.skip_unhelpful.failed.any()
    alone = evaluate(learner, params, episodes(), every_step=False)
    assert torch.equal(found.loss, alone.loss)


def test_a_memory_that_uses_all_slots_has_nothing_to_judge():
    learner = make_learner("maml")
    with pytest.raises(ConfigError, match="uses all of its slots"):
        judge_slots(learner, make_params(learner), episodes(), memory=make_memory(OFFSETS, learner))


def test_batches_cover_all_tasks_once():
    cut = lambda tasks, size: list(  # noqa: E731
        batches(lambda start, count: (start, count), tasks=tasks, size=size)
    )
    assert cut(10, 4) == [(0, 4), (4, 4), (8, 2)]
    assert cut(3, 8) == [(0, 3)]
    assert cut(8, 4) == [(0, 4), (4, 4)]
