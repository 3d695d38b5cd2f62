"""RelationNet against its definition: pairs side by side, one kernel, one query at a time."""

import pytest
import torch
import torch.nn.functional as F

from tests.learners.metric.problems import (
    begin,
    close,
    labels_of,
    make_episode,
    make_learner,
    make_params,
    randn,
)
from torchemo.config.registry import Part
from torchemo.core.tree import expand
from torchemo.core.types import TaskShape
from torchemo.learners import LEARNERS
from torchemo.learners.learner import learned
from torchemo.learners.metric.relationnet import RelationNet
from torchemo.models import Conv4
from torchemo.training.step import outer_step

WAY, MAP = 3, (2, 4, 4)
HEAD = RelationNet(filters=3, units=4, map=MAP)


def drawn(head, tasks=2):
    params = head.init(torch.Generator().manual_seed(0))
    params = {n: t.double() + 0.1 * randn(*t.shape, seed=5) for n, t in params.items()}
    return expand(params, tasks)


def kernel(params):
    """The first kernel in one piece."""
    return torch.cat([params["class.weight"], params["query.weight"]], dim=1)


def normalised(params, x, layer, mean, var):
    unit = (x - mean[:, None, None]) / (var[:, None, None] + 1e-5).sqrt()
    scale, shift = (params[f"{layer}.{name}"][:, None, None] for name in ("scale", "shift"))
    return (unit * scale + shift).clamp(min=0)


def score(params, class_map, query_map, side):
    """Compare one query with one class, by running averages."""
    x = torch.cat([class_map, query_map])[None]
    for weight, layer in ((kernel(params), "norm1"), (params["conv.weight"], "norm2")):
        x = F.conv2d(x, weight, padding=1)
        x = normalised(params, x, layer, params[f"{layer}.mean"], params[f"{layer}.var"])
        x = F.max_pool2d(x, 2) if side > 1 else x
        side //= 2
    x = (params["hidden.weight"] @ x.flatten() + params["hidden.bias"]).clamp(min=0)
    return params["score.weight"] @ x + params["score.bias"]


@pytest.mark.parametrize("side", [1, 2, 4, 5])
@pytest.mark.parametrize("pool", ["sum", "mean"])
def test_scores_are_those_of_pairs_one_by_one(side, pool):
    head = RelationNet(filters=3, units=4, pool=pool, map=(2, side, side))
    params, size = drawn(head), 2 * side * side
    z, q, y = randn(2, 6, size), randn(2, 2, size, seed=1), labels_of(2, (2, 1, 3), seed=0)
    found = head.logits(params, head.fit(params, z, y, n_way=WAY), q)
    for b in range(2):
        own = {name: t[b] for name, t in params.items()}
        for k in range(WAY):
            of_class = z[b][y[b] == k]
            joined = of_class.sum(0) if pool == "sum" else of_class.mean(0)
            for i in range(2):
                pair = [t.view(2, side, side) for t in (joined, q[b, i])]
                close(found[b, i, k], score(own, *pair, side)[0], rtol=1e-9, atol=1e-11)


def test_in_training_all_pairs_of_a_task_are_normalised_together():
    params, z, q = drawn(HEAD), randn(2, 3, 32), randn(2, 5, 32, seed=1)
    y, sink = torch.tensor([[2, 0, 1], [0, 1, 2]]), {}
    target = torch.tensor([[0, 2, 1, 1, 0], [2, 2, 0, 1, 1]])
    head = HEAD.noting(sink)
    losses = head.losses(params, head.fit(params, z, y, n_way=WAY), q, target)
    for b in range(2):
        own = {name: t[b] for name, t in params.items()}
        of_class = [z[b][y[b] == k][0] for k in range(WAY)]
        pairs = [torch.cat([p.view(MAP), x.view(MAP)]) for x in q[b] for p in of_class]
        x = torch.stack(pairs)
        for weight, layer in ((kernel(own), "norm1"), (own["conv.weight"], "norm2")):
            x = F.conv2d(x, weight, padding=1)
            every = x.transpose(0, 1).flatten(1)
            close(sink[f"{layer}.mean"][b], every.mean(1))
            close(sink[f"{layer}.var"][b], every.var(1))
            x = normalised(own, x, layer, every.mean(1), every.var(1, unbiased=False))
            x = F.max_pool2d(x, 2)
        hidden = (x.flatten(1) @ own["hidden.weight"].T + own["hidden.bias"]).clamp(min=0)
        r = (hidden @ own["score.weight"].T + own["score.bias"]).sigmoid().view(5, WAY)
        close(losses[b], (r - F.one_hot(target[b], WAY)).square().mean(), rtol=1e-9)


