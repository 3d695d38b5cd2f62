"""MetaOptNet's ridge head against the primal problem and its limits."""

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
from torchemo.core.losses import smoothed_cross_entropy
from torchemo.learners.metric.ridge import MetaOptNetRidge


def drawn(features=4):
    y = labels_of(2, (2, 1, 3), seed=0)
    return randn(2, 6, features), y, randn(2, 5, features, seed=1)


def fitted(z, y, n_way=3, ridge=2.0, scale=1.0):
    scales = torch.full((len(z),), scale, dtype=z.dtype)
    return MetaOptNetRidge(ridge).fit({"scale": scales}, z, y, n_way=n_way)


def logits(z, y, q, **changes):
    return MetaOptNetRidge().logits({}, fitted(z, y, **changes), q)


@pytest.mark.parametrize("features", [2, 4, 40])
def test_the_dual_solution_is_the_primal_one(features):
    z, y, _ = drawn(features)
    found = fitted(z, y)
    for b in range(2):
        target = F.one_hot(y[b], 3).double()
        inverse = torch.linalg.inv(z[b].T @ z[b] + 2.0 * torch.eye(features).double())
        close(found["weight"][b], (inverse @ z[b].T @ target).T)
    assert not found["bias"].any()


def test_it_is_least_squares_with_rows_that_pull_to_zero():
    z, y, _ = drawn()
    for b in range(2):
        rows = torch.cat([z[b], 2.0**0.5 * torch.eye(4).double()])
        target = torch.cat([F.one_hot(y[b], 3).double(), torch.zeros(4, 3).double()])
        close(fitted(z, y)["weight"][b], torch.linalg.lstsq(rows, target).solution.T)


def test_the_objective_is_at_its_minimum():
    z, y, _ = drawn()
    w = fitted(z, y)["weight"].requires_grad_()
    error = z @ w.transpose(1, 2) - F.one_hot(y, 3)
    (error.square().sum() / 2 + w.square().sum()).backward()
    close(w.grad, torch.zeros_like(w))


def test_duplicating_the_support_set_is_half_the_regularisation():
    z, y, q = drawn()
    twice = torch.cat([z, z], 1), torch.cat([y, y], 1)
    close(logits(*twice, q, ridge=4.0), logits(z, y, q, ridge=2.0))


def test_strong_regularisation_leaves_products_with_summed_features():
    z, y, q = drawn()
    found = 1e9 * logits(z, y, q, ridge=1e9)
    for b in range(2):
        sums = torch.stack([z[b, y[b] == c].sum(0) for c in range(3)])
        close(found[b], q[b] @ sums.T, rtol=1e-6, atol=1e-7)


def test_without_regularisation_the_support_labels_are_met_exactly():
    z, y, _ = drawn(features=40)
    close(logits(z, y, z, ridge=1e-10), F.one_hot(y, 3).double(), rtol=1e-8, atol=1e-8)


def test_rotating_features_changes_nothing_and_the_scale_multiplies():
    z, y, q = drawn()
    turn = torch.linalg.qr(randn(4, 4, seed=2)).Q
    close(logits(z @ turn, y, q @ turn), logits(z, y, q))
    close(logits(z, y, q, scale=7.0), 7 * logits(z, y, q))


def plain_loss(params, support, query):
    """The loss of one task by the primal problem, without a task axis."""
    z, q = (
        torch.tanh(s.x @ params["layer1.weight"].T + params["layer1.bias"])
        for s in (support, query)
    )
    gram = z.T @ z + 2.0 * torch.eye(z.shape[1]).double()
    w = torch.linalg.inv(gram) @ z.T @ F.one_hot(support.y, 3).double()
    logp = (params["head/scale"] * q @ w).log_softmax(-1)
    target = 0.05 + 0.85 * F.one_hot(query.y, 3).double()
    return -(target * logp).sum(-1).mean()


def test_gradients_are_those_of_the_plain_loss():
    learner = make_learner("metaoptnet-ridge")
    params, episode = make_params(learner), make_episode()
    losses, found = rows(learner, begin(learner, params, episode.support), episode)
    for b in range(2):
        support, query = (type(s)(s.x[b], s.y[b]) for s in (episode.support, episode.query))
        close(losses[b], plain_loss(params, support, query))
        expected = grad(plain_loss)(params, support, query)
        assert found.keys() == expected.keys()
        for name, row in expected.items():
            close(found[name][b], row, rtol=1e-9)


@pytest.mark.parametrize("n_way", [2, 3, 5])
def test_smoothing_spreads_over_the_other_classes(n_way):
    out, y = randn(2, 4, n_way), torch.tensor([[0, 1, 1, 0], [1, 0, 1, 0]])
    target = torch.full((2, 4, n_way), 0.3 / (n_way - 1), dtype=torch.float64)
    target = target.scatter(-1, y[..., None], 0.7)
    expected = -(target * out.log_softmax(-1)).sum(-1).mean(1)
    close(smoothed_cross_entropy(out, y, smoothing=0.3), expected)
    plain = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(2, 4).mean(1)
    close(smoothed_cross_entropy(out, y, smoothing=0.0), plain)


def test_features_that_are_not_finite_give_losses_that_are_not_finite():
    z, y, q = drawn()
    z[1, 0, 0] = torch.nan
    found = logits(z, y, q)
    assert found[0].isfinite().all()
    assert not found[1].isfinite().any()
