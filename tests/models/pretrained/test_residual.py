"""The adapter that adds to features: by hand, at the start, and refused where it has no place."""

import numpy as np
import pytest
import torch

from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.core.tree import expand
from torchemo.core.types import TaskShape
from torchemo.models import build_model
from torchemo.models.pretrained.residual import ResidualAdapter

X = np.random.default_rng(0).normal(size=(2, 7, 6)).astype(np.float32)


def drawn(seed=0):
    return ResidualAdapter(3, n_in=6, hidden=4).init(generator_for(seed, "init"))


def test_before_training_features_have_the_direction_of_the_networks_own():
    model = ResidualAdapter(3, n_in=6, hidden=4)
    z = model.features(expand(drawn(), 2), torch.tensor(X)).numpy()
    own = X / np.linalg.norm(X, axis=-1, keepdims=True)
    np.testing.assert_allclose(z / 4.0, own, rtol=1e-5, atol=1e-6)


def test_features_are_those_of_the_formula_written_in_numpy():
    model, params = ResidualAdapter(3, n_in=6, hidden=4), drawn()
    params["up.weight"] = torch.randn(6, 4, generator=generator_for(1, "up"))
    params["down.bias"] = torch.randn(4, generator=generator_for(1, "bias"))
    w1, b1, w2 = (params[n].numpy() for n in ("down.weight", "down.bias", "up.weight"))
    u = X / np.linalg.norm(X, axis=-1, keepdims=True)
    inside = np.maximum(np.sqrt(6) * u @ w1.T + b1, 0)
    expected = 4 * (u + inside @ w2.T / np.sqrt(6))
    found = model.features(expand(params, 2), torch.tensor(X))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_the_second_layer_is_reached_by_gradients_at_the_start():
    model = ResidualAdapter(3, n_in=6, hidden=4)
    params = {n: p.requires_grad_() for n, p in drawn().items()}
    z = model.features(expand(params, 2), torch.tensor(X))
    (gradient,) = torch.autograd.grad(z.square().sum(), params["up.weight"])
    assert gradient.abs().max() > 0


def test_it_is_chosen_by_an_option_and_has_one_hidden_layer():
    tasks = TaskShape("classification", (6,), 5)
    part = Part("efficientnet-lite0", {"adapter": "residual", "hidden": (4,)})
    assert build_model(part, tasks) == ResidualAdapter(5, n_in=6, hidden=4)
    with pytest.raises(ConfigError, match=r"one hidden layer, got model\.hidden \[4, 4\]"):
        build_model(part.set(hidden=(4, 4)), tasks)
