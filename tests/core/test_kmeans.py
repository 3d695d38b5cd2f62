"""k-means against all partitions of a few points, and what its result may depend on."""

from itertools import product

import numpy as np
import pytest
import torch

from torchemo.core.kmeans import centres
from torchemo.core.rng import generator_for


def points(n, dim=2, seed=0, *, dtype=torch.float64):
    return torch.randn(n, dim, generator=generator_for(seed, "points"), dtype=dtype)


def inertia(vectors, found):
    """Sum of squared distances to the nearest centre, by loops."""
    return sum(
        min(float(((v - c) ** 2).sum()) for c in found.numpy()) for v in vectors.double().numpy()
    )


def least_inertia(vectors, count):
    """The same of the best of all partitions into ``count`` sets that are not empty."""
    rows, best = vectors.double().numpy(), float("inf")
    for labels in product(range(count), repeat=len(rows)):
        if len(set(labels)) < count:
            continue
        sets = [rows[[label == c for label in labels]] for c in range(count)]
        best = min(best, sum(((s - s.mean(0)) ** 2).sum() for s in sets))
    return best


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("count", "dim"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_centres_of_a_few_points_are_the_best_of_all_partitions(count, dim, seed):
    vectors = points(8, dim, seed)
    found = centres(vectors, count, seed=seed, name="test", restarts=100)
    assert found.shape == (count, dim)
    assert inertia(vectors, found) == pytest.approx(least_inertia(vectors, count), rel=1e-9)


def test_every_centre_is_the_mean_of_the_points_nearest_to_it():
    vectors = points(60, 3) + 8 * torch.eye(3, dtype=torch.float64).repeat(20, 1)
    found = centres(vectors, 3, seed=0, name="test")
    nearest = torch.cdist(vectors, found).argmin(1)
    assert nearest.bincount().tolist() == [20, 20, 20]
    for c in range(3):
        assert torch.allclose(found[c], vectors[nearest == c].mean(0), rtol=0, atol=1e-12)


def test_the_best_of_all_restarts_counts():
    vectors, gains = points(40, 4), []
    for seed in range(4):
        made = [centres(vectors, 8, seed=seed, name="test", restarts=n) for n in range(1, 9)]
        spread = [inertia(vectors, found) for found in made]
        assert spread == sorted(spread, reverse=True)
        gains.append(spread[0] - spread[-1])
    assert max(gains) > 1


def test_centres_depend_on_vectors_seed_and_name_alone():
    vectors = points(30, 3)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    first = centres(vectors, 7, seed=1, name="a", restarts=1)
    torch.rand(3)
    assert torch.equal(centres(vectors, 7, seed=1, name="a", restarts=1), first)
    assert not torch.equal(centres(vectors, 7, seed=2, name="a", restarts=1), first)
    assert not torch.equal(centres(vectors, 7, seed=1, name="b", restarts=1), first)
    torch.random.set_rng_state(before[0])
    centres(vectors, 7, seed=1, name="a")
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


@pytest.mark.parametrize("count", [3, 4, 7])
def test_fewer_distinct_vectors_than_centres_are_repeated_in_turn(count):
    distinct = torch.tensor([[0.0, 1.0], [0.5, 0.0], [2.0, 2.0]])
    found = centres(distinct[[2, 0, 1, 1, 0, 2]], count, seed=0, name="test")
    if count == 3:  # as many as there are: each is its own centre
        found = found[found[:, 0].argsort()]
    assert torch.equal(found, distinct[torch.arange(count) % 3].double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_centres_are_double_and_detached(dtype):
    vectors = points(10, dtype=dtype).requires_grad_()
    found = centres(vectors, 2, seed=0, name="test")
    assert found.dtype == torch.float64
    assert not found.requires_grad
    assert torch.equal(found, centres(vectors.detach().double(), 2, seed=0, name="test"))
