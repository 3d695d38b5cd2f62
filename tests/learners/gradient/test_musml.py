"""MUSML: coordinates, responsibilities, and its limits."""

import pytest
import torch

from tests.learners.gradient.problems import (
    LINE,
    make_episode,
    make_params,
    point_episode,
    points,
    vectors,
)
from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy
from torchemo.core.tree import expand
from torchemo.core.types import Batch, Episode
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.musml import COLUMNS, COORDINATES, MUSML
from torchemo.models import Conv4
from torchemo.training.predict import predict
from torchemo.training.step import outer_step

NET = vectors("maml").model


def mean_columns(params):
    return {n.removeprefix(COLUMNS): p.mean((0, 1)) for n, p in params.items()}


def of(params, k, v):
    """The network ``S_k v``, without a task axis."""
    return {
        n.removeprefix(COLUMNS): torch.tensordot(v, p[k], dims=([0], [0]))
        for n, p in params.items()
    }


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_one_subspace_without_steps_is_plain_training_of_the_mean_of_its_columns(dim):
    learner = MUSML(InnerLoop(NET, steps=0), subspaces=1, subspace_dim=dim)
    params, episode = make_params(learner), make_episode()
    ours = outer_step(learner, params, episode)
    theta = {n: p.requires_grad_() for n, p in mean_columns(params).items()}
    losses = cross_entropy(NET(expand(theta, 2), episode.query.x), episode.query.y)
    torch.testing.assert_close(ours.losses, losses.detach(), rtol=1e-12, atol=1e-14)
    theirs = torch.autograd.grad(losses.mean(), list(theta.values()))
    for name, expected in zip(theta, theirs, strict=True):
        for j in range(dim):  # every column gets its share of the mean
            got = ours.gradients[COLUMNS + name][0, j]
            torch.testing.assert_close(got, expected / dim, rtol=1e-11, atol=1e-15)


def begun(params, k):
    """The network at which a task begins in subspace k."""
    return expand(of(params, k, torch.full((2,), 0.5, dtype=torch.float64)), 1)


def one_step(params, support, k, alpha):
    """One gradient step on the coordinates, by autograd through the network."""
    v = torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True)
    out = NET(expand(of(params, k, v), 1), support.x)
    return (v - alpha * torch.autograd.grad(cross_entropy(out, support.y).sum(), v)[0]).detach()


def test_the_outer_loss_is_the_sum_over_subspaces_weighted_by_their_support_fit():
    learner = MUSML(
        InnerLoop(NET, steps=1, rule=vectors("maml").loop.rule),
        subspaces=3,
        subspace_dim=2,
        progress=0.5,
    )
    params, episode = make_params(learner), make_episode()
    found = outer_step(learner, params, episode).losses
    for b in range(2):
        support = Batch(*(t[b : b + 1] for t in episode.support))
        query = Batch(*(t[b : b + 1] for t in episode.query))
        fits, losses = [], []
        for k in range(3):
            v = one_step(params, support, k, alpha=0.5)
            net = expand(of(params, k, v), 1)
            fits.append(cross_entropy(NET(net, support.x), support.y))
            losses.append(cross_entropy(NET(net, query.x), query.y))
        share = torch.softmax(-torch.cat(fits) / 0.55, 0)  # half way from 1 to 0.1
        assert float(found[b]) == pytest.approx(float((share * torch.cat(losses)).sum()), rel=1e-11)


def test_the_gradient_of_the_soft_choice_agrees_with_finite_differences():
    learner = MUSML(vectors("maml").loop, subspaces=2, subspace_dim=2)
    params, episode = make_params(learner), make_episode()
    gradients = outer_step(learner, params, episode).gradients
    g = torch.Generator().manual_seed(1)
    for name, tensor in params.items():
        v = torch.randn(tensor.shape, generator=g, dtype=torch.float64)
        h = 1e-5
        ends = [
            float(outer_step(learner, {**params, name: tensor + s * h * v}, episode).losses.mean())
            for s in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * h)
        assert slope == pytest.approx(float((gradients[name] * v).sum()), rel=1e-5, abs=1e-10), name


