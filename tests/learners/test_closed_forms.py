"""Learners against closed forms and against each other."""

import math

import pytest
import torch

from tests.laws.cases import MODEL, N_WAY, double, make_episode, make_memory, make_params
from tests.models.oracles import REFUSALS
from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy
from torchemo.core.tree import expand
from torchemo.core.types import Batch, Episode, Start, TaskShape
from torchemo.learners.build import build_learner
from torchemo.learners.gradient.inner import SGD, Adam
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.maml import MAML
from torchemo.learners.gradient.maml_plus_plus import MAMLPlusPlus, step_weights
from torchemo.learners.gradient.meta_sgd import MetaSGD
from torchemo.learners.gradient.proto_maml import ProtoMAML
from torchemo.learners.gradient.reptile import Reptile
from torchemo.models import MLP, Conv4
from torchemo.training.predict import predict
from torchemo.training.step import outer_step

LOOP = InnerLoop(MODEL, steps=2, rule=SGD(0.5))
SHAPE = TaskShape("classification", (2,), N_WAY)


def built(name, model=MODEL, **options):
    """A learner made from its options, with the steps and the rate of `LOOP`."""
    return build_learner(Part(name, {"steps": 2, "inner_lr": 0.5, **options}), model, SHAPE)


def gradients(learner, params, episode=None):
    return outer_step(learner, params, episode or make_episode()).gradients


def test_maml_without_steps_is_plain_training_on_the_queries():
    learner = MAML(InnerLoop(MODEL, steps=0))
    params, episode = make_params(learner), make_episode()
    ours = gradients(learner, params, episode)
    leaf = {n: p.clone().requires_grad_() for n, p in params.items()}
    x = episode.query.x.flatten(0, 1)
    hidden = torch.tanh(x @ leaf["layer1.weight"].T + leaf["layer1.bias"])
    out = hidden @ leaf["head.weight"].T + leaf["head.bias"]
    loss = torch.nn.functional.cross_entropy(out, episode.query.y.flatten())
    theirs = torch.autograd.grad(loss, list(leaf.values()))
    for name, expected in zip(leaf, theirs, strict=True):
        torch.testing.assert_close(ours[name], expected, rtol=1e-12, atol=1e-14)


def test_fomaml_is_the_query_gradient_at_the_adapted_parameters():
    learner = built("fomaml")
    params, episode = make_params(learner), make_episode()
    ours = outer_step(learner, params, episode).rows
    start = Start(
        {n: p[None].expand(2, *p.shape).clone().requires_grad_() for n, p in params.items()}
    )
    theta = learner.fit(start, episode.support).state
    end = {n: t.detach().requires_grad_() for n, t in theta.items()}
    losses = cross_entropy(MODEL(end, episode.query.x), episode.query.y)
    for name, expected in zip(
        end, torch.autograd.grad(losses.sum(), list(end.values())), strict=True
    ):
        torch.testing.assert_close(ours[name], expected, rtol=1e-12, atol=1e-14)


def test_anil_is_meta_sgd_with_body_rates_zero():
    params = make_params(MAML(LOOP))
    ours = gradients(built("anil"), params)
    rates = {f"rate/{n}": torch.full_like(p, 0.5 * n.startswith("head")) for n, p in params.items()}
    theirs = gradients(MetaSGD(LOOP), {**params, **rates})
    for name in params:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-14)


def test_boil_leaves_the_head_where_it_is():
    learner = built("boil")
    params, episode = make_params(learner), make_episode()
    start = Start({n: p[None].expand(2, *p.shape) for n, p in params.items()})
    theta = learner.fit(start, episode.support, graph=False).state
    for name in params:
        moved = not torch.equal(theta[name], start.theta[name])
        assert moved == (name not in MODEL.head)


@pytest.mark.parametrize("shape", ["per_element", "per_tensor", "scalar"])
def test_meta_sgd_with_a_constant_rate_is_maml(shape):
    maml, meta_sgd = MAML(LOOP), MetaSGD(LOOP, rate_shape=shape, rate_init=(0.5, 0.5))
    params = make_params(maml)
    full = double(meta_sgd.init(torch.Generator().manual_seed(0))) | params
    ours, theirs = gradients(meta_sgd, full), gradients(maml, params)
    for name in params:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-14)


