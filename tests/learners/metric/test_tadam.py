"""TADAM against a scaled ProtoNet, and its conditioning against FiLM written out."""

import pytest
import torch
import torch.nn.functional as F

from tests.learners.metric.problems import answers, begin, close, make_episode, make_params, randn
from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.core.tree import expand
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.learners.build import build_learner
from torchemo.learners.learner import scoped
from torchemo.models import Conv4, ResNet12
from torchemo.training.step import outer_step

WAY, SIDE = 3, 16
SHAPE = TaskShape("classification", (1, SIDE, SIDE), WAY)
MULTIPLIERS = [f"head/norm{i}.{part}" for i in (1, 2, 3, 4) for part in ("gain", "offset")]


def built(name="tadam", bn="transductive", **options):
    model = Conv4(WAY, in_channels=1, image_size=SIDE, filters=3, activation="softplus", bn=bn)
    return build_learner(Part(name, options), model, SHAPE)


def tasks():
    return make_episode(x=(1, SIDE, SIDE), queries=1)


def without_multipliers(params):
    return params | {n: torch.zeros_like(params[n]) for n in MULTIPLIERS}


def test_with_multipliers_of_zero_it_is_protonet_with_a_scale_of_distances():
    learner, episode = built(), tasks()
    params = without_multipliers(make_params(learner))
    found = answers(learner, params, episode)
    body = expand({n: p for n, p in params.items() if "/" not in n}, 2)
    z, q = (learner.model.features(body, b.x) for b in (episode.support, episode.query))
    for b in range(2):
        y = episode.support.y[b]
        means = torch.stack([z[b][y == k].mean(0) for k in range(WAY)])
        close(found[b], -7.5 * torch.cdist(q[b], means), rtol=1e-8, atol=1e-9)
    plain = built(distance="cosine", scale=2.0)
    cosines = answers(plain, params, episode)
    unit = F.normalize(z, dim=-1)
    means = torch.stack(
        [
            torch.stack([unit[b][episode.support.y[b] == k].mean(0) for k in range(WAY)])
            for b in range(2)
        ]
    )
    expected = 4 * F.cosine_similarity(q[:, :, None], means[:, None], dim=-1) - 4
    close(cosines, expected, rtol=1e-9, atol=1e-11)


def test_multipliers_of_zero_learn_and_their_networks_do_not_yet():
    learner = built()
    params = without_multipliers(make_params(learner))
    found = outer_step(learner, params, tasks()).gradients
    small = [n for n in found if n.startswith("head/") and n not in MULTIPLIERS]
    assert len(small) == 4 * 2 * 6
    assert all(found[n].abs().max() == 0 for n in small)
    assert all(found[n].abs().max() > 0 for n in MULTIPLIERS)


def filmed(learner, params, x, code):
    """The conditioned network by torch: convolution, normalisation, FiLM, pooling, activation."""
    for i in (1, 2, 3, 4):
        own = {n: p for n, p in params.items() if n.startswith((f"conv{i}", f"norm{i}"))}
        x = F.conv2d(x, own[f"conv{i}.weight"], own[f"conv{i}.bias"], padding=1)
        x = F.batch_norm(
            x, None, None, own[f"norm{i}.scale"], own[f"norm{i}.shift"], True, eps=learner.model.eps
        )
        gain, offset = (mapped(params, code, f"head/norm{i}.{part}") for part in ("gain", "offset"))
        x = (1 + gain)[:, None, None] * x + offset[:, None, None]
        x = F.softplus(F.max_pool2d(x, 2))
    return x.flatten(1)


def mapped(params, code, name):
    def linear(v, k):
        return params[f"{name}{k}.weight"] @ v + params[f"{name}{k}.bias"]

    one = linear(code, 1)
    one = one * one.sigmoid()
    two = linear(one, 2)
    return params[name] * (one + linear(two * two.sigmoid(), 3))


