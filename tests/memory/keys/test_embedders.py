"""Embedders: a vector for every support example, and whose weights a key may train."""

import pytest
import torch
import torch.nn.functional as F

from tests.memory.keys.cases import (
    DIM,
    EMBEDDERS,
    LEARNER,
    SIZE,
    data_for,
    embedder,
    images,
    theta,
    transformer,
)
from torchemo.core.errors import ConfigError, ShapeError
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch, TaskShape
from torchemo.memory.keys.embedders import OwnConv, PairEmbedder, build_embedder
from torchemo.models.conv4 import Conv4

IMAGES = TaskShape("classification", (3, SIZE, SIZE), 3)
POINTS = TaskShape("regression", (2,), 1)


@pytest.mark.parametrize("name", EMBEDDERS)
def test_every_embedder_can_be_named(name):
    tasks = POINTS if name == "pairs" else IMAGES
    made = build_embedder(name, LEARNER, tasks, dim=DIM, generator=generator_for(0))
    assert type(made) is type(embedder(name))
    assert made.dim == DIM


@pytest.mark.parametrize(
    ("name", "tasks", "words"),
    [
        ("pairs", IMAGES, "is for regression"),
        ("own", POINTS, "needs images"),
        ("frozen_random", POINTS, "needs images"),
    ],
)
def test_an_embedder_for_other_tasks_is_refused(name, tasks, words):
    with pytest.raises(ConfigError, match=words):
        build_embedder(name, LEARNER, tasks, dim=DIM, generator=generator_for(0))


def gradients(encoder, support, params=None):
    encoder(support, params)[:, 0].sum().backward()
    return {name: p.grad for name, p in encoder.named_parameters()}


@pytest.mark.parametrize("name", ["own", "pairs"])
def test_gradient_reaches_every_weight_of_a_trained_key_network(name):
    found = gradients(transformer(name), data_for(name))
    # The key bias of attention and a conv bias before normalisation cannot change the output.
    assert all(g is not None for g in found.values())
    assert found["cls"].abs().max() > 0
    assert all(
        g.abs().max() > 0 for n, g in found.items() if n.startswith("embedder") and g.ndim > 1
    )


def test_the_shared_trunk_passes_no_gradient_into_theta():
    params = {name: p.requires_grad_() for name, p in theta().items()}
    found = gradients(transformer("shared"), images(), params)
    assert all(p.grad is None for p in params.values())
    assert found["embedder.linear.weight"].abs().max() > 0


def test_the_shared_trunk_is_a_linear_map_of_the_learners_features():
    shared, support, params = embedder("shared").double(), images(), theta()
    for b in range(3):
        one = {name: p[None] for name, p in params.items()}
        features = LEARNER.features(one, support.x[b : b + 1])[0]
        expected = features @ shared.linear.weight.T + shared.linear.bias
        torch.testing.assert_close(shared(support, params)[b], expected)


def test_the_shared_trunk_follows_theta_and_does_not_need_the_head():
    shared, support = embedder("shared").double(), images()
    assert not torch.equal(shared(support, theta(0)), shared(support, theta(1)))
    body = {name: p for name, p in theta().items() if name not in LEARNER.head}
    assert torch.equal(shared(support, body), shared(support, theta()))


def test_the_shared_trunk_asks_for_the_learners_parameters():
    shared = embedder("shared").double()
    with pytest.raises(ConfigError, match="got no parameters"):
        shared(images())
    with pytest.raises(ShapeError, match="trunk of the learner"):
        shared(images(), {name: p[None].expand(3, *p.shape) for name, p in theta().items()})


def test_a_frozen_random_embedder_is_an_own_one_that_cannot_be_trained():
    frozen = embedder("frozen_random")
    assert not [n for n, p in frozen.named_parameters() if p.requires_grad]
    support = Batch(images().x.float(), images().y)
    assert torch.equal(frozen(support), embedder("own")(support).detach())


def test_the_own_network_is_conv4_then_a_global_mean_then_a_linear_layer():
    own, x = embedder("own").double(), images().x
    weights = dict(zip(own.names, own.weights, strict=True))
    body = {name: p[None] for name, p in weights.items() if name not in own.network.head}
    flat = Conv4(n_way=DIM, in_channels=3, image_size=32, filters=4)
    big = F.interpolate(x.flatten(0, 1), 32).view(3, -1, 3, 32, 32)
    wide = OwnConv(3, 32, generator=generator_for(0), filters=4, dim=DIM).double()
    wide.load_state_dict(own.state_dict())
    maps = flat.features(body, big[:1]).view(big.shape[1], 4, 2, 2)
    weight, bias = (weights[name] for name in own.network.head)
    expected = maps.mean((2, 3)) @ weight.T + bias
    torch.testing.assert_close(wide(Batch(big[:1], torch.zeros(1, big.shape[1])))[0], expected)


def test_pairs_are_embedded_by_one_linear_map_whatever_the_shape_of_x():
    g = generator_for(3)
    x, y = torch.randn(2, 5, 2, 3, generator=g), torch.randn(2, 5, generator=g)
    pair = PairEmbedder(6, 1, generator=g, dim=DIM)
    for b in range(2):
        for i in range(5):
            z = torch.cat([x[b, i].flatten(), y[b, i].view(1)])
            expected = pair.linear.weight @ z + pair.linear.bias
            torch.testing.assert_close(pair(Batch(x, y))[b, i], expected)
    with pytest.raises(ShapeError, match="6 inputs and 1 targets, got 4 and 1"):
        pair(Batch(x[:, :, :, :2], y))