def test_one_column_learns_nothing_from_a_task_but_a_scale():
    loop = InnerLoop(NET, steps=2, rule=vectors("maml").loop.rule)
    learner = MUSML(loop, subspaces=1, subspace_dim=1)
    params, episode = make_params(learner), make_episode()
    begun, *_, answers = predict(learner, params, episode).outputs
    assert not torch.allclose(begun, answers)
    start = learner.start(params, episode.support, base={})
    adapted = learner.fit(start, episode.support).path[-1]
    for b, v in enumerate(adapted["coordinates"].flatten().tolist()):
        scaled = {n: v * t for n, t in of(params, 0, torch.ones(1).double()).items()}
        out = NET(expand(scaled, 1), episode.query.x[b : b + 1])
        torch.testing.assert_close(answers[b : b + 1], out, rtol=1e-11, atol=1e-13)


def test_answers_come_from_the_subspace_with_the_smallest_support_loss():
    learner = MUSML(
        InnerLoop(NET, steps=1, rule=vectors("maml").loop.rule), subspaces=3, subspace_dim=2
    )
    params, episode = make_params(learner), make_episode(tasks=4)
    answers = predict(learner, params, episode).outputs
    chosen = set()
    for b in range(4):
        support = Batch(*(t[b : b + 1] for t in episode.support))
        nets = [expand(of(params, k, one_step(params, support, k, 0.5)), 1) for k in range(3)]
        fits = [float(cross_entropy(NET(net, support.x), support.y)) for net in nets]
        best = fits.index(min(fits))
        chosen.add(best)
        expected = NET(nets[best], episode.query.x[b : b + 1])
        torch.testing.assert_close(answers[1][b : b + 1], expected.detach(), rtol=1e-11, atol=1e-14)
        begin = NET(begun(params, best), episode.query.x[b : b + 1])
        torch.testing.assert_close(answers[0][b : b + 1], begin, rtol=1e-11, atol=1e-14)
    assert len(chosen) > 1


def test_gradients_in_coordinates_are_the_networks_gradients_projected_on_the_columns():
    learner = MUSML(vectors("maml").loop, subspaces=2, subspace_dim=2)
    params, episode = make_params(learner), make_episode(tasks=1)
    start = learner.start(params, episode.support, base={})
    g0 = learner.fit(start, episode.support).gradients[0][COORDINATES].detach()
    for k in range(2):
        w = {n: t.requires_grad_() for n, t in begun(params, k).items()}
        loss = cross_entropy(NET(w, episode.support.x), episode.support.y).sum()
        grads = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        for j in range(2):
            projected = sum((params[COLUMNS + n][k, j] * g[0]).sum() for n, g in grads.items())
            assert float(g0[0, k, j]) == pytest.approx(float(projected), rel=1e-11)


def test_the_choice_hardens_from_the_first_temperature_to_the_last():
    learner = vectors("musml", anneal=100)
    assert learner.scheduled(0).progress == 0
    assert learner.scheduled(50).progress == 0.5
    assert learner.scheduled(1000).progress == 1
    cold = MUSML(learner.loop, subspaces=3, temperature=(1e-6, 1e-6))
    params, episode = make_params(cold), make_episode()
    hard = cross_entropy(predict(cold, params, episode).outputs[-1], episode.query.y)
    torch.testing.assert_close(outer_step(cold, params, episode).losses, hard, rtol=1e-9, atol=0)


def test_on_points_a_task_does_not_see_the_others():
    learner, episode = points("musml"), point_episode()
    params = make_params(learner)
    whole = predict(learner, params, episode, batched=True).outputs[-1]
    assert whole.shape == (3, 4, LINE.n_out)
    alone = Episode(*(Batch(b.x[:1], b.y[:1]) for b in (episode.support, episode.query)))
    torch.testing.assert_close(
        predict(learner, params, alone).outputs[-1], whole[:1], rtol=1e-12, atol=1e-14
    )


