"""Recall: exact neighbours, their weights, and where gradients go."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from tests.reference.retrieval import nearest, softmax_weights, squared_distance
from torchemo.core.errors import ConfigError, DataError
from torchemo.core.rng import generator_for
from torchemo.memory.recall import Retrieval
from torchemo.memory.search import RandomIndex
from torchemo.memory.store import EpisodicMemory


def filled(keys, *, capacity=None, dtype=torch.float32):
    """A memory with the given keys whose value in slot j is j."""
    keys = torch.as_tensor(keys, dtype=dtype)
    memory = EpisodicMemory(
        capacity or len(keys), keys.shape[1], key_dtype=dtype, value_dtype=dtype
    )
    memory.write(keys, {"slot": torch.arange(len(keys), dtype=dtype)})
    return memory


def random_keys(n, dim, *, seed=0, dtype=torch.float64):
    return torch.randn(n, dim, generator=generator_for(seed, "keys"), dtype=dtype)


grid = st.lists(st.integers(-3, 3), min_size=2, max_size=2)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    tasks=st.lists(grid, min_size=1, max_size=3),
    slots=st.lists(grid, min_size=1, max_size=12),
    k=st.one_of(st.none(), st.integers(1, 15)),
)
def test_recall_is_the_naive_neighbourhood_with_ties_ordered_by_slot(tasks, slots, k):
    # Whole numbers have exact distances, and on a small grid many of them are equal.
    recall = Retrieval(k)(filled(slots), torch.tensor(tasks, dtype=torch.float32))
    assert recall.m == (len(slots) if k is None else min(k, len(slots)))
    for b, key in enumerate(tasks):
        expected = nearest(key, slots, k)
        assert recall.slots[b].tolist() == expected
        distances = [math.sqrt(squared_distance(key, slots[s])) for s in expected]
        assert recall.distances[b].tolist() == pytest.approx(distances, abs=1e-6)
        assert recall.values["slot"][b].tolist() == expected


def test_copies_of_one_key_are_ordered_by_slot_in_64_dimensions():
    one = random_keys(1, 64, dtype=torch.float32)
    others = random_keys(9, 64, seed=1, dtype=torch.float32)
    keys = torch.cat([others[:4], one, others[4:], one, one])
    recall = Retrieval(3)(filled(keys), one + 0.01)
    assert recall.slots.tolist() == [[4, 10, 11]]


def test_near_ties_are_told_apart_far_from_the_origin():
    # Distances 3 and 4 at a distance of 10^4: the expanded quadratic form cancels in float32.
    slots = [[10_004.0, 0.0], [10_003.0, 0.0]]
    assert Retrieval(2)(filled(slots), torch.tensor([[1e4, 0.0]])).slots.tolist() == [[1, 0]]
    slots = [[10_000.0, 0.02], [10_000.0, 0.01]]
    assert Retrieval(1)(filled(slots), torch.tensor([[1e4, 0.0]])).slots.tolist() == [[1]]


def test_a_task_recalls_the_same_alone_and_in_a_batch():
    memory = filled(random_keys(30, 8))
    keys = random_keys(5, 8, seed=1).float()
    retrieval = Retrieval(7, weights="softmax")
    together = retrieval(memory, keys)
    for b in range(5):
        alone = retrieval(memory, keys[b : b + 1])
        assert torch.equal(alone.slots[0], together.slots[b])
        assert torch.equal(alone.weights[0], together.weights[b])
        assert torch.equal(alone.values["slot"][0], together.values["slot"][b])


def test_recalling_changes_nothing_and_reports_generations_and_notes():
    memory = EpisodicMemory(2, 1)
    memory.write(
        torch.tensor([[0.0], [1.0], [2.0]]),
        {"w": torch.arange(3.0)},
        notes={"domain": torch.tensor([5, 6, 7])},
    )
    before = {name: tensor.clone() for name, tensor in memory.state_dict().items()}
    recall = Retrieval(2)(memory, torch.tensor([[1.9]]))
    assert recall.values["w"].tolist() == [[2.0, 1.0]]
    assert recall.notes["domain"].tolist() == [[7, 6]]
    assert recall.generations.tolist() == [[2, 1]]
    after = memory.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("weights", ["uniform", "softmax"])
@pytest.mark.parametrize("capacity", [0, 3])
def test_an_empty_memory_recalls_nothing(weights, capacity):
    recall = Retrieval(4, weights=weights)(EpisodicMemory(capacity, 2), torch.zeros(3, 2))
    assert recall.m == 0
    assert recall.weights.shape == recall.distances.shape == (3, 0)
    assert recall.values == {}


def test_an_empty_memory_with_a_null_slot_recalls_nothing():
    retrieval = Retrieval(4, weights="softmax", null_distance=1.0)
    assert retrieval(EpisodicMemory(3, 2), torch.zeros(3, 2)).weights.shape == (3, 0)


# -- who may be recalled -----------------------------------------------------------------------------


def aged():
    """Slots 0, 1, 2 at keys 0, 1, 2, written three, two and one batches ago."""
    memory = EpisodicMemory(5, 1)
    for key in range(3):
        memory.write(torch.tensor([[float(key)]]), {"w": torch.ones(1)})
        memory.end_batch()
    return memory


@pytest.mark.parametrize(
    ("max_age", "slots"), [(None, [0, 1, 2]), (3, [0, 1, 2]), (2, [1, 2]), (1, [2])]
)
def test_slots_older_than_max_age_are_not_recalled(max_age, slots):
    recall = Retrieval(9, max_age=max_age)(aged(), torch.zeros(1, 1))
    assert recall.slots.tolist() == [slots]
    assert recall.distances.tolist() == [[float(s) for s in slots]]
    assert recall.weights.sum().item() == pytest.approx(1.0)


def test_max_age_leaves_k_neighbours_among_the_young():
    assert Retrieval(1, max_age=2)(aged(), torch.zeros(1, 1)).slots.tolist() == [[1]]


@pytest.mark.parametrize(("min_fill", "m"), [(1, 3), (3, 3), (4, 0)])
def test_nothing_is_recalled_before_min_fill_slots_are_filled(min_fill, m):
    assert Retrieval(9, min_fill=min_fill)(aged(), torch.zeros(1, 1)).m == m


def test_inactive_tasks_have_no_weights():
    active = torch.tensor([True, False])
    recall = Retrieval(2, weights="softmax")(aged(), torch.zeros(2, 1), active=active)
    assert recall.weights.sum(1).tolist() == pytest.approx([1.0, 0.0])
    assert recall.active.tolist() == [True, False]


# -- weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 4, 9])
def test_uniform_weights_share_equally(k):
    recall = Retrieval(k)(filled(random_keys(6, 3)), random_keys(2, 3, seed=1).float())
    assert torch.equal(recall.weights, torch.full((2, min(k, 6)), 1 / min(k, 6)))


@pytest.mark.parametrize("null_distance", [None, 0.7])
def test_softmax_weights_equal_the_naive_ones(null_distance):
    slots, tasks = random_keys(9, 3), random_keys(4, 3, seed=1)
    retrieval = Retrieval(5, weights="softmax", temperature=0.8, null_distance=null_distance)
    # Both pass through float32 when the module is built.
    tau = math.exp(retrieval.log_temperature.item())
    null = None if null_distance is None else retrieval.null_logit_distance.item()
    assert tau == pytest.approx(0.8, rel=1e-6)
    recall = retrieval.double()(filled(slots, dtype=torch.float64), tasks)
    for b in range(4):
        squared = [
            squared_distance(tasks[b].tolist(), slots[s].tolist()) for s in recall.slots[b].tolist()
        ]
        expected = softmax_weights(squared, tau, null_distance=null)
        assert recall.weights[b].tolist() == pytest.approx(expected, rel=1e-12)


def test_weights_fall_with_distance_and_sum_to_one():
    recall = Retrieval(6, weights="softmax")(filled(random_keys(9, 3)), torch.zeros(2, 3))
    assert torch.allclose(recall.weights.sum(1), torch.ones(2))
    assert bool((recall.weights.diff(dim=1) <= 0).all())


def test_a_null_slot_takes_the_weight_of_tasks_unlike_everything_remembered():
    retrieval = Retrieval(3, weights="softmax", temperature=0.5, null_distance=1.0)
    memory = filled([[0.0, 0.0], [0.1, 0.0], [0.0, 0.1]])
    keys = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [6.0, 0.0]])
    sums = retrieval(memory, keys).weights.sum(1).tolist()
    assert sums == sorted(sums, reverse=True)
    assert 0.9 < sums[0] < 1.0
    assert sums[3] < 1e-12


def test_distance_and_temperature_of_the_null_slot_are_learned():
    retrieval = Retrieval(2, weights="softmax", null_distance=1.0)
    assert {name for name, _ in retrieval.named_parameters()} == {
        "log_temperature",
        "null_logit_distance",
    }
    retrieval(filled([[0.5], [0.9]]), torch.zeros(1, 1)).weights.sum().backward()
    assert retrieval.null_logit_distance.grad.item() > 0
    assert retrieval.log_temperature.grad is not None


# -- gradients ---------------------------------------------------------------------------------------


def test_uniform_weights_pass_no_gradient_to_the_keys():
    keys = random_keys(2, 3, seed=1).float().requires_grad_()
    retrieval = Retrieval(4)
    recall = retrieval(filled(random_keys(6, 3)), keys)
    assert not recall.weights.requires_grad
    assert not recall.distances.requires_grad
    assert list(retrieval.parameters()) == []
    assert not (recall.weights * recall.values["slot"]).sum().requires_grad


def test_softmax_weights_pass_a_gradient_to_the_keys():
    keys = random_keys(2, 3, seed=1).float().requires_grad_()
    recall = Retrieval(4, weights="softmax", temperature=2.0)(filled(random_keys(6, 3)), keys)
    (recall.weights * recall.values["slot"]).sum().backward()
    assert bool((keys.grad.abs().sum(1) > 0).all())


@pytest.mark.parametrize("null_distance", [None, 1.0])
def test_gradients_of_weights_agree_with_finite_differences(null_distance):
    slots = random_keys(5, 3)
    retrieval = Retrieval(
        3, weights="softmax", temperature=1.5, null_distance=null_distance
    ).double()

    def weights(keys, slot_keys):
        memory = filled(slots, dtype=torch.float64)
        memory.keys = slot_keys
        # The leaf of the slot keys is made inside, so it is compared by hand below.
        return retrieval(memory, keys).weights

    keys = random_keys(2, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda k: weights(k, slots), (keys,))

    recall = retrieval(filled(slots, dtype=torch.float64), keys.detach(), learn_slot_keys=True)
    direction = random_keys(2, 3, seed=2)
    (recall.weights * direction).sum().backward()
    for j in range(5):
        for c in range(3):
            bumped = [slots.clone(), slots.clone()]
            bumped[0][j, c] += 1e-6
            bumped[1][j, c] -= 1e-6
            high, low = ((weights(keys, s) * direction).sum().item() for s in bumped)
            assert recall.slot_keys.grad[j, c].item() == pytest.approx(
                (high - low) / 2e-6, abs=1e-8
            )


def test_slot_keys_are_a_copy_that_learns_only_when_asked():
    memory = filled(random_keys(4, 3), capacity=6)
    keys = random_keys(1, 3, seed=1).float()
    assert Retrieval(2, weights="softmax")(memory, keys).slot_keys is None
    recall = Retrieval(2, weights="softmax")(memory, keys, learn_slot_keys=True)
    assert recall.slot_keys.is_leaf
    assert recall.slot_keys.shape == (4, 3)
    with torch.no_grad():
        recall.slot_keys.zero_()
    assert bool(memory.keys[:4].any())


def test_keys_of_another_precision_than_the_memory_get_values_of_their_own():
    recall = Retrieval(2)(filled(random_keys(4, 3)), random_keys(1, 3, seed=1))
    assert recall.weights.dtype == recall.values["slot"].dtype == torch.float64


# -- the random control ------------------------------------------------------------------------------


def test_the_random_index_is_a_function_of_seed_key_and_number_of_slots():
    slot_keys, keys = random_keys(20, 4), random_keys(3, 4, seed=1)
    first = RandomIndex(0).search(keys, slot_keys, m=5)
    elsewhere = RandomIndex(0).search(keys, slot_keys + 1.0, m=5)
    assert torch.equal(
        first.sort(1).values, elsewhere.sort(1).values
    )  # only their order is by distance
    assert torch.equal(first[1:2], RandomIndex(0).search(keys[1:2], slot_keys, m=5))
    assert not torch.equal(first, RandomIndex(1).search(keys, slot_keys, m=5))
    assert not torch.equal(first[0], first[1])


def test_the_random_index_draws_different_slots_all_equally_often():
    keys = random_keys(3000, 2)
    drawn = RandomIndex().search(keys, random_keys(6, 2, seed=1), m=2)
    assert bool((drawn[:, 0] != drawn[:, 1]).all())
    pairs = list(combinations(range(6), 2))
    counts = [int(((drawn.sort(1).values == torch.tensor(p)).all(1)).sum()) for p in pairs]
    # 15 pairs, 200 of each expected: chi-squared with 14 degrees of freedom, 99.9 % point.
    assert sum((count - 200) ** 2 / 200 for count in counts) < 36.1


def test_retrieval_with_the_random_index_recalls_what_it_drew():
    memory = aged()
    recall = Retrieval(2, index=RandomIndex(3))(memory, torch.tensor([[0.3]]))
    expected = RandomIndex(3).search(torch.tensor([[0.3]]), memory.keys[:3], m=2)
    assert torch.equal(recall.slots, expected)
    assert recall.distances[0].tolist() == pytest.approx(
        [abs(0.3 - s) for s in expected[0].tolist()], abs=1e-6
    )


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_key_that_is_not_finite_names_its_task(bad):
    keys = torch.zeros(3, 2)
    keys[2, 1] = bad
    with pytest.raises(DataError, match="task 2"):
        Retrieval(1)(EpisodicMemory(3, 2), keys)


def test_keys_of_another_dimension_are_refused():
    with pytest.raises(DataError, match=r"\[tasks, 2\], got \[1, 3\]"):
        Retrieval(1)(EpisodicMemory(3, 2), torch.zeros(1, 3))


@pytest.mark.parametrize(
    "options",
    [
        {"k": 0},
        {"k": -3},
        {"weights": "hard"},
        {"weights": "softmax", "temperature": 0.0},
        {"weights": "softmax", "temperature": math.nan},
        {"null_distance": 1.0},
        {"max_age": 0},
        {"min_fill": 0},
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options):
    # Where shapes and types are checked at run time, that check may speak first.
    with pytest.raises((ConfigError, TypeCheckError)):
        Retrieval(**options)


@pytest.mark.parametrize("weights", ["uniform", "softmax"])
def test_groups_recall_their_own_slots_first_and_foreign_ones_count_nothing(weights):
    keys = random_keys(6, 3, dtype=torch.float64)
    group = torch.tensor([0, 1, 0, 1, 1, 1])
    memory = EpisodicMemory(6, 3, key_dtype=torch.float64, value_dtype=torch.float64)
    memory.write(keys, {"slot": 1 + torch.arange(6).double()}, notes={"group": group})
    retrieval = Retrieval(3, weights=weights, temperature=1.0).double()
    tasks, own = random_keys(3, 3, seed=2), torch.tensor([0, 1, 7])
    recall = retrieval(memory, tasks, group=own)
    for b in range(3):
        members = [s for s in range(6) if group[s] == own[b]]
        near = sorted(members, key=lambda s: (squared_distance(tasks[b], keys[s]), s))[:3]
        count = len(near)
        assert recall.slots[b, :count].tolist() == near
        assert recall.values["slot"][b].tolist() == [s + 1 for s in near] + [0] * (3 - count)
        shares = [1 / max(count, 1)] * count
        if weights == "softmax" and near:
            shares = softmax_weights([squared_distance(tasks[b], keys[s]) for s in near], 1.0)
        assert recall.weights[b].tolist() == pytest.approx([*shares, *[0.0] * (3 - count)])
    # Without groups the memory is one.
    assert (retrieval(memory, tasks).weights > 0).all()
