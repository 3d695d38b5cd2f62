"""Weights of joined answers against a grid, and which visits they are for."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from torchemo.core.errors import ShapeError
from torchemo.core.rng import generator_for
from torchemo.memory.lifelong.mixture import Mixture


def answers(noise: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.arange(3).repeat(40).expand(6, -1)
    right = torch.nn.functional.one_hot(y, 3).double()
    out = right + noise * torch.randn(right.shape, generator=generator_for(seed)).double()
    return out, y


def test_weights_are_those_under_which_labels_are_most_likely() -> None:
    (good, y), (bad, _) = answers(0.5, 0), answers(2.0, 1)
    found = torch.tensor(Mixture.fitted([good, bad], torch.ones(6), y).weights[0])

    def loss(a: float, b: float) -> float:
        return float(cross_entropy((a * good + b * bad).flatten(0, 1), y.flatten()))

    best = loss(*found.tolist())
    steps = torch.linspace(0, 6, 41).tolist()
    assert best <= min(loss(a, b) for a in steps for b in steps) + 1e-6
    assert found[0] > 5 * found[1] > 0


def test_every_range_of_examples_has_weights_of_its_own() -> None:
    (good, y), (bad, _) = answers(0.3, 0), answers(3.0, 1)
    first = torch.tensor([True, False]).repeat(3)
    parts = [torch.where(first[:, None, None], *pair) for pair in ((good, bad), (bad, good))]
    examples = torch.where(first, 1.0, 5.0)
    mixture = Mixture.fitted(parts, examples, y)
    assert mixture.weights[0][0] > mixture.weights[0][1]
    assert mixture.weights[3][0] < mixture.weights[3][1]
    assert mixture.weights[1] == mixture.weights[2] == mixture.weights[0]
    assert mixture.weights[4] == mixture.weights[3]
    right = mixture(parts, examples).argmax(2) == y
    assert float(right.float().mean()) > 0.95


def test_what_does_not_fit_is_refused() -> None:
    good, y = answers(0.5, 0)
    with pytest.raises(ShapeError, match="there are 2 weights for 1 parts"):
        Mixture(((1.0, 1.0),) * 5)([good], torch.ones(6))
    with pytest.raises(ShapeError, match="validation visits are needed"):
        Mixture.fitted([good[:0]], torch.ones(0), y[:0])
