"""TapNet against its definition: the null space by a singular value decomposition."""

import numpy as np
import pytest
import torch

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
from torchemo.core.errors import ConfigError
from torchemo.learners.metric.tapnet import TapNet

WAY, FEATURES = 3, 7
HEAD = TapNet(references=WAY, features=FEATURES)


def drawn(references=WAY, tasks=2):
    return {
        "reference": randn(tasks, references, FEATURES, seed=3),
        "bias": randn(tasks, references, seed=4),
    }


def by_definition(z, y, q, reference, bias):
    """Logits of one task, in numpy, with a basis M of the null space."""
    means = np.stack([z[y == k].mean(0) for k in range(len(reference))])
    apart = len(reference) * reference - reference.sum(0)
    unit = lambda v: v / (np.linalg.norm(v, axis=1, keepdims=True) + 1e-6)  # noqa: E731
    error = unit(apart) - unit(means)
    _, sizes, right = np.linalg.svd(error)
    basis = right[int((sizes > 1e-9).sum()) :].T
    np.testing.assert_allclose(basis.T @ error.T, 0, atol=1e-12)
    np.testing.assert_allclose(basis.T @ unit(apart).T, basis.T @ unit(means).T, atol=1e-12)
    apart = (q[:, None] - reference[None]) @ basis
    return -(apart**2).sum(-1) + 2 * bias


def softmax_of(head, params, z, y, q, n_way=WAY):
    return head.logits(params, head.fit(params, z, y, n_way=n_way), q).softmax(-1)


def test_probabilities_are_those_of_the_definition():
    z, q, params = randn(2, 6, FEATURES), randn(2, 5, FEATURES, seed=1), drawn()
    y = labels_of(2, (2, 1, 3), seed=0)
    found = softmax_of(HEAD, params, z, y, q)
    for b in range(2):
        one = [t[b].numpy() for t in (z, y, q, params["reference"], params["bias"])]
        expected = torch.from_numpy(by_definition(*one)).softmax(-1)
        close(found[b], expected, rtol=1e-9, atol=1e-12)


def test_means_that_agree_with_their_references_leave_the_whole_space():
    params = drawn()
    reference = params["reference"]
    apart = WAY * reference - reference.sum(1, keepdim=True)
    classifier = HEAD.fit(params, apart, torch.arange(WAY).expand(2, -1), n_way=WAY)
    close(classifier["weight"], 2 * reference, rtol=1e-5, atol=1e-5)
    assert classifier["bias"].isfinite().all()


def test_a_mean_that_agrees_takes_no_direction_away():
    params = drawn()
    reference = params["reference"]
    z = (WAY * reference - reference.sum(1, keepdim=True)).clone()
    z[:, 1] = randn(2, FEATURES, seed=8)  # one error left
    inside = HEAD.fit(params, z, torch.arange(WAY).expand(2, -1), n_way=WAY)["weight"] / 2
    gone = reference - inside
    assert all(int(torch.linalg.matrix_rank(one, tol=1e-5)) == 1 for one in gone)


def test_support_features_get_no_gradient():
    z, params = randn(2, 6, FEATURES).requires_grad_(), drawn()
    y, q = labels_of(2, (2, 2, 2), seed=0), randn(2, 5, FEATURES, seed=1).requires_grad_()
    params = {name: t.requires_grad_() for name, t in params.items()}
    loss = HEAD.losses(params, HEAD.fit(params, z, y, n_way=WAY), q, torch.zeros(2, 5).long())
    wanted = (z, q, *params.values())
    nothing, *others = torch.autograd.grad(loss.sum(), wanted, allow_unused=True)
    assert nothing is None
    assert all(float(g.abs().max()) > 1e-6 for g in others)


def test_rotating_features_and_references_changes_nothing():
    z, q, params = randn(2, 6, FEATURES), randn(2, 5, FEATURES, seed=1), drawn()
    y = labels_of(2, (2, 2, 2), seed=0)
    turn = torch.linalg.qr(randn(FEATURES, FEATURES, seed=9))[0]
    turned = {**params, "reference": params["reference"] @ turn}
    close(
        softmax_of(HEAD, turned, z @ turn, y, q @ turn),
        softmax_of(HEAD, params, z, y, q),
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize("assign", ["greedy", "hungarian"])
def test_fewer_classes_take_references_near_their_means(assign):
    head, params = TapNet(references=5, features=FEATURES, assign=assign), drawn(5)
    params["bias"] = torch.zeros(2, 5, dtype=torch.float64)
    wanted = torch.tensor([3, 0, 4])
    z = params["reference"][:, wanted] + 1e-3 * randn(2, WAY, FEATURES)
    y, q = torch.arange(WAY).expand(2, -1), randn(2, 4, FEATURES, seed=1)
    alone = {name: t[:, wanted] for name, t in params.items()}
    close(softmax_of(head, params, z, y, q), softmax_of(HEAD, alone, z, y, q))


def test_no_two_classes_share_a_reference():
    means = randn(2, 1, FEATURES).expand(-1, WAY, -1)  # all want the same one
    for assign in ("greedy", "hungarian"):
        head, params = TapNet(references=5, features=FEATURES, assign=assign), drawn(5)
        chosen = head._chosen(means, params["reference"], params["bias"])
        assert all(len(set(one)) == WAY for one in chosen.tolist())


def test_the_best_choice_for_all_does_not_depend_on_the_order_of_labels():
    head, params = TapNet(references=5, features=FEATURES, assign="hungarian"), drawn(5)
    z, q, y = randn(2, 6, FEATURES), randn(2, 4, FEATURES, seed=1), labels_of(2, (2, 2, 2), seed=0)
    order = torch.tensor([2, 0, 1])
    before = softmax_of(head, params, z, y, q)
    close(softmax_of(head, params, z, order[y], q)[..., order], before)


def test_the_cut_gradient_still_trains():
    learner = make_learner("tapnet")
    params, episode = make_params(learner), make_episode(spread=6.0)
    start = begin(learner, params, episode.support)
    losses, found = rows(learner, start, episode)
    theta = {n: (t - 0.01 * found[n]).detach() for n, t in start.theta.items()}
    after = learner.loss(learner.fit(start._replace(theta=theta), episode.support), episode.query)
    assert (after < losses).all()


def test_too_few_features_are_refused():
    with pytest.raises(ConfigError, match="more features than references, got 5 and 5"):
        TapNet(references=5, features=5)