def test_meta_sgd_rate_gradient_after_one_step_is_minus_own_times_query_gradient():
    loop = InnerLoop(MODEL, steps=1)
    learner = MetaSGD(loop, rate_init=(0.1, 0.9))
    params, episode = make_params(learner), make_episode(tasks=1)
    found = gradients(learner, params, episode)
    theta = {n: p[None].clone().requires_grad_() for n, p in params.items() if "/" not in n}
    g = dict(zip(theta, torch.autograd.grad(
        cross_entropy(MODEL(theta, episode.support.x), episode.support.y).sum(), list(theta.values())
    ), strict=True))  # fmt: skip
    end = {n: (t - params[f"rate/{n}"] * g[n]).detach().requires_grad_() for n, t in theta.items()}
    q = torch.autograd.grad(
        cross_entropy(MODEL(end, episode.query.x), episode.query.y).sum(), list(end.values())
    )
    for (name, own), query in zip(g.items(), q, strict=True):
        torch.testing.assert_close(found[f"rate/{name}"], -(own * query)[0], rtol=1e-11, atol=1e-15)


def test_the_remembered_rate_gradient_is_the_derivative_of_the_next_support_loss():
    """A18: h = dL_S(theta_1)/dalpha, against autograd through the rate itself."""
    learner = MetaSGD(InnerLoop(MODEL, steps=2), rate_init=(0.1, 0.9), rate_memory=0.1)
    params, episode = make_params(learner), make_episode(tasks=1)
    theta = {n: p[None].clone().requires_grad_() for n, p in params.items() if "/" not in n}
    rates = {n: params[f"rate/{n}"][None, None].clone().requires_grad_() for n in theta}
    h = learner.fit(Start(theta, rates), episode.support).extra_values
    loss = lambda p: cross_entropy(MODEL(p, episode.support.x), episode.support.y).sum()  # noqa: E731
    g = dict(zip(theta, torch.autograd.grad(loss(theta), list(theta.values())), strict=True))
    after = loss({n: theta[n] - rates[n][:, 0] * g[n] for n in theta})
    for name, expected in zip(theta, torch.autograd.grad(after, list(rates.values())), strict=True):
        torch.testing.assert_close(h[f"rate/{name}"], expected[:, 0], rtol=1e-11, atol=1e-15)


def test_rates_move_only_where_rates_were_recalled():
    """A18: the own h alone must not move alpha, or a task without recall were no base learner's."""
    learner = MetaSGD(InnerLoop(MODEL, steps=2), rate_init=(0.1, 0.9), rate_memory=0.5)
    plain = MetaSGD(InnerLoop(MODEL, steps=2), rate_init=(0.1, 0.9))
    params, episode = make_params(learner), make_episode(tasks=2)
    memory = make_memory("sum", learner)
    recall = memory.recall(torch.zeros(2, memory.store.key_dim).double())
    some = {n: v for n, v in recall.values.items() if "head" not in n}
    recall = recall._replace(active=torch.tensor([True, False]), values=some)
    theta = expand({n: p for n, p in params.items() if "/" not in n}, 2)
    start = learner.start(params, episode.support, base=theta)
    moved = learner._recalled_rates(
        start, learner._rate_gradients(start, episode.support, None), memory.bind(recall)
    ).rates
    for name, rate in start.rates.items():
        assert torch.equal(moved[name][1], rate[1])  # recalls nothing
        assert torch.equal(moved[name][0], rate[0]) == ("head" in name)
    memory.store.ledger.filled.zero_()
    found, base = (
        outer_step(one, params, episode, memory=memory).losses for one in (learner, plain)
    )
    assert torch.equal(found, base)


def test_the_adam_of_reptile_has_no_momentum():
    for name, beta in (("reptile", 0.0), ("maml", 0.9)):
        made = built(name, rule="adam", inner_lr=0.2)
        assert made.loop.rule == Adam(lr=0.2, betas=(beta, 0.999))


