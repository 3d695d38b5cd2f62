"""HVM: its closed forms, the reading and the writing of its memory, and its levels."""

import pytest
import torch

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
from torchemo.core.errors import ConfigError
from torchemo.core.tree import expand
from torchemo.core.types import BaseClasses, TaskShape
from torchemo.learners import LEARNERS
from torchemo.learners.learner import scoped
from torchemo.learners.metric import hvm
from torchemo.learners.metric.episodic import HEAD
from torchemo.learners.metric.hvm import HVM
from torchemo.models import Conv4, ResNet12
from torchemo.models.trunk import level_sizes, with_levels
from torchemo.training.step import outer_step

WAY, CLASSES = 3, 6
ONE = HVM(levels=1, width=4, sizes=(4,), classes=CLASSES, neighbours=2)
TWO = HVM(levels=2, width=4, sizes=(2, 3), classes=CLASSES, neighbours=CLASSES)


def drawn(head, *, tasks=2, jitter=0.3):
    """What a head reads: drawn parameters, and a memory in which classes 0 to 3 are written."""
    g = torch.Generator().manual_seed(0)
    params = {n: t.double() + jitter * randn(*t.shape, seed=5) for n, t in head.init(g).items()}
    state = {n: t.double() for n, t in head.init_state(g).items()}
    for i, name in enumerate(("key", "mean", "log_variance")):
        kept = state[f"memory.{name}"]
        kept[:, :4] = randn(*kept[:, :4].shape, seed=20 + i)
    state["memory.written"][:4] = 1
    return expand({**params, **state}, tasks)


def problem(size, tasks=2):
    y = torch.tensor([[0, 2, 1, 1, 0], [2, 2, 0, 1, 1]])[:tasks]
    return randn(tasks, 5, size), y, randn(tasks, 4, size, seed=1)


def test_one_level_without_memory_is_protonet():
    params, (z, y, q) = drawn(ONE, jitter=0.0), problem(4)
    params = {n: torch.zeros_like(t) if n.startswith("memory") else t for n, t in params.items()}
    params["project.0.weight"] = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    found = ONE.logits(params, ONE.fit(params, z, y, n_way=WAY), q)
    for b in range(2):
        means = torch.stack([z[b][y[b] == k].mean(0) for k in range(WAY)])
        apart = (q[b, :, None] - means).square().sum(-1)
        close(found[b], (-apart).log_softmax(-1), rtol=1e-9)


def test_logits_are_the_expected_distance_to_drawn_prototypes():
    params, (z, y, q) = drawn(ONE), problem(4)
    classifier = ONE.fit(params, z, y, n_way=WAY)
    seen = q @ params["project.0.weight"].transpose(1, 2) + params["project.0.bias"].unsqueeze(1)
    mean, spread = classifier["mean"][:, 0], (0.5 * classifier["log_variance"][:, 0]).exp()
    noise = randn(20_000, *mean.shape, seed=9)
    noise = torch.cat([noise, -noise])
    drawn_at = mean + spread * noise
    apart = torch.stack(
        [(seen[:, i, None] - drawn_at).square().sum(-1).mean(0) for i in range(q.shape[1])], dim=1
    )
    found = ONE.logits(params, classifier, q)
    torch.testing.assert_close(found, (-apart).log_softmax(-1), rtol=0, atol=0.1)


def test_a_level_that_has_all_the_weight_answers_alone():
    params, (z, y, q) = drawn(TWO), problem(5)
    classifier = TWO.fit(params, z, y, n_way=WAY)
    assert classifier["weigh"].shape == (2, 2)
    sure = torch.tensor([[0.0, 800.0]]).double().expand(2, 2)
    found = TWO.logits(params, {**classifier, "weigh": sure}, q)
    seen = q[..., 2:] @ params["project.1.weight"].transpose(1, 2)
    seen = seen + params["project.1.bias"].unsqueeze(1)
    for b in range(2):
        own = classifier["mean"][b, 1], classifier["log_variance"][b, 1].exp().sum(-1)
        apart = (seen[b, :, None] - own[0]).square().sum(-1) + own[1]
        close(found[b], (-apart).log_softmax(-1), rtol=1e-9)


