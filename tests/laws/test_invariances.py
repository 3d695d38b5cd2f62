"""Laws: what must not change a result, bit for bit or to rounding."""

import hashlib

import pytest
import torch

from tests.laws.cases import (
    LEARNER_CASES,
    MODEL,
    OFFSETS,
    fitting_memories,
    make_episode,
    make_learner,
    make_memory,
    make_params,
    pairs,
    plain_step,
    triples,
)
from torchemo.core.losses import cross_entropy
from torchemo.core.types import Batch, Episode
from torchemo.learners.gradient.meta_sgd import RATE
from torchemo.learners.hosting import host
from torchemo.learners.learner import network_names
from torchemo.memory.aggregators import AGGREGATORS
from torchemo.memory.controllers import CONTROLLERS
from torchemo.training.predict import predict
from torchemo.training.step import outer_step

LEARNERS = list(LEARNER_CASES)
PARTS = ("gradients", "memory_gradients", "rows", "values")


def assert_close(a, b, tolerance=1e-12):
    assert a.keys() == b.keys()
    for name in a:
        size = float(a[name].norm()) + 1
        assert float((a[name] - b[name]).norm()) <= tolerance * size, name


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def fingerprint(memory):
    digest = hashlib.sha256()
    for name, tensor in sorted(memory.state_dict().items()):
        digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(("case", "memory_case", "rule"), list(triples()))
def test_tasks_in_one_call_equal_a_loop_over_tasks(case, memory_case, rule):
    learner = make_learner(case, rule)
    params, episode = make_params(learner), make_episode()
    memory = None if memory_case is None else make_memory(memory_case, learner)
    loop = outer_step(learner, params, episode, memory=memory)
    one_call = outer_step(learner, params, episode, memory=memory, batched=True)
    for part in PARTS:
        assert_close(getattr(loop, part), getattr(one_call, part))
    assert_close({"losses": loop.losses}, {"losses": one_call.losses})
    answers = zip(
        predict(learner, params, episode, memory=memory).outputs,
        predict(learner, params, episode, memory=memory, batched=True).outputs,
        strict=True,
    )
    for a, b in answers:
        assert_close({"out": a}, {"out": b})


def tasks_of(episode, order):
    """Take tasks of an episode in this order."""
    part = lambda batch: Batch(batch.x[order], batch.y[order])  # noqa: E731
    return Episode(part(episode.support), part(episode.query), index=episode.index[order])


@pytest.mark.parametrize(("case", "memory_case"), pairs(alone=True))
def test_the_order_of_tasks_and_their_company_change_nothing(case, memory_case):
    learner = make_learner(case)
    params, episode = make_params(learner), make_episode(tasks=4)
    memory = None if memory_case is None else make_memory(memory_case, learner)
    whole = outer_step(learner, params, episode, memory=memory)
    order = torch.tensor([2, 0, 3, 1])
    moved = outer_step(learner, params, tasks_of(episode, order), memory=memory)
    for part in ("gradients", "memory_gradients"):
        assert_close(getattr(whole, part), getattr(moved, part))
    for part in ("rows", "values"):
        expected = {n: t[order] for n, t in getattr(whole, part).items()}
        assert_close(expected, getattr(moved, part))
    assert_close({"losses": whole.losses[order]}, {"losses": moved.losses})
    some = torch.tensor([3, 1])
    few = predict(learner, params, tasks_of(episode, some), memory=memory).outputs
    many = predict(learner, params, episode, memory=memory).outputs
    for a, b in zip(few, many, strict=True):
        assert_close({"out": a}, {"out": b[some]})


@pytest.mark.parametrize("state", ["capacity 0", "empty"])
@pytest.mark.parametrize(("case", "memory_case"), pairs())
def test_no_memory_is_the_base_learner_bit_for_bit(case, memory_case, state):
    """A memory of offsets is empty until its slots are seeded."""
    learner = make_learner(case)
    params, episode = make_params(learner), make_episode()
    options = {"capacity": 0} if state == "capacity 0" else {"filled": False}
    memory = make_memory(memory_case, learner, **options)
    plain, beside = plain_step(case), outer_step(learner, params, episode, memory=memory)
    assert_equal(plain.gradients, beside.gradients)
    assert torch.equal(plain.losses, beside.losses)
    alone = predict(learner, params, episode).outputs
    for a, b in zip(
        alone, predict(learner, params, episode, memory=memory.eval()).outputs, strict=True
    ):
        assert torch.equal(a, b)
    # What follows a step is the same too: remembering nothing changes nothing at capacity 0.
    if state == "capacity 0":
        before = fingerprint(memory)
        memory.train().remember(beside.recall, beside.values)
        assert fingerprint(memory) == before


def untrained():
    """Learned aggregators and offsets; a rate memory moves rates as soon as it recalls (A18)."""
    for case, memory_case, rule in triples():
        learned = memory_case in ("gated", "gate", "coordinate") and "rate_memory" not in case
        if learned or memory_case == OFFSETS:
            yield case, memory_case, rule


@pytest.mark.parametrize(("case", "memory_case", "rule"), list(untrained()))
def test_an_untrained_gate_is_the_base_learner_bit_for_bit(case, memory_case, rule):
    """A full memory of arbitrary gradients changes nothing before a gate has learned to use them."""
    learner = make_learner(case, rule)
    params, episode = make_params(learner), make_episode()
    memory = make_memory(memory_case, learner, trained=False)
    if memory_case == OFFSETS:  # its untrained state is V = 0
        for value in memory.store.values.values():
            value.zero_()
    plain, beside = plain_step(case, rule), outer_step(learner, params, episode, memory=memory)
    assert_equal(plain.gradients, beside.gradients)
    assert torch.equal(plain.losses, beside.losses)