def test_reptile_moves_towards_the_solution_of_the_task():
    """On a quadratic, k SGD steps give the row (theta - c)(1 - (1 - alpha)^k)."""
    model = MLP(1, n_in=1, hidden=())
    half = lambda out, y: 0.5 * (out - y).square().mean((1, 2))  # noqa: E731
    alpha, k, c = 0.3, 4, -0.4
    learner = Reptile(InnerLoop(model, loss=half, rule=SGD(alpha), steps=k))
    params = {
        "head.weight": torch.zeros(1, 1).double(),
        "head.bias": torch.tensor([1.3], dtype=torch.float64),
    }
    x = torch.zeros(1, 1, 1, dtype=torch.float64)  # the output is the bias alone
    batch = Batch(x, torch.full_like(x, c))
    step = outer_step(learner, params, Episode(batch, batch))
    expected = (1.3 - c) * (1 - (1 - alpha) ** k)
    assert step.gradients["head.bias"].item() == pytest.approx(expected, rel=1e-13)


def test_reptile_takes_support_examples_in_turn():
    learner = Reptile(InnerLoop(MODEL, steps=3, rule=Adam(1e-2)), minibatch=2)
    seen = []
    loop = InnerLoop(
        MODEL, steps=3, loss=lambda out, y: (seen.append(y[0].tolist()), cross_entropy(out, y))[1]
    )
    params, episode = make_params(learner), make_episode(tasks=1)
    start = Start({n: p[None] for n, p in params.items()})
    Reptile(loop, minibatch=2).fit(start, episode.support)
    y = episode.support.y[0].tolist()
    assert seen == [y[:2], [y[2], y[0]], y[1:]]


def test_proto_maml_starts_as_the_prototypical_classifier():
    learner = ProtoMAML(LOOP)
    params, episode = make_params(learner), make_episode(tasks=1)
    assert not set(params) & set(MODEL.head)
    answer = predict(learner, params, episode).outputs[0][0]
    features = lambda x: torch.tanh(x @ params["layer1.weight"].T + params["layer1.bias"])  # noqa: E731
    support, y = features(episode.support.x[0]), episode.support.y[0]
    prototypes = torch.stack([support[y == c].mean(0) for c in range(N_WAY)])
    query = features(episode.query.x[0])
    distances = (query[:, None] - prototypes[None]).square().sum(-1)
    expected = query.square().sum(1, keepdim=True) - distances
    torch.testing.assert_close(answer, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(answer.argmax(1), distances.argmin(1))


def test_maml_plus_plus_with_every_switch_off_is_maml():
    params = make_params(MAML(LOOP))
    ours = gradients(MAMLPlusPlus(LOOP, multi_step_loss=False, learned_rates=False), params)
    theirs = gradients(MAML(LOOP), params)
    assert all(torch.equal(ours[n], theirs[n]) for n in params)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("epoch", [0, 1, 7, 14, 15, 100])
def test_step_weights_sum_to_one_and_move_to_the_last_step(steps, epoch):
    weights = step_weights(steps, epoch)
    assert math.fsum(weights) == pytest.approx(1, abs=1e-12)
    assert min(weights) >= 0.03 / steps - 1e-15
    assert weights[-1] == max(weights)


def test_derivative_order_is_annealed_by_the_epoch():
    learner = MAMLPlusPlus(LOOP, first_order_epochs=2, iterations_per_epoch=10)
    assert not learner.scheduled(19).traits.second_order
    assert learner.scheduled(20).traits.second_order


def test_conv4_adapts_32645_scalars_and_the_head_of_anil_4005():
    model = Conv4(5)
    theta = model.init(torch.Generator().manual_seed(0))
    count = lambda loop: sum(theta[n].numel() for n in loop.names(theta))  # noqa: E731
    assert count(InnerLoop(model)) == 32_645
    assert count(built("anil", model).loop) == 4_005
    assert count(InnerLoop(model, adapt_bn=True)) == 32_901


def test_bad_loops_are_refused():
    for wrong in ({"steps": -1}, {"order": 0}, {"adapts": "tail"}):
        with pytest.raises(REFUSALS):
            InnerLoop(MODEL, **wrong)
    with pytest.raises(ConfigError, match="per element"):
        MetaSGD(LOOP, rate_shape="scalar", rate_memory=0.1)
    with pytest.raises(ConfigError, match="minibatch"):
        Reptile(LOOP, minibatch=0)