def test_answers_are_the_mixture_of_the_levels():
    params, (z, y, q) = drawn(TWO), problem(5)
    classifier = TWO.fit(params, z, y, n_way=WAY)
    each = [
        TWO.logits(params, {**classifier, "weigh": 800 * torch.eye(2)[i].expand(2, 2)}, q).exp()
        for i in range(2)
    ]
    a = classifier["weigh"].softmax(1)[:, :, None, None]
    close(TWO.logits(params, classifier, q).exp(), a[:, 0] * each[0] + a[:, 1] * each[1], rtol=1e-9)


def test_recall_is_attention_over_the_nearest_written_classes():
    params, v = drawn(ONE), randn(2, WAY, 4, seed=3)
    found = ONE._recalled(params, v, 0)
    key, mean, spread = (params[f"memory.{n}"][0, 0, :4] for n in ("key", "mean", "log_variance"))
    for b in range(2):
        for k in range(WAY):
            scores = key @ v[b, k]
            near = scores.argsort(descending=True)[:2]
            weights = torch.zeros(4).double()
            weights[near] = scores[near].softmax(0)
            close(found[0][b, k], weights @ mean)
            close(found[1][b, k], weights @ spread)


def test_with_as_many_neighbours_as_classes_all_written_ones_count():
    params, v = drawn(TWO), randn(2, WAY, 4, seed=3)
    key, mean = (params[f"memory.{n}"][0, 1, :4] for n in ("key", "mean"))
    close(TWO._recalled(params, v, 1)[0], (v @ key.T).softmax(-1) @ mean)


def test_an_empty_memory_recalls_zeros():
    params = {n: torch.zeros_like(t) if "memory" in n else t for n, t in drawn(ONE).items()}
    for recalled in ONE._recalled(params, randn(2, WAY, 4), 0):
        assert torch.equal(recalled, torch.zeros(2, WAY, 4).double())


@pytest.mark.parametrize("momentum", [0.0, 0.3])
def test_a_class_is_written_into_its_row_and_no_other_row_changes(momentum):
    head = HVM(levels=2, width=4, sizes=(2, 3), classes=CLASSES, momentum=momentum)
    params, (z, y, _) = drawn(head), problem(5)
    classifier = head.fit(params, z, y, n_way=WAY)
    state = {n: t[0].clone() for n, t in params.items() if n.startswith("memory")}
    before = {n: t.clone() for n, t in state.items()}
    # Class 1 comes twice: the second task moves what the first one wrote.
    after = head.written(state, classifier, BaseClasses(torch.tensor([[1, 5, 3], [1, 3, 0]])))
    for name, kept in (("key", "key"), ("mean", "mean"), ("log_variance", "log_variance")):
        old, new = before[f"memory.{name}"], after[f"memory.{name}"]
        said = classifier[kept]
        first = momentum * old[:, 1] + (1 - momentum) * said[0, :, 0]
        close(new[:, 1], momentum * first + (1 - momentum) * said[1, :, 0])
        close(new[:, 5], said[0, :, 1])  # written for the first time
        close(new[:, 0], momentum * old[:, 0] + (1 - momentum) * said[1, :, 2])
        close(new[:, [2, 4]], old[:, [2, 4]])
        assert torch.equal(state[f"memory.{name}"], old)
    assert after["memory.written"].tolist() == [1, 1, 1, 1, 0, 1]


def test_level_weights_see_the_gradient_of_the_support_loss():
    params, (z, y, _) = drawn(TWO), problem(5)
    seen, inputs = [], []

    def noting(params, name, x):
        if name.startswith("weigh"):
            inputs.append(x)
        return plain(params, name, x)

    plain, hvm._net = hvm._net, noting
    try:
        classifier = TWO.fit(params, z, y, n_way=WAY)
    finally:
        hvm._net = plain
    seen = z[..., :2] @ params["project.0.weight"].transpose(1, 2) + params[
        "project.0.bias"
    ].unsqueeze(1)
    mean = classifier["mean"][:, 0].clone().requires_grad_()
    apart = (seen.unsqueeze(2) - mean.unsqueeze(1)).square().sum(-1)
    spread = classifier["log_variance"][:, 0].exp().sum(-1).unsqueeze(1)
    logp = (-apart - spread).log_softmax(-1)
    loss = -logp.gather(2, y.unsqueeze(-1)).mean((1, 2)).sum()
    (gradient,) = torch.autograd.grad(loss, mean)
    close(inputs[0], gradient.square().mean(1, keepdim=True), rtol=1e-9)


