"""MetaOptNet's support vector head against its primal problem, closed forms and its limits."""

import pytest
import torch
import torch.nn.functional as F

from tests.learners.metric.problems import close, labels_of, randn
from torchemo.learners.metric.svm import MetaOptNetSVM, dual_solution, project_simplex


def fitted(z, y, n_way=3, penalty=0.5, scale=1.0):
    scales = torch.full((len(z),), scale, dtype=z.dtype)
    return MetaOptNetSVM(penalty).fit({"scale": scales}, z, y, n_way=n_way)


def drawn(features=4, shots=(2, 1, 3)):
    y = labels_of(2, shots, seed=0)
    return randn(2, y.shape[1], features), y


def primal(w, z, y, penalty):
    """The objective of Crammer and Singer, example by example."""
    total = 0.5 * float(w.square().sum())
    for features, label in zip(z, y.tolist(), strict=True):
        scores = [float(features @ row) for row in w]
        total += penalty * max(s - scores[label] + (k != label) for k, s in enumerate(scores))
    return total


@pytest.mark.parametrize("penalty", [0.001, 0.1, 0.5, 10.0])
@pytest.mark.parametrize("features", [2, 40])
@pytest.mark.parametrize("shots", [(1, 1), (2, 1, 3), (5, 5, 5, 5, 5)])
def test_the_primal_and_the_dual_objective_are_equal(penalty, features, shots):
    """By weak duality no other classifier is better than one for which they are."""
    z, y = drawn(features, shots)
    z = 3 * z
    target = F.one_hot(y, len(shots)).double()
    alpha = dual_solution(z, target, penalty=penalty)
    close(alpha.sum(-1), torch.zeros(y.shape).double())
    assert (alpha <= penalty * target + 1e-10).all()
    # Adding the identity to Z Z^T gives each example a feature of its own.
    whole = torch.cat([z, torch.eye(z.shape[1]).double().expand(2, -1, -1)], -1)
    w = alpha.transpose(1, 2) @ whole
    for b in range(2):
        dual = float((alpha[b] * target[b]).sum() - 0.5 * w[b].square().sum())
        assert primal(w[b], whole[b], y[b], penalty) == pytest.approx(dual, rel=1e-8, abs=1e-9)
    found = fitted(z, y, len(shots), penalty)
    close(found["weight"], w[..., :features])
    assert not found["bias"].any()


@pytest.mark.parametrize("penalty", [0.01, 5.0])
def test_two_opposite_examples_in_closed_form(penalty):
    """alpha_1 = (t, -t), alpha_2 = (-t, t) with t = 1 / (4 a^2 + 2), but at most C."""
    a = 1.5
    z, y = torch.tensor([[[a], [-a]]]).double(), torch.tensor([[0, 1]])
    t = min(penalty, 1 / (4 * a * a + 2))
    expected = torch.tensor([[[2 * a * t], [-2 * a * t]]], dtype=torch.float64)
    close(fitted(z, y, 2, penalty)["weight"], expected)


def test_rotating_features_changes_nothing_and_the_scale_multiplies():
    z, y = drawn()
    turn = torch.linalg.qr(randn(4, 4, seed=2)).Q
    close(fitted(z @ turn, y)["weight"], fitted(z, y)["weight"] @ turn)
    close(fitted(z, y, scale=7.0)["weight"], 7 * fitted(z, y)["weight"])


def test_large_features_are_solved_to_the_optimum_too():
    z, y = drawn(640, (5,) * 5)
    z, target = z.relu() + 2.0, F.one_hot(y, 5).double()
    alpha = dual_solution(z, target, penalty=0.1)
    assert (alpha <= 0.1 * target + 1e-10).all()
    gram = z @ z.transpose(1, 2) + torch.eye(25).double()
    scores = gram @ alpha - target
    positive = 0.1 * target - alpha > 1e-10
    gaps = scores.amax(-1, keepdim=True) - scores
    # Only the classes of the largest margin have a price.
    assert gaps[positive].abs().max() < 1e-8


def test_the_projection_is_the_nearest_probability_vector():
    points = 2 * randn(3, 4, 5)
    found = project_simplex(points)
    close(found.sum(-1), torch.ones(3, 4).double())
    assert (found >= 0).all()
    # The nearest point has no direction to a vertex that comes nearer.
    vertices = torch.eye(5).double()
    toward = torch.einsum("bnk,bnvk->bnv", points - found, vertices - found.unsqueeze(2))
    assert toward.max() < 1e-12


def test_features_that_are_not_finite_give_weights_that_are_not_finite():
    z, y = drawn()
    expected = fitted(z, y)["weight"][0]
    z[1, 0, 0] = torch.nan
    found = fitted(z, y)["weight"]
    close(found[0], expected)
    assert not found[1].isfinite().any()