def test_over_a_batch_pairs_of_all_tasks_are_normalised_together():
    """A batch of two tasks that are the same is as one of them; of others it is not."""
    one, q, y = randn(1, 3, 32), randn(1, 4, 32, seed=1), torch.arange(3)[None]
    params, target = drawn(HEAD), torch.tensor([[0, 1, 2, 0]])
    params = {name: t[:1].expand(2, *t.shape[1:]) for name, t in params.items()}
    found = []
    for other in (one, randn(1, 3, 32, seed=5)):
        sink, z = {}, torch.cat([one, other])
        noting, both = HEAD.noting(sink, over="batch"), (q.repeat(2, 1, 1), target.repeat(2, 1))
        classifier = noting.fit(params, z, y.repeat(2, 1), n_way=WAY)
        found.append((noting.losses(params, classifier, *both), sink))
    alone, sink = {n: t[:1] for n, t in params.items()}, {}
    noting = HEAD.noting(sink)
    loss = noting.losses(alone, noting.fit(alone, one, y, n_way=WAY), q, target)
    close(found[0][0], loss.expand(2), rtol=1e-9)
    close(found[0][1]["norm2.mean"], sink["norm2.mean"], rtol=1e-9)
    assert not torch.allclose(found[1][0][0], loss[0])


def test_an_answer_does_not_depend_on_other_queries():
    learner = make_learner("relationnet")
    episode, params = make_episode(), make_params(learner)
    fitted = learner.fit(begin(learner, params, episode.support), episode.support)
    whole = learner.predict(fitted, episode.query.x)
    close(learner.predict(fitted, episode.query.x[:, 2:3]), whole[:, 2:3])
    assert 1 not in fitted.statistics
    learner.loss(fitted, episode.query)
    assert set(fitted.statistics[1]) == {f"head/{name}" for name in learner.head.buffers}


def test_statistics_of_pairs_move_with_the_step_and_take_no_gradient():
    learner = make_learner("relationnet")
    episode, params = make_episode(), make_params(learner)
    found = outer_step(learner, params, episode)
    mine = {f"head/{name}" for name in learner.head.buffers}
    assert set(found.buffers) == mine
    assert not mine & set(found.gradients)
    assert not mine & set(learned(learner, params))
    assert all(not torch.equal(found.buffers[name], params[name]) for name in mine)


def test_the_loss_is_the_squared_error_of_the_scores():
    params, q = drawn(HEAD), randn(2, 5, 32, seed=1)
    y, z = labels_of(2, (2, 2, 2), seed=0), randn(2, 6, 32)
    target = torch.tensor([[0, 2, 1, 1, 0], [2, 2, 0, 1, 1]])
    classifier = HEAD.fit(params, z, y, n_way=WAY)
    r = HEAD.logits(params, classifier, q).sigmoid()
    for b, loss in enumerate(HEAD.losses(params, classifier, q, target)):
        each = [
            (float(r[b, i, k]) - (k == int(target[b, i]))) ** 2 for i in range(5) for k in range(3)
        ]
        assert float(loss) == pytest.approx(sum(each) / 15)


def test_a_constant_score_has_the_loss_of_its_closed_form():
    params = drawn(HEAD)
    params["score.weight"] = torch.zeros_like(params["score.weight"])
    t = params["score.bias"][:, 0]
    classifier = HEAD.fit(params, randn(2, 3, 32), torch.arange(3).expand(2, -1), n_way=WAY)
    losses = HEAD.losses(params, classifier, randn(2, 4, 32, seed=1), torch.zeros(2, 4).long())
    s = t.sigmoid()
    close(losses, s.square() * (1 - 1 / WAY) + (1 - s).square() / WAY)


@pytest.mark.parametrize(("pool", "same"), [("mean", True), ("sum", False)])
def test_repeated_examples_change_a_sum_and_not_a_mean(pool, same):
    head = RelationNet(filters=3, units=4, pool=pool, map=MAP)
    params, z, q = drawn(head), randn(2, 3, 32), randn(2, 4, 32, seed=1)
    y = torch.arange(3).expand(2, -1)
    once = head.logits(params, head.fit(params, z, y, n_way=WAY), q)
    twice = head.fit(params, z.repeat(1, 2, 1), y.repeat(1, 2), n_way=WAY)
    assert torch.allclose(head.logits(params, twice, q), once) == same


def test_it_takes_the_maps_of_a_network_of_images():
    kind, options = LEARNERS.resolve(Part("relationnet"))
    model = Conv4(WAY, in_channels=1, image_size=32, filters=6)
    learner = kind.build(options, model, TaskShape("classification", (1, 32, 32), WAY))
    assert learner.head.map == (6, 2, 2)
