"""The task axis of nested structures: taken and joined as by hand, whatever they are made of."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree

from torchemo.core.task_axis import join, take
from torchemo.core.types import Batch, Episode, Recall, Start

TASKS = 4


class Pair(NamedTuple):
    """Two fields, of which the tasks share the second."""

    own: Any
    all: Any

    def shared_fields(self):
        return ("all",)


@dataclass(frozen=True)
class Record:
    """The same as a dataclass, with one more that has no tensor."""

    own: Any
    all: Any
    name: str = "record"

    def shared_fields(self):
        return ("all",)


def numbers(*shape, first=0):
    return first + torch.arange(TASKS * torch.Size(shape).numel()).view(TASKS, *shape)


def recall():
    """A recall of two slots by four tasks; all share the keys of three filled slots."""
    return Recall(
        keys=numbers(3).float(),
        slots=numbers(2) % 3,
        distances=numbers(2, first=10).float(),
        weights=numbers(2, first=20).float(),
        values={"w": numbers(2, 2, 2, first=30).float(), "b": numbers(2, first=90).float()},
        generations=numbers(2, first=100),
        active=torch.tensor([True, False, True, True]),
        slot_keys=torch.arange(9.0).view(3, 3),
        notes={"domain": numbers(2, first=200)},
        own_notes={"domain": numbers(first=300)},
    )


# -- by hand -----------------------------------------------------------------------------------------


def test_some_tasks_of_a_recall_are_those_rows_of_all_its_fields_but_the_slot_keys():
    whole = recall()
    part = take(whole, slice(1, 3))
    assert part.keys.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert part.slots.tolist() == [[2, 0], [1, 2]]
    assert part.distances.tolist() == [[12, 13], [14, 15]]
    assert part.weights.tolist() == [[22, 23], [24, 25]]
    assert part.values["w"].flatten().tolist() == list(range(38, 54))
    assert part.values["w"].shape == (2, 2, 2, 2)
    assert part.values["b"].tolist() == [[92, 93], [94, 95]]
    assert part.generations.tolist() == [[102, 103], [104, 105]]
    assert part.active.tolist() == [False, True]
    assert part.notes["domain"].tolist() == [[202, 203], [204, 205]]
    assert part.own_notes["domain"].tolist() == [301, 302]
    assert part.slot_keys is whole.slot_keys
    assert (part.m, type(part)) == (2, Recall)


def test_some_tasks_of_an_episode_and_of_a_start_leave_out_what_is_not_there():
    episode = Episode(
        Batch(numbers(2, 1), numbers(2)), Batch(numbers(3, 1), numbers(3)), index=numbers()
    )
    start = Start({"w": numbers(2)}, about={"key": numbers(3)})
    tasks, begin, held = take((episode, start, None), slice(2, 3))
    assert tasks.support.x.tolist() == [[[4], [5]]]
    assert tasks.query.y.tolist() == [[6, 7, 8]]
    assert (tasks.index.tolist(), tasks.domain, held) == ([2], None, None)
    assert begin.theta["w"].tolist() == [[4, 5]]
    assert begin.about["key"].tolist() == [[6, 7, 8]]
    assert (begin.rates, begin.auxiliary, begin.gates) == (None, None, None)


def test_joined_tasks_keep_their_order_and_what_the_first_shares():
    one = Record([numbers()[:1], {"w": numbers(2)[:1]}], torch.zeros(3), "first")
    two = Record([numbers()[2:], {"w": numbers(2)[2:]}], torch.ones(3), "second")
    both = join([one, two])
    assert both.own[0].tolist() == [0, 2, 3]
    assert both.own[1]["w"].tolist() == [[0, 1], [4, 5], [6, 7]]
    assert both.all is one.all
    assert both.name == "first"


# -- any structure -----------------------------------------------------------------------------------

leaf = st.sampled_from([(), (1,), (3,), (2, 0), (2, 3)]).map(lambda shape: numbers(*shape))
structure = st.recursive(
    leaf | st.none(),
    lambda inside: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inside, max_size=3),
        st.lists(inside, max_size=3),
        st.tuples(inside, inside),
        st.builds(Batch, inside, inside),
    ),
    max_leaves=8,
)


def equal(a, b):
    """Whether two structures are of the same make and hold the same tensors."""
    (first, kind), (second, other) = _pytree.tree_flatten(a), _pytree.tree_flatten(b)
    return kind == other and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x is y
        for x, y in zip(first, second, strict=True)
    )


@settings(max_examples=150, deadline=None)
@given(structure, st.integers(0, TASKS - 1), st.integers(0, TASKS))
def test_taking_tasks_indexes_every_tensor_as_torchs_own_trees_do(value, first, last):
    tasks = slice(first, last)
    expected = _pytree.tree_map(lambda t: t[tasks] if isinstance(t, torch.Tensor) else t, value)
    assert equal(take(value, tasks), expected)


@settings(max_examples=150, deadline=None)
@given(structure, st.lists(st.integers(1, TASKS - 1), unique=True))
def test_tasks_taken_apart_anywhere_and_joined_again_are_the_same(value, cuts):
    ends = [0, *sorted(cuts), TASKS]
    parts = [take(value, slice(a, b)) for a, b in pairwise(ends)]
    assert equal(join(parts), value)


@pytest.mark.parametrize("kind", [Pair, Record])
def test_shared_fields_stay_whole_at_any_depth(kind):
    shared = {"w": numbers(2)}
    value = {"deep": [(kind(kind(numbers(), shared), shared), numbers(1))]}
    parts = [take(value, slice(b, b + 1)) for b in range(TASKS)]
    for b, part in enumerate(parts):
        outer, beside = part["deep"][0]
        assert type(outer) is type(outer.own) is kind
        assert outer.all is outer.own.all is shared
        assert outer.own.own.tolist() == [b]
        assert beside.tolist() == [[b]]
    again = join(parts)["deep"][0][0]
    assert again.all is again.own.all is shared
    assert torch.equal(again.own.own, numbers())


def test_a_whole_recall_survives_being_taken_apart():
    whole = recall()
    again = join([take(whole, slice(0, 1)), take(whole, slice(1, 4))])
    assert equal(again, whole)
    assert again.slot_keys is whole.slot_keys


def test_gradients_pass_through_both():
    value = {"w": numbers(2).double().requires_grad_()}
    parts = [take(value, slice(b, b + 1)) for b in (2, 0)]
    (join(parts)["w"] * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert value["w"].grad.tolist() == [[3, 4], [0, 0], [1, 2], [0, 0]]


def test_structures_that_differ_cannot_be_joined():
    with pytest.raises(ValueError, match="shorter"):
        join([[numbers(), numbers()], [numbers()]])
    with pytest.raises(KeyError, match="b"):
        join([{"b": numbers()}, {"a": numbers()}])