def answers_by_distance(params, k, v, support, query):
    """Minus the mean squared distance of every query to the mean of each class's support features."""
    body = expand(of(params, k, v), 1)
    f, q = NET.features(body, support.x)[0], NET.features(body, query.x)[0]
    means = torch.stack([f[support.y[0] == c].mean(0) for c in range(int(support.y.max()) + 1)])
    return -(q[:, None] - means[None]).square().mean(-1)[None]


def headless(**changes):
    rule = vectors("maml").loop.rule
    learner = MUSML(InnerLoop(NET, steps=1, rule=rule), subspace_dim=2, n_way=3, **changes)
    params = make_params(learner)
    assert not any(name.endswith(NET.head) for name in params)
    return learner, params


def test_with_prototypes_a_network_answers_by_distance_in_its_own_features():
    learner, params = headless(subspaces=2, progress=1.0)
    episode = make_episode(tasks=3)
    found = outer_step(learner, params, episode).losses
    answers = predict(learner, params, episode).outputs[-1]
    for b in range(3):
        support = Batch(*(t[b : b + 1] for t in episode.support))
        query = Batch(*(t[b : b + 1] for t in episode.query))
        fits, losses, outs = [], [], []
        for k in range(2):
            v = torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True)
            out = answers_by_distance(params, k, v, support, support)
            g = torch.autograd.grad(cross_entropy(out, support.y).sum(), v)[0]
            v = (v - 0.5 * g).detach()
            fits.append(
                cross_entropy(answers_by_distance(params, k, v, support, support), support.y)
            )
            outs.append(answers_by_distance(params, k, v, support, query))
            losses.append(cross_entropy(outs[-1], query.y))
        share = torch.softmax(-torch.cat(fits) / 0.1, 0)
        assert float(found[b]) == pytest.approx(float((share * torch.cat(losses)).sum()), rel=1e-10)
        best = outs[int(torch.cat(fits).argmin())]
        torch.testing.assert_close(
            answers[b : b + 1].softmax(-1), best.softmax(-1), rtol=1e-10, atol=1e-13
        )


def test_with_prototypes_the_order_of_classes_does_not_matter():
    learner, params = headless(subspaces=2)
    episode = make_episode()
    order = torch.tensor([2, 0, 1])
    other = Episode(*(Batch(b.x, order[b.y]) for b in (episode.support, episode.query)))
    before, after = (predict(learner, params, e).outputs[-1] for e in (episode, other))
    torch.testing.assert_close(after[..., order], before, rtol=1e-12, atol=1e-13)


def test_the_gradient_through_prototypes_agrees_with_finite_differences():
    learner, params = headless(subspaces=2)
    episode, h = make_episode(), 1e-5
    gradients = outer_step(learner, params, episode).gradients
    g = torch.Generator().manual_seed(1)
    for name, tensor in params.items():
        v = torch.randn(tensor.shape, generator=g, dtype=torch.float64)
        ends = [
            float(outer_step(learner, {**params, name: tensor + s * h * v}, episode).losses.mean())
            for s in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * h)
        assert slope == pytest.approx(float((gradients[name] * v).sum()), rel=1e-5, abs=1e-9), name


def test_bad_switches_are_refused():
    with pytest.raises(ConfigError, match="subspaces"):
        vectors("musml", subspaces=0)
    with pytest.raises(ConfigError, match="running"):
        MUSML(InnerLoop(Conv4(3, image_size=16, filters=2, bn="running")))
    with pytest.raises(ConfigError, match="normalised together"):
        MUSML(InnerLoop(Conv4(3, image_size=16, filters=2, bn="per_query_with_support")))
