"""ProtoNet against its definition and closed forms."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

from tests.learners.metric.problems import (
    MODEL,
    answers,
    begin,
    close,
    labels_of,
    make_episode,
    make_learner,
    make_params,
    randn,
    rows,
)
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.proto_maml import ProtoMAML
from torchemo.learners.metric.protonet import ProtoNet

HEAD = ProtoNet()


def logits(z, y, q, n_way=3):
    return HEAD.logits({}, HEAD.fit({}, z, y, n_way=n_way), q)


def test_logits_are_minus_squared_distances_up_to_one_number_per_query():
    z, q, y = randn(2, 6, 4), randn(2, 5, 4, seed=1), labels_of(2, (2, 1, 3), seed=0)
    found = logits(z, y, q)
    for b in range(2):
        for i in range(5):
            far = []
            for c in range(3):
                mean = sum(z[b, j] for j in range(6) if y[b, j] == c) / int((y[b] == c).sum())
                far.append(-sum((q[b, i, d] - mean[d]) ** 2 for d in range(4)))
            expected = torch.stack(far)
            close(found[b, i] - found[b, i, 0], expected - expected[0])


def embed(params, x):
    return torch.tanh(x @ params["layer1.weight"].T + params["layer1.bias"])


def plain_loss(params, support, query):
    """The loss of one task by distances, without a task axis."""
    z, q = embed(params, support.x), embed(params, query.x)
    means = torch.stack([z[support.y == c].mean(0) for c in range(3)])
    return F.cross_entropy(-torch.cdist(q, means).square(), query.y)


def test_gradients_are_those_of_the_plain_loss():
    learner = make_learner("protonet")
    params, episode = make_params(learner), make_episode()
    losses, found = rows(learner, begin(learner, params, episode.support), episode)
    for b in range(2):
        support, query = (type(s)(s.x[b], s.y[b]) for s in (episode.support, episode.query))
        close(losses[b], plain_loss(params, support, query))
        for name, expected in grad(plain_loss)(params, support, query).items():
            close(found[name][b], expected)


def test_with_one_example_per_class_the_nearest_example_wins():
    z, q, y = randn(3, 4, 5), randn(3, 50, 5, seed=1), labels_of(3, (1, 1, 1, 1), seed=0)
    nearest = torch.cdist(q, z).argmin(-1)
    assert torch.equal(logits(z, y, q, n_way=4).argmax(-1), y.gather(1, nearest))


def test_moving_and_rotating_features_changes_nothing_and_scaling_multiplies_by_the_square():
    z, q, y = randn(2, 6, 4), randn(2, 5, 4, seed=1), labels_of(2, (2, 1, 3), seed=0)
    before = logits(z, y, q).log_softmax(-1)
    turn = torch.linalg.qr(randn(4, 4, seed=2)).Q
    close(logits(z @ turn, y, q @ turn).log_softmax(-1), before)
    move = randn(4, seed=3)
    close(logits(z + move, y, q + move).log_softmax(-1), before)
    close(logits(3 * z, y, 3 * q), 9 * logits(z, y, q))


def test_two_classes_are_divided_by_the_bisecting_hyperplane():
    z, y = randn(1, 4, 3), labels_of(1, (2, 2), seed=0)
    p, r = (z[0, y[0] == c].mean(0) for c in range(2))
    along = randn(20, 3, seed=1)
    normal = (p - r) / (p - r).norm()
    on_plane = (p + r) / 2 + along - (along @ normal)[:, None] * normal
    found = logits(z, y, on_plane[None], n_way=2)
    close(found[..., 0], found[..., 1])
    assert (logits(z, y, (on_plane + 0.1 * normal)[None], n_way=2).argmax(-1) == 0).all()


def test_gaussian_classes_of_variance_one_half_have_these_posteriors():
    z, q, y = randn(1, 3, 2), randn(1, 5, 2, seed=1), torch.arange(3)[None]
    normal = torch.distributions.MultivariateNormal
    density = torch.stack([normal(m, torch.eye(2).double() / 2).log_prob(q[0]) for m in z[0]], -1)
    close(logits(z, y, q).softmax(-1)[0], density.exp() / density.exp().sum(-1, keepdim=True))


def test_duplicating_the_support_set_changes_nothing():
    z, q, y = randn(2, 6, 4), randn(2, 5, 4, seed=1), labels_of(2, (2, 1, 3), seed=0)
    close(logits(torch.cat([z, z], 1), torch.cat([y, y], 1), q), logits(z, y, q))


@pytest.mark.parametrize("graph", [True, False])
def test_it_is_proto_maml_without_inner_steps(graph):
    learner = make_learner("protonet")
    params, episode = make_params(learner), make_episode()
    other = ProtoMAML(InnerLoop(MODEL, steps=0), n_way=3)
    fitted = other.fit(begin(other, params, episode.support), episode.support, graph=graph)
    close(answers(learner, params, episode, graph=graph), other.predict(fitted, episode.query.x))