def test_the_loss_adds_the_divergence_from_what_queries_say():
    params, (z, y, q) = drawn(ONE), problem(4)
    target = torch.tensor([[0, 1, 2, 2], [1, 1, 0, 2]])
    classifier = ONE.fit(params, z, y, n_way=WAY)
    plain = HVM(levels=1, width=4, sizes=(4,), classes=CLASSES, neighbours=2, kl_weight=0.0)
    heavy = HVM(levels=1, width=4, sizes=(4,), classes=CLASSES, neighbours=2, kl_weight=0.5)
    zero = {n: torch.zeros_like(t) if n.startswith("prior") else t for n, t in params.items()}
    extra = heavy.losses(zero, classifier, q, target) - plain.losses(zero, classifier, q, target)
    seen = q @ params["project.0.weight"].transpose(1, 2) + params["project.0.bias"].unsqueeze(1)
    for b in range(2):
        total = 0.0
        for k in range(WAY):
            prior = torch.distributions.Normal(seen[b][target[b] == k].mean(0), 1.0)
            spread = (0.5 * classifier["log_variance"][b, 0, k]).exp()
            said = torch.distributions.Normal(classifier["mean"][b, 0, k], spread)
            total += torch.distributions.kl_divergence(said, prior).sum()
        close(extra[b], 0.5 * total, rtol=1e-9)


@pytest.mark.parametrize(
    "model",
    [
        Conv4(3, in_channels=1, image_size=16, filters=3, bn="layer"),
        ResNet12(3, in_channels=1, image_size=16, channels=(2, 3, 4, 5), bn="layer"),
    ],
)
def test_levels_are_the_means_of_the_last_maps_and_then_the_features(model):
    three = with_levels(model, 3)
    params = expand(three.init(torch.Generator().manual_seed(0)), 2)
    x = torch.rand(2, 4, 1, 16, 16)
    found = three.features(params, x)
    assert found.shape[-1] == sum(level_sizes(three)) == three.n_features
    torch.testing.assert_close(found[..., -level_sizes(three)[-1] :], model.features(params, x))
    assert level_sizes(three)[:2] == tuple(model.widths[1:3])
    two = with_levels(model, 2).features(params, x)
    torch.testing.assert_close(found[..., level_sizes(three)[0] :], two)
    assert with_levels(model, 1) == model


def test_too_many_levels_are_refused():
    with pytest.raises(ConfigError, match="levels"):
        with_levels(Conv4(3, in_channels=1, image_size=16), 5)


def test_training_at_once_fills_the_memory_and_answers_leave_it():
    learner = make_learner("hvm/batch")
    params, episode = make_params(learner), make_episode()
    base = make_base(learner)
    found = outer_step(
        learner, params, episode.__class__(episode.support, episode.query, base=base)
    )
    after = found.buffers["state/memory.written"]
    assert set(after.nonzero().flatten().tolist()) == set(base.labels.flatten().tolist())
    assert not any(name.startswith("state/") for name in found.gradients)
    state = {n: t for n, t in params.items() if n.startswith("state/")}
    assert len(state) == 4
    assert state["state/memory.key"].shape[1] == N_BASE
    assert all(not t.any() for t in state.values())
    one_by_one = outer_step(make_learner("hvm"), params, episode)
    assert all(torch.equal(one_by_one.buffers[n], state[n]) for n in state)


def test_without_training_classes_there_is_no_memory():
    kind, options = LEARNERS.resolve(CASES["hvm"])
    model = Conv4(3, in_channels=1, image_size=16, filters=3)
    learner = kind.build(options, model, TaskShape("classification", (1, 16, 16), 3))
    params = learner.init(torch.Generator().manual_seed(0))
    assert not any(name.startswith("state/") for name in params)
    assert scoped(params, HEAD)
