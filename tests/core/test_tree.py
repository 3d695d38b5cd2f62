"""Algebra on named tensors, against loops over tasks."""

import math

import pytest
import torch

from torchemo.core.errors import ShapeError
from torchemo.core.rng import generator_for
from torchemo.core.task_axis import join, take
from torchemo.core.tree import (
    carried_back,
    check_same_structure,
    detach,
    expand,
    flatten,
    is_finite,
    leaves,
    norms,
    select,
    tree_map,
)

SHAPES = {"w": (2, 3), "b": (2,), "scale": (), "none": (0,)}


def tree(*leading, seed=0):
    g = generator_for(seed, "tree")
    return {
        n: torch.randn((*leading, *s), generator=g, dtype=torch.float64) for n, s in SHAPES.items()
    }


def numbers(params, b):
    return [x for p in params.values() for x in p[b].reshape(-1).tolist()]


def test_tree_map_goes_by_name_and_keeps_the_order_of_the_first():
    first, second = tree(), dict(reversed(tree(seed=1).items()))
    total = tree_map(torch.add, first, second)
    assert list(total) == list(SHAPES)
    assert all(torch.equal(total[n], first[n] + second[n]) for n in SHAPES)


def test_expanding_gives_every_task_the_same_storage():
    params = tree()
    wide = expand(params, 4)
    for name, p in params.items():
        assert wide[name].shape == (4, *p.shape)
        assert wide[name].data_ptr() == p.data_ptr()
        assert all(torch.equal(row, p) for row in wide[name])


def test_tasks_taken_apart_and_joined_are_the_same():
    params = tree(3)
    joined = join([take(params, slice(b, b + 1)) for b in range(3)])
    assert all(torch.equal(joined[n], params[n]) for n in SHAPES)
    assert take(params, slice(1, 2))["w"].shape == (1, 2, 3)


def test_gradients_are_carried_back_and_are_zero_where_none_arrives():
    a, b, unused = (torch.tensor([2.0, 3.0], requires_grad=True) for _ in range(3))
    known = torch.tensor([1.0, -1.0])
    found = carried_back([(a * b, known), (5 * a, known)], [a, b, unused])
    assert [g.tolist() for g in found] == [[7.0, -8.0], [2.0, -3.0], [0.0, 0.0]]


def test_selecting_keeps_the_order_of_the_names():
    assert list(select(tree(), ["scale", "w"])) == ["scale", "w"]


def test_detached_tensors_are_off_the_graph_and_leaves_are_fresh():
    params = {name: p.requires_grad_() * 2 for name, p in tree().items()}
    assert all(p.requires_grad for p in params.values())
    assert not any(p.requires_grad for p in detach(params).values())
    fresh = leaves(params)
    for name, leaf in fresh.items():
        assert leaf.is_leaf
        assert leaf.requires_grad
        assert torch.equal(leaf, params[name])
    with torch.no_grad():
        fresh["w"].zero_()
    assert bool(params["w"].any())


def test_norms_are_taken_over_all_tensors_of_a_task():
    params = tree(3)
    for b, norm in enumerate(norms(params).tolist()):
        assert norm == pytest.approx(math.sqrt(sum(x * x for x in numbers(params, b))), rel=1e-14)


def test_flattening_lays_tensors_end_to_end():
    params = tree(3)
    flat = flatten(params)
    assert flat.shape == (3, 9)
    assert flat.tolist() == [numbers(params, b) for b in range(3)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["w", "b", "scale"])
def test_finiteness_is_said_task_by_task(bad, name):
    params = tree(3)
    assert is_finite(params).tolist() == [True, True, True]
    params[name].view(3, -1)[1, 0] = bad
    assert is_finite(params).tolist() == [True, False, True]


def test_the_same_structure_passes():
    expected = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    check_same_structure(expected, dict(reversed(tree(3).items())), what="gradients")
    check_same_structure(expected, tree(3, 2), what="values", leading=2)
    check_same_structure(expected, tree(), what="parameters", leading=0)


@pytest.mark.parametrize(
    ("got", "says"),
    [
        ({"w": torch.ones(1, 2)}, r"missing \['b'\]"),
        ({"w": torch.ones(1, 2), "b": torch.ones(1), "c": torch.ones(1)}, r"unexpected \['c'\]"),
        ({"w": torch.ones(1, 3), "b": torch.ones(1)}, r"'w' should have shape \[2\], got \[3\]"),
        ({"w": torch.ones(1, 2, 1), "b": torch.ones(1)}, r"'w'.*got \[2, 1\]"),
    ],
)
def test_another_structure_is_refused_by_name(got, says):
    expected = {"w": torch.Size([2]), "b": torch.Size([])}
    with pytest.raises(ShapeError, match=f"gradients.*{says}"):
        check_same_structure(expected, got, what="gradients")
