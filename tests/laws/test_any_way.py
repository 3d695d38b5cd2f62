"""Laws: tasks with other numbers of classes than in training, and classes with unequal shots."""

import pytest
import torch

from tests.laws.cases import (
    LEARNER_CASES,
    N_WAY,
    OFFSETS,
    TASKS,
    make_episode,
    make_learner,
    make_memory,
    make_params,
    problem,
)
from torchemo.core.errors import ConfigError
from torchemo.core.types import Batch, Episode
from torchemo.learners.learner import AnyWay, Balancing
from torchemo.training.classes import for_classes, for_shots
from torchemo.training.predict import predict
from torchemo.training.system import System

BY_NUMBERS = ("arml", "hsml")
"""Learners that describe a task by the numbers of its classes."""
CASES = [case for case in LEARNER_CASES if case not in BY_NUMBERS]
BOUNDED = [
    c for c in CASES if getattr(getattr(make_learner(c), "head", None), "most_classes", None)
]
"""Learners with parameters for each class of training: they take fewer classes, in their order."""
FEWER, MORE = N_WAY - 1, N_WAY + 2


def rows_of(learner, params):
    """Names of the meta-parameters with a row for every class."""
    fewer = learner.params_for(params, FEWER)
    return [name for name in params if fewer[name].shape != params[name].shape]


def is_ordered(case):
    learner = make_learner(case)
    return learner.keeps_rows and bool(rows_of(learner, make_params(learner)))


ORDERED = [case for case in CASES if is_ordered(case)]
"""Learners that keep trained rows of their head, so that the order of the classes matters as in training."""
SUMS = [c for c in CASES if isinstance(make_learner(c), Balancing) and "minibatch" not in c]
"""Learners whose support loss is over all examples at once."""
MEMORIES = ("sum", "mean", "gated", "coordinate", OFFSETS)


def system_of(case, memory=None, **more):
    learner = make_learner(case)
    held = None if memory is None else make_memory(memory, learner, **more).eval()
    return System(learner, make_params(learner), held)


def episode_of(shots, seed=0):
    """Tasks whose classes have these shots, in random order, with two queries per class."""
    g = torch.Generator().manual_seed(seed)

    def batch(counts):
        y = torch.cat([torch.full((n,), c) for c, n in enumerate(counts)])
        y = torch.stack([y[torch.randperm(len(y), generator=g)] for _ in range(TASKS)])
        x = torch.randn(*y.shape, *problem.x, generator=g, dtype=torch.float64)
        return Batch(x + y.view(*y.shape, *(1 for _ in problem.x)), y)

    return Episode(batch(shots), batch([2] * len(shots)))


def answers(system, episode):
    return predict(system.learner, system.params, episode, memory=system.memory).outputs


