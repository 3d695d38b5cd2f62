"""Head alignment (A7): the best matching of classes, and why head gradients need one."""

from itertools import permutations

import pytest
import torch

from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy
from torchemo.core.rng import generator_for
from torchemo.core.types import Recall
from torchemo.memory.alignment import align_heads, match_classes

DTYPE = torch.float64


def randn(*shape, seed=0):
    return torch.randn(shape, generator=generator_for(seed, "alignment"), dtype=DTYPE)


def recall_of(values, prototypes):
    tasks, m = next(iter(values.values())).shape[:2]
    zeros = torch.zeros(tasks, m, dtype=DTYPE)
    return Recall(
        keys=torch.zeros(tasks, 2, dtype=DTYPE),
        slots=torch.zeros(tasks, m, dtype=torch.int64),
        distances=zeros,
        weights=zeros + 1 / max(m, 1),
        values=values,
        generations=torch.ones(tasks, m, dtype=torch.int64),
        active=torch.ones(tasks, dtype=torch.bool),
        notes={"prototypes": prototypes},
    )


def brute_force(own, recalled):
    """The permutation of least cost, over all of them, with Python loops."""
    way = len(own)
    cost = [[float(((own[c] - recalled[d]) ** 2).sum()) for d in range(way)] for c in range(way)]
    return min(permutations(range(way)), key=lambda p: sum(cost[c][p[c]] for c in range(way)))


@pytest.mark.parametrize("way", [1, 2, 5, 6, 7])
def test_matching_equals_brute_force_on_both_sides_of_the_switch(way):
    own, recalled = randn(2, way, 3), randn(2, 3, way, 3, seed=1)
    found = match_classes(own, recalled)
    for b in range(2):
        for j in range(3):
            assert tuple(found[b, j].tolist()) == brute_force(own[b], recalled[b, j])


@pytest.mark.parametrize("way", [5, 7, 12])
def test_a_relabelled_copy_is_matched_exactly(way):
    own = randn(1, way, 4)
    order = torch.randperm(way, generator=generator_for(0, "order"))
    found = match_classes(own, own[:, order][:, None])
    assert torch.equal(order[found[0, 0]], torch.arange(way))


@pytest.mark.parametrize("way", [5, 7])
def test_prototypes_on_a_graph_are_matched_too(way):
    own = randn(1, way, 4).requires_grad_()
    assert match_classes(own, own[:, None]).tolist() == [[list(range(way))]]


def test_classes_that_cannot_be_told_apart_keep_their_order():
    own = torch.zeros(1, 5, 2, dtype=DTYPE)
    assert match_classes(own, own[:, None]).tolist() == [[[0, 1, 2, 3, 4]]]


@pytest.mark.parametrize("way", [5, 7])
def test_aligned_values_do_not_depend_on_the_labels_of_the_remembered_task(way):
    own = randn(2, way, 4)
    stored = randn(2, 3, way, 4, seed=1)
    values = {"w": randn(2, 3, way, 6, seed=2), "b": randn(2, 3, way, seed=3)}
    first = align_heads(recall_of(values, stored), own, head=("w", "b"))
    order = torch.randperm(way, generator=generator_for(1, "order"))
    shuffled = {name: value[:, :, order] for name, value in values.items()}
    second = align_heads(recall_of(shuffled, stored[:, :, order]), own, head=("w", "b"))
    for name in values:
        assert torch.equal(first.values[name], second.values[name])


@pytest.mark.parametrize("way", [5, 7])
def test_alignment_is_the_identity_when_the_orders_agree(way):
    own = randn(2, way, 4)
    stored = own[:, None].expand(2, 3, way, 4) + 1e-3 * randn(2, 3, way, 4, seed=1)
    values = {"w": randn(2, 3, way, 6, seed=2), "b": randn(2, 3, way, seed=3)}
    aligned = align_heads(recall_of(values, stored), own, head=("w", "b"))
    for name, value in values.items():
        assert torch.equal(aligned.values[name], value)


def test_row_c_of_an_aligned_value_is_the_row_of_the_class_that_looks_like_c():
    own = torch.tensor([[[0.0], [1.0], [2.0]]], dtype=DTYPE)
    stored = torch.tensor([[[[2.1], [0.1], [1.1]]]], dtype=DTYPE)
    values = {"b": torch.tensor([[[20.0, 0.0, 10.0]]], dtype=DTYPE)}
    aligned = align_heads(recall_of(values, stored), own, head=("b",))
    assert aligned.values["b"].tolist() == [[[0.0, 10.0, 20.0]]]


