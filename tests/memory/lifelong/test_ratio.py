"""Likelihood ratios against normal distributions written out in full."""

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from torchemo.core.errors import DataError
from torchemo.memory.lifelong.ratio import SameClass

B = torch.tensor([0.4, 2.0], dtype=torch.float64)
MODEL = SameClass(torch.zeros(2).double(), torch.eye(2).double(), B, unit=False)


def joint(x: np.ndarray, y: np.ndarray, *, same: bool) -> float:
    """Log density of all examples of two sets: one shared class mean, or one each."""
    total = 0.0
    n, m = len(x), len(y)
    for i, b in enumerate(B.tolist()):
        shared = np.ones((n + m, n + m))
        if not same:
            shared[:n, n:] = shared[n:, :n] = 0
        cov = np.eye(n + m) + b * shared
        total += multivariate_normal(np.zeros(n + m), cov).logpdf(
            np.concatenate([x[:, i], y[:, i]])
        )
    return total


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 5)])
def test_the_ratio_is_that_of_the_joint_densities(n, m):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, n, 2)), rng.normal(size=(4, m, 2))
    found = MODEL.ratios(
        torch.tensor(x.mean(1)), torch.full((3,), n), torch.tensor(y.mean(1)), torch.full((4,), m)
    )
    for i in range(3):
        for j in range(4):
            wanted = joint(x[i], y[j], same=True) - joint(x[i], y[j], same=False)
            assert float(found[i, j]) == pytest.approx(wanted, rel=1e-9)


def test_classes_of_different_size_have_the_ratios_of_each_alone():
    g = torch.Generator().manual_seed(0)
    own, known = (torch.randn(k, 2, generator=g).double() for k in (2, 3))
    shots, examples = torch.tensor([1, 4]), torch.tensor([1, 2, 7])
    whole = MODEL.ratios(own, shots, known, examples)
    for i in range(2):
        alone = MODEL.ratios(own[i : i + 1], shots[i : i + 1], known, examples)
        torch.testing.assert_close(whole[i : i + 1], alone)


def test_learning_recovers_the_distributions():
    g = torch.Generator().manual_seed(0)
    within, between = torch.tensor([1.0, 0.5, 2.0]), torch.tensor([3.0, 0.25, 0.0])
    centres = between.sqrt() * torch.randn(3000, 3, generator=g)
    y = torch.arange(3000).repeat_interleave(8)
    x = centres[y] + within.sqrt() * torch.randn(len(y), 3, generator=g)
    model = SameClass.learned(x, y, shrunk=0.0, unit=False)
    assert sorted(model.spread.tolist()) == pytest.approx([0.5, 3.0], rel=0.1)
    inside = model(x) - model(centres[y])
    torch.testing.assert_close(inside.T @ inside / len(x), torch.eye(2), rtol=0.05, atol=0.05)


def test_one_class_tells_nothing_apart():
    with pytest.raises(DataError, match="two classes with two examples"):
        SameClass.learned(torch.rand(4, 2), torch.zeros(4, dtype=torch.int64))