def relabelled(episode, order):
    """Give class c the number order[c]."""
    support, query = (Batch(b.x, order[b.y]) for b in (episode.support, episode.query))
    return Episode(support, query)


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_as_many_classes_as_in_training_change_nothing(case):
    system, episode = system_of(case), make_episode()
    assert isinstance(system.learner, AnyWay)
    same = for_classes(system, N_WAY)
    for a, b in zip(answers(same, episode), answers(system, episode), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("n_way", [FEWER, MORE])
@pytest.mark.parametrize("case", [case for case in CASES if case not in BOUNDED])
def test_numbering_the_classes_otherwise_gives_the_same_answers(case, n_way):
    if case == "boil" and n_way > N_WAY:
        pytest.skip("takes no more classes than in training")
    system, episode = for_classes(system_of(case), n_way), episode_of([2] * n_way)
    order = torch.arange(n_way).roll(1)
    found = answers(system, episode)
    if case in ORDERED:  # the rows are numbered with the classes
        for name in rows_of(make_learner(case), make_params(make_learner(case))):
            back = order.argsort()
            system.params[name] = system.params[name][back]
        back_to = [out[..., order] for out in answers(system, relabelled(episode, order))]
        close(back_to, found)
        return
    assert {out.shape for out in found} == {(TASKS, 2 * n_way, n_way)}
    close([out[..., order] for out in answers(system, relabelled(episode, order))], found)


@pytest.mark.parametrize("case", BOUNDED)
def test_a_learner_of_as_many_classes_as_in_training_takes_fewer_and_says_so_of_more(case):
    found = answers(for_classes(system_of(case), FEWER), episode_of([2] * FEWER))
    assert {out.shape for out in found} == {(TASKS, 2 * FEWER, FEWER)}
    with pytest.raises(ConfigError, match=f"at most {N_WAY} classes, got {MORE}"):
        for_classes(system_of(case), MORE)


@pytest.mark.parametrize("n_way", [FEWER, MORE])
@pytest.mark.parametrize("case", ORDERED)
def test_trained_rows_stay_and_new_ones_take_their_mean_where_the_body_adapts(case, n_way):
    if case == "boil" and n_way > N_WAY:
        with pytest.raises(ConfigError, match="could not"):
            for_classes(system_of(case), n_way)
        return
    before = system_of(case)
    after = for_classes(before, n_way)
    for name in rows_of(before.learner, before.params):
        old, new = before.params[name], after.params[name]
        assert torch.equal(new[: min(n_way, N_WAY)], old[:n_way])
        assert all(torch.allclose(row, old.mean(0)) for row in new[N_WAY:])
        assert len(new) == n_way


@pytest.mark.parametrize("case", ["anil", "proto-maml", "musml"])
def test_no_trained_row_stays_where_the_order_of_classes_does_not_matter(case):
    assert case not in ORDERED


@pytest.mark.parametrize("case", BY_NUMBERS)
def test_a_learner_that_reads_class_numbers_says_why_it_takes_no_others(case):
    with pytest.raises(ConfigError, match="numbers of its classes"):
        for_classes(system_of(case), MORE)


@pytest.mark.parametrize("n_way", [FEWER, MORE])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("case", ["maml", "anil", "meta-sgd/rate_memory", "proto-maml", "bmg"])
def test_a_memory_is_read_by_any_number_of_classes(case, memory, n_way):
    if memory == OFFSETS and "rate_memory" in case:
        pytest.skip("outer gradients say nothing about rates")
    system = system_of(case, memory)
    read, episode = for_classes(system, n_way), episode_of([1] * n_way)
    order = torch.arange(n_way).roll(1)
    found = answers(read, episode)
    if not read.learner.keeps_rows:
        close([out[..., order] for out in answers(read, relabelled(episode, order))], found)
    alone = answers(System(read.learner, read.params), episode)
    assert memory == "gated" or not torch.allclose(found[-1], alone[-1])
    same, plain = for_classes(system, N_WAY), make_episode()
    close(answers(same, plain), answers(system, plain))
    assert system.memory.classes is None


@pytest.mark.parametrize("content", ["first", "per_step"])
def test_recalled_head_rows_take_their_mean(content):
    system = system_of("anil", "sum", content=content)
    memory, keys = (
        for_classes(system, MORE).memory,
        torch.zeros(1, system.memory.store.key_dim).double(),
    )
    found, own = memory.recall(keys).values, system.memory.recall(keys).values
    for name in ("head.weight", "head.bias"):
        axis = 3 if content == "per_step" else 2
        rows = found[name].movedim(axis, 0)
        assert len(rows) == MORE
        for row in rows:
            torch.testing.assert_close(row, own[name].mean(axis))
    body = system_of("maml", "sum", content=content)
    values = for_classes(body, MORE).memory.recall(keys).values
    for name, own in body.memory.recall(keys).values.items():
        axis = 3 if content == "per_step" else 2
        kept = values[name].narrow(axis, 0, N_WAY) if name.startswith("head") else values[name]
        assert torch.equal(kept, own)


def test_an_aggregator_that_knows_the_shapes_of_training_says_so():
    with pytest.raises(ConfigError, match="aggregator"):
        for_classes(system_of("maml", "gate"), MORE)


@pytest.mark.parametrize("case", SUMS)
def test_every_example_twice_changes_nothing(case):
    for shots in ([2] * N_WAY, [1, 3, 2]):
        system, episode = system_of(case), episode_of(shots)
        twice = Batch(*(torch.cat([t, t], 1) for t in episode.support))
        learner = for_shots(system.learner, shots)
        found = predict(learner, system.params, Episode(twice, episode.query)).outputs
        close(found, predict(learner, system.params, episode).outputs)


@pytest.mark.parametrize("case", SUMS)
def test_classes_weigh_alike_however_many_examples_they_have(case):
    system, episode = system_of(case), episode_of([1] * N_WAY)
    first = episode.support.y == 0
    own = Batch(*(t[first].view(TASKS, 1, *t.shape[2:]) for t in episode.support))
    again = Batch(*(torch.cat([t, o, o], 1) for t, o in zip(episode.support, own, strict=True)))
    learner = for_shots(system.learner, [3, 1, 1])
    found = predict(learner, system.params, Episode(again, episode.query)).outputs
    plain = predict(system.learner, system.params, episode).outputs
    if "tsa-maml" not in case:  # its groups are chosen by solutions that rounding may move
        close(found, plain)


@pytest.mark.parametrize("case", SUMS)
def test_equal_shots_are_the_plain_path(case):
    learner = make_learner(case)
    assert for_shots(learner, [2] * N_WAY) is learner
    params, episode = make_params(learner), make_episode()
    close(
        predict(learner.balanced(), params, episode).outputs,
        predict(learner, params, episode).outputs,
    )


@pytest.mark.parametrize("n_way", [FEWER, MORE])
def test_aligned_heads_follow_the_classes(n_way):
    read = for_classes(system_of("proto-maml", "sum", head_align="hungarian"), n_way)
    episode, order = episode_of([1] * n_way), torch.arange(n_way).roll(1)
    found = answers(read, episode)
    close([out[..., order] for out in answers(read, relabelled(episode, order))], found)
