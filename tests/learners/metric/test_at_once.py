"""A step in which all tasks share one pass of the network (``bn_over = batch``)."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.learners.metric.problems import (
    CASES,
    N_BASE,
    close,
    make_base,
    make_episode,
    make_learner,
    make_params,
    randn,
)
from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.learners import LEARNERS
from torchemo.learners.build import build_learner
from torchemo.models import Conv4, ResNet12
from torchemo.training.step import outer_step

IMAGE = (1, 16, 16)
every_case = pytest.mark.parametrize("case", CASES)


def conv4(bn):
    return Conv4(3, in_channels=1, image_size=16, filters=6, groups=2, bn=bn)


def both(case, model):
    """The same learner with tasks one by one, and with all of them at once."""
    learner = make_learner(case, model, x=IMAGE)
    if learner.head.conditions:
        pytest.skip("has a network of its own for each task")
    return learner, replace(learner, head=replace(learner.head, bn_over="batch"))


@every_case
@pytest.mark.parametrize("bn", ["layer", "none"])
def test_without_shared_statistics_a_step_is_that_of_tasks_one_by_one(case, bn):
    apart, together = both(case, conv4(bn))
    if apart.own_buffers:
        pytest.skip("normalises what it compares, too")
    params, episode = make_params(apart), make_episode(tasks=3, x=IMAGE)
    episode = replace(episode, base=make_base(apart, tasks=3, x=IMAGE))
    wanted, found = (outer_step(one, params, episode) for one in (apart, together))
    close(found.losses, wanted.losses, rtol=1e-9)
    assert found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        close(found.gradients[name], gradient, rtol=1e-8, atol=1e-11)
    assert found.rows == {}
    assert found.buffers == {}


def test_statistics_are_those_of_all_images_of_the_step():
    """Against a network of torch's own layers on all images as one batch."""
    _, learner = both("protonet", conv4("running"))
    params, episode = make_params(learner), make_episode(tasks=2, x=IMAGE)
    layers = []
    for i in range(1, 5):
        conv = nn.Conv2d(1 if i == 1 else 6, 6, 3, padding=1, dtype=torch.float64)
        norm = nn.BatchNorm2d(6, eps=1e-3, dtype=torch.float64)
        conv.weight.data, conv.bias.data = params[f"conv{i}.weight"], params[f"conv{i}.bias"]
        norm.weight.data, norm.bias.data = params[f"norm{i}.scale"], params[f"norm{i}.shift"]
        layers += [conv, norm, nn.ReLU(), nn.MaxPool2d(2)]
    net = nn.Sequential(*layers, nn.Flatten())
    (x, y), (asked, target) = episode.support, episode.query
    z = net(torch.cat([x, asked], 1).flatten(0, 1)).view(2, -1, 6)
    losses = []
    for b in range(2):
        means = torch.stack([z[b, : y.shape[1]][y[b] == c].mean(0) for c in range(3)])
        apart = (z[b, y.shape[1] :, None] - means).square().sum(-1)
        losses.append(nn.functional.cross_entropy(-apart, target[b]))
    torch.stack(losses).mean().backward()
    found = outer_step(learner, params, episode)
    close(found.losses, torch.stack(losses).detach(), rtol=1e-9)
    for i in range(1, 5):
        conv, norm = net[4 * i - 4], net[4 * i - 3]
        close(found.gradients[f"conv{i}.weight"], conv.weight.grad, rtol=1e-8, atol=1e-11)
        close(found.gradients[f"norm{i}.scale"], norm.weight.grad, rtol=1e-8, atol=1e-11)
        close(found.buffers[f"norm{i}.mean"], norm.running_mean, rtol=1e-9)
        close(found.buffers[f"norm{i}.var"], norm.running_var, rtol=1e-9)


def test_a_task_beside_others_is_normalised_with_them():
    apart, together = both("protonet", conv4("running"))
    params, episode = make_params(apart), make_episode(tasks=2, x=IMAGE)
    alone = Episode(*(Batch(b.x[:1], b.y[:1]) for b in (episode.support, episode.query)))
    for learner, same in ((apart, True), (together, False)):
        losses = [outer_step(learner, params, e).losses[0] for e in (episode, alone)]
        assert torch.allclose(*losses) == same


def test_the_layout_in_memory_changes_no_feature():
    for network in (
        conv4("layer"),
        ResNet12(3, in_channels=1, image_size=16, channels=(2, 3, 4, 5)),
    ):
        params = network.init(torch.Generator().manual_seed(0))
        one = {n: p.double().unsqueeze(0) for n, p in params.items()}
        x = randn(1, 7, *IMAGE)
        close(network.in_one_pass().features(one, x), network.features(one, x), rtol=1e-9)


def test_it_is_an_option_of_every_head():
    shape = TaskShape("classification", IMAGE, 3, base_classes=N_BASE)
    for name in {part.name for part in CASES.values()}:
        kind, options = LEARNERS.resolve(Part(name, {"bn_over": "batch"}))
        if name == "tadam":
            with pytest.raises(ConfigError, match="a network of its own"):
                kind.build(options, conv4("running"), shape)
            continue
        assert kind.build(options, conv4("running"), shape).runs_at_once
    with pytest.raises(ConfigError, match="bn_over"):
        build_learner(Part("protonet", {"bn_over": "step"}), conv4("running"), shape)