def test_the_class_axis_can_stand_behind_a_step_axis():
    own, stored = randn(2, 4, 3), randn(2, 2, 4, 3, seed=1)
    values = {"w": randn(2, 2, 5, 4, 6, seed=2), "b": randn(2, 2, 5, 4, seed=3)}
    aligned = align_heads(recall_of(values, stored), own, head=("w", "b"), class_axis=3)
    for step in range(5):
        one = {name: value[:, :, step] for name, value in values.items()}
        expected = align_heads(recall_of(one, stored), own, head=("w", "b"))
        for name in values:
            assert torch.equal(aligned.values[name][:, :, step], expected.values[name])


def test_only_the_head_is_permuted():
    own, stored = randn(1, 3, 2), randn(1, 2, 3, 2, seed=1)
    values = {"body": randn(1, 2, 3, 2, seed=2)}
    aligned = align_heads(recall_of(values, stored), own, head=("w", "b"))
    assert aligned.values["body"] is values["body"]


def test_nothing_recalled_is_nothing_to_align():
    recall = recall_of({"w": torch.zeros(1, 0, 3, dtype=DTYPE)}, torch.zeros(1, 0, 3, 2))
    assert align_heads(recall, randn(1, 3, 2), head=("w",)) is recall


@pytest.mark.parametrize("notes", [None, {}, {"domain": torch.zeros(1, 2)}])
def test_a_memory_without_prototypes_cannot_be_aligned(notes):
    recall = recall_of({"w": randn(1, 2, 3)}, randn(1, 2, 3, 2))._replace(notes=notes)
    with pytest.raises(ConfigError, match="prototypes"):
        align_heads(recall, randn(1, 3, 2), head=("w",))


# -- the closed form of A7 ---------------------------------------------------------------------------

WAY, SHOT, WIDTH = 5, 3, 4


def head_gradient(features, labels):
    """Gradient of the mean cross-entropy in a head of zeros, by autograd."""
    weight = torch.zeros(WAY, WIDTH, dtype=DTYPE, requires_grad=True)
    bias = torch.zeros(WAY, dtype=DTYPE, requires_grad=True)
    loss = cross_entropy((features @ weight.T + bias)[None], labels[None]).sum()
    return torch.autograd.grad(loss, [weight, bias])


def task():
    return randn(WAY * SHOT, WIDTH), torch.arange(WAY).repeat_interleave(SHOT)


def test_the_gradient_row_of_a_zero_head_is_the_centred_prototype():
    features, labels = task()
    weight, bias = head_gradient(features, labels)
    means = torch.stack([features[labels == c].mean(0) for c in range(WAY)])
    expected = (means.mean(0) - means) / WAY
    assert torch.allclose(weight, expected, rtol=0, atol=1e-15)
    assert torch.allclose(bias, torch.zeros(WAY, dtype=DTYPE), rtol=0, atol=1e-15)


def test_averaged_over_all_label_orders_the_gradient_of_a_zero_head_vanishes():
    features, labels = task()
    orders = torch.tensor(list(permutations(range(WAY))))
    total = torch.zeros(WAY, WIDTH, dtype=DTYPE)
    for order in orders:
        total += head_gradient(features, order[labels])[0]
    assert total.abs().max() / len(orders) < 1e-15


def test_aligned_on_their_own_rows_head_gradients_of_all_label_orders_agree():
    features, labels = task()
    own = head_gradient(features, labels)[0]
    orders = torch.tensor(list(permutations(range(WAY)))[::7])
    stored = torch.stack([head_gradient(features, order[labels])[0] for order in orders])
    recall = recall_of({"w": stored[None]}, stored[None])
    aligned = align_heads(recall, own[None], head=("w",)).values["w"][0]
    assert torch.allclose(aligned, own.expand_as(aligned), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("ours", "theirs"), [(2, 4), (4, 2)])
def test_unequal_numbers_of_classes_match_as_many_as_they_can(ours, theirs):
    g = torch.Generator().manual_seed(7)
    here, there = torch.randn(1, ours, 3, generator=g), torch.randn(1, 1, theirs, 3, generator=g)
    cost = torch.cdist(here[0], there[0, 0]).square()
    pairs = [
        list(zip(mine, yours, strict=True))
        for mine in permutations(range(ours), min(ours, theirs))
        for yours in permutations(range(theirs), min(ours, theirs))
    ]
    best = min(pairs, key=lambda chosen: sum(float(cost[i, j]) for i, j in chosen))
    expected = [dict(best).get(c, -1) for c in range(ours)]
    assert match_classes(here, there)[0, 0].tolist() == expected