def test_a_task_conditions_its_layers_by_its_own_support_set():
    learner, episode = built(), tasks()
    params = make_params(learner)
    start = begin(learner, params, episode.support)
    fitted = learner.fit(start, episode.support)
    found = learner.predict(fitted, episode.query.x).detach()
    for b in range(2):
        x, y = episode.support.x[b], episode.support.y[b]
        body = {n: p[None] for n, p in params.items() if "/" not in n}
        plain = learner.model.features(body, x[None])[0]
        code = torch.stack([plain[y == k].mean(0) for k in range(WAY)]).mean(0)
        z = filmed(learner, params, x, code)
        q = filmed(learner, params, episode.query.x[b], code)
        means = torch.stack([z[y == k].mean(0) for k in range(WAY)])
        close(found[b], -7.5 * torch.cdist(q, means), rtol=1e-7, atol=1e-9)
    other = Batch(episode.support.x.clone(), episode.support.y)
    other.x[1] += randn(1, SIDE, SIDE, seed=9)
    moved = answers(learner, params, Episode(other, episode.query))
    assert torch.equal(moved[0], found[0])
    assert not torch.allclose(moved[1], found[1])


def test_the_loss_is_that_of_the_answers_and_half_the_squared_multipliers():
    learner, episode = built(penalty=0.5), tasks()
    params = make_params(learner)
    fitted = learner.fit(begin(learner, params, episode.support), episode.support)
    losses = learner.loss(fitted, episode.query).detach()
    out = answers(learner, params, episode)
    squares = sum(float(params[n].square().sum()) for n in MULTIPLIERS)
    for b in range(2):
        expected = F.cross_entropy(out[b], episode.query.y[b]) + 0.25 * squares
        assert float(losses[b]) == pytest.approx(float(expected))


def test_running_statistics_see_both_passes_over_the_support_set():
    learner = built(bn="running")
    params, episode = make_params(learner), tasks()
    fitted = learner.fit(begin(learner, params, episode.support), episode.support)
    assert len(fitted.statistics) == 2
    learner.loss(fitted, episode.query)
    assert len(fitted.statistics) == 3
    stored = answers(learner, params, episode, graph=False)
    assert stored.isfinite().all()


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_the_scale_decides_which_queries_teach(scale):
    """Small scales weigh all classes alike; of large ones, only wrong answers teach."""
    learner = build_learner(
        Part("tadam", {"scale": scale, "penalty": 0.0}),
        Conv4(WAY, in_channels=1, image_size=SIDE, filters=3),
        SHAPE,
    )
    head = learner.head
    means, q = randn(1, WAY, 4), randn(1, 5, 4, seed=1).requires_grad_()
    y = torch.tensor([[0, 1, 2, 0, 1]])
    params = {n: p.double()[None] for n, p in head.init(torch.Generator()).items()}
    loss = head.losses(params, {"means": means}, q, y).sum() * 5 / scale
    (slope,) = torch.autograd.grad(loss, q)
    distance = (q.detach()[0, :, None] - means[0]).norm(dim=-1)
    away = (q.detach()[0, :, None] - means[0]) / distance[..., None]
    own = away[torch.arange(5), y[0]]
    if scale < 1:
        expected = own - away.mean(1)
    else:
        nearest = distance.argmin(1)
        expected = own - away[torch.arange(5), nearest]
        assert (nearest == y[0]).any()
        assert (nearest != y[0]).any()
    torch.testing.assert_close(slope[0], expected, rtol=1e-3, atol=1e-3)


def test_layers_of_shortcuts_are_left_alone():
    model = ResNet12(WAY, in_channels=1, image_size=SIDE, channels=(3, 3, 4, 4))
    learner = build_learner(Part("tadam"), model, SHAPE)
    names = [layer for layer, _ in learner.head.layers]
    assert names == [f"block{i}.norm{j}" for i in (1, 2, 3, 4) for j in (1, 2, 3)]
    own = scoped(learner.init(torch.Generator()), "head/")
    assert own["block3.norm2.gain1.weight"].shape == (4, 4)


def test_a_network_without_scales_is_refused():
    model = Conv4(WAY, in_channels=1, image_size=SIDE, filters=3, affine="shift")
    with pytest.raises(ConfigError, match="has no scales"):
        build_learner(Part("tadam"), model, SHAPE)


def test_one_pass_for_all_tasks_is_refused():
    with pytest.raises(ConfigError, match="network of its own for every task"):
        built(bn_over="batch")
