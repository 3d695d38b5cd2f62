"""MatchingNet against its definition and closed forms."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

from tests.learners.metric.problems import (
    begin,
    close,
    labels_of,
    make_episode,
    make_learner,
    make_params,
    randn,
    rows,
)
from torchemo.learners.metric.matchingnet import MatchingNet

SHOTS = (2, 1, 3)


def logits(z, y, q, n_way=3, scale=1.0):
    head = MatchingNet(scale=scale)
    return head.logits({}, head.fit({}, z, y, n_way=n_way), q)


def drawn():
    return randn(2, 6, 4), labels_of(2, SHOTS, seed=0), randn(2, 5, 4, seed=1)


def attention_sum(z, y, x, scale, n_way=3):
    """p(k | x) of one query, example by example."""
    cosines = [float(x @ one / (x.norm() * one.norm())) for one in z]
    weights = [math.exp(scale * c) for c in cosines]
    shares = [0.0] * n_way
    for weight, label in zip(weights, y.tolist(), strict=True):
        shares[label] += weight / sum(weights)
    return shares


@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_probabilities_are_sums_of_attention_over_the_examples_of_a_class(scale):
    z, y, q = drawn()
    found = logits(z, y, q, scale=scale).exp()
    for b in range(2):
        for i in range(5):
            assert found[b, i].tolist() == pytest.approx(attention_sum(z[b], y[b], q[b, i], scale))
    close(found.sum(-1), torch.ones(2, 5).double())


def test_softmax_leaves_the_logits_as_they_are():
    found = logits(*drawn())
    close(found.log_softmax(-1), found)


def plain_loss(params, support, query):
    """The loss of one task, without a task axis."""
    z, q = (
        torch.tanh(s.x @ params["layer1.weight"].T + params["layer1.bias"])
        for s in (support, query)
    )
    cosines = F.cosine_similarity(q[:, None], z[None], dim=-1)
    attention = (params.get("head/scale", 1.0) * cosines).softmax(-1)
    shares = attention @ F.one_hot(support.y, 3).double()
    return -shares.gather(1, query.y[:, None]).log().mean()


@pytest.mark.parametrize("case", ["matchingnet", "matchingnet/learned"])
def test_gradients_are_those_of_the_plain_loss(case):
    learner = make_learner(case)
    params, episode = make_params(learner), make_episode()
    assert ("head/scale" in params) == ("learned" in case)
    losses, found = rows(learner, begin(learner, params, episode.support), episode)
    for b in range(2):
        support, query = (type(s)(s.x[b], s.y[b]) for s in (episode.support, episode.query))
        close(losses[b], plain_loss(params, support, query))
        expected = grad(plain_loss)(params, support, query)
        assert found.keys() == expected.keys()
        for name, row in expected.items():
            close(found[name][b], row)


def test_with_one_example_per_class_it_is_a_softmax_over_cosines():
    z, q, y = randn(1, 4, 5), randn(1, 6, 5, seed=1), torch.tensor([[2, 0, 3, 1]])
    cosines = F.cosine_similarity(q[0][:, None], z[0][None], dim=-1)
    expected = (3 * cosines).log_softmax(-1)[:, y[0].argsort()]
    close(logits(z, y, q, n_way=4, scale=3.0)[0], expected)


def test_the_length_of_a_feature_does_not_matter_nor_does_a_rotation():
    z, y, q = drawn()
    before = logits(z, y, q, scale=5.0)
    lengths = randn(2, 6, 1, seed=4).exp()
    close(logits(lengths * z, y, 0.01 * q, scale=5.0), before)
    turn = torch.linalg.qr(randn(4, 4, seed=2)).Q
    close(logits(z @ turn, y, q @ turn, scale=5.0), before)


def test_a_large_scale_is_the_nearest_neighbour_and_a_small_one_counts_examples():
    z, y, q = drawn()
    nearest = F.cosine_similarity(q[:, :, None], z[:, None], dim=-1).argmax(-1)
    assert torch.equal(logits(z, y, q, scale=1e4).argmax(-1), y.gather(1, nearest))
    counts = torch.tensor([2, 1, 3]).double() / 6
    close(logits(z, y, q, scale=1e-9).exp(), counts.expand(2, 5, 3), rtol=1e-8)


def test_duplicating_the_support_set_changes_nothing():
    z, y, q = drawn()
    close(logits(torch.cat([z, z], 1), torch.cat([y, y], 1), q), logits(z, y, q))


def test_a_class_far_away_keeps_a_finite_logarithm_and_gradient_in_float32():
    z = torch.tensor([[[1.0, 0.1], [-1.0, 0.1]]], requires_grad=True)
    q = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    found = logits(z, torch.tensor([[0, 1]]), q, n_way=2, scale=100.0)
    assert -210 < found.detach()[0, 0, 1] < -190
    found[0, 0, 1].backward()
    assert z.grad.isfinite().all()
    assert q.grad.isfinite().all()
    assert z.grad.abs().sum() > 0