@pytest.mark.parametrize(("case", "memory_case"), pairs())
def test_permuting_the_slots_changes_nothing(case, memory_case):
    learner = make_learner(case)
    params, episode = make_params(learner), make_episode()
    memory = make_memory(memory_case, learner)
    before = outer_step(learner, params, episode, memory=memory)
    order = torch.tensor([2, 0, 3, 1])
    store = memory.store
    store.keys = store.keys[order]
    store.values = {name: value[order] for name, value in store.values.items()}
    after = outer_step(learner, params, episode, memory=memory)
    assert_close(before.gradients, after.gradients)
    assert not torch.equal(before.recall.slots, after.recall.slots)


@pytest.mark.parametrize(("case", "memory_case"), pairs())
def test_evaluation_leaves_the_memory_as_it_was(case, memory_case):
    learner = make_learner(case)
    params, episode = make_params(learner), make_episode()
    memory = make_memory(memory_case, learner).eval()
    before = fingerprint(memory)
    predict(learner, params, episode, memory=memory)
    assert fingerprint(memory) == before
    memory.train()
    step = outer_step(learner, params, episode, memory=memory)
    assert fingerprint(memory) == before  # nothing is written before `remember`
    memory.remember(step.recall, step.values)
    assert fingerprint(memory) != before


def relabel(episode, order):
    """Give class c of every task the label ``order[c]``."""
    new = lambda batch: Batch(batch.x, order[batch.y])  # noqa: E731
    return Episode(new(episode.support), new(episode.query), index=episode.index)


def head_axes(params):
    """Heads, also those kept in several copies, and the axis that counts classes."""
    for name, tensor in params.items():
        own = name.rsplit("/", 1)[-1]
        if own in MODEL.head and not name.startswith(RATE):
            yield name, tensor.dim() - {"head.weight": 2, "head.bias": 1}[own]


def relabelled(params, order):
    """Give the rows of all heads the order of new labels: row order[c] is row c of the old one."""
    place = torch.argsort(order)
    moved = {n: params[n].index_select(axis, place) for n, axis in head_axes(params)}
    return {**params, **moved}


def equivariant():
    """Combinations that relabelling must leave alone, as far as their parts declare it.

    Left out: learners whose rates tell labels apart; those that adapt the head alone and drop it
    (nothing is left to remember, which tests/memory/test_build.py shows to be refused); the sketch of a
    whole head gradient, which depends on the order of its rows.
    """
    for case in LEARNERS:
        learner = make_learner(case)
        if not learner.traits.label_equivariant:
            continue
        yield case, None, "none"
        if OFFSETS in fitting_memories(case):
            yield case, OFFSETS, "none"
        for memory_case in AGGREGATORS if learner.traits.inner_loop else ():
            if set(host(learner).adapted) - set(learner.model.head):
                yield case, memory_case, "drop"
            if memory_case != "gate":
                yield case, memory_case, "hungarian"


@pytest.mark.parametrize(("case", "memory_case", "align"), list(equivariant()))
def test_relabelling_a_task_with_its_head_rows_changes_no_loss(case, memory_case, align):
    learner = make_learner(case)
    params, episode = make_params(learner), make_episode()
    options = {} if memory_case == OFFSETS else {"head_align": align}
    memory = None if memory_case is None else make_memory(memory_case, learner, **options)
    order = torch.tensor([2, 0, 1])
    a = predict(learner, params, episode, memory=memory).outputs
    if memory_case == OFFSETS:  # offsets of a head move with it
        memory.store.values = relabelled(dict(memory.store.values), order)
    moved = relabelled(params, order)
    b = predict(learner, moved, relabel(episode, order), memory=memory).outputs
    for before, after in zip(a, b, strict=True):
        losses = cross_entropy(before, episode.query.y)
        relabelled_losses = cross_entropy(after, order[episode.query.y])
        assert torch.allclose(losses, relabelled_losses, rtol=1e-10, atol=0)
    # The relabelling did something; heads of equal rows differ after the first step alone.
    assert any(not torch.allclose(before, after) for before, after in zip(a, b, strict=True))


def interrupted():
    """Learners whose memories differ, with every memory; of offsets nothing is ever forgotten."""
    for case in ("maml", "anil", "meta-sgd/rate_memory", "proto-maml", "protonet"):
        for memory_case in fitting_memories(case):
            controllers = ["lru"] if memory_case == OFFSETS else CONTROLLERS
            yield from ((case, memory_case, controller) for controller in controllers)


@pytest.mark.parametrize(("case", "memory_case", "controller"), list(interrupted()))
def test_a_saved_and_restored_memory_continues_bit_for_bit(case, memory_case, controller):
    learner = make_learner(case)
    params = make_params(learner)
    runs = []
    for stops in (False, True):
        memory = make_memory(memory_case, learner)
        memory.store.controller = CONTROLLERS[controller]()
        for i in range(4):
            if stops and i == 2:
                saved = {n: t.detach().clone() for n, t in memory.state_dict().items()}
                memory = make_memory(memory_case, learner, filled=False, trained=False)
                memory.store.controller = CONTROLLERS[controller]()
                memory.load_state_dict(saved)
            step = outer_step(learner, params, make_episode(i), memory=memory)
            memory.remember(step.recall, step.values, slot_key_gradient=step.slot_key_gradient)
        runs.append(memory.state_dict())
    assert_equal(*runs)


def test_network_names_are_those_without_a_slash():
    assert network_names({"conv1.weight": torch.ones(1), "rate/conv1.weight": torch.ones(1)}) == [
        "conv1.weight"
    ]
