"""Law: the meta-gradient is the derivative of the mean outer loss, in every tensor."""

import pytest
import torch
import torch.nn.functional as F

from tests.laws.cases import (
    LEARNER_CASES,
    MEMORY_CASES,
    OFFSETS,
    begin,
    make_episode,
    make_learner,
    make_memory,
    make_params,
    pairs,
    triples,
)
from torchemo.core.losses import cross_entropy
from torchemo.core.tree import leaves
from torchemo.core.types import Start
from torchemo.learners.gradient.maml_plus_plus import step_weights
from torchemo.learners.learner import OwnGradient, learned, outer_rows
from torchemo.training.predict import predict
from torchemo.training.step import outer_step

STEP, TOLERANCE = 1e-5, 1e-6
EXACT = [case for case in LEARNER_CASES if make_learner(case).traits.exact_meta_gradient]


def outer_loss(learner, params, episode, memory):
    """The mean outer loss by its values alone: no leaves, no per-task gradients."""
    start, bound, added = begin(learner, params, episode, memory)
    losses = learner.loss(learner.fit(start, episode.support, memory=bound), episode.query)
    return float((losses.detach() + added).mean())


def slope(f):
    """Fourth-order central difference of ``f`` at 0."""
    h = STEP
    return (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h)


def check(tensor, gradient, evaluate, name, generator):
    v = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    v /= v.norm()

    def along(t):
        kept = tensor.detach().clone()
        with torch.no_grad():
            tensor.copy_(kept + t * v)
        value = evaluate()
        with torch.no_grad():
            tensor.copy_(kept)
        return value

    exact = float((gradient * v).sum()) if gradient is not None else 0.0
    size = 0.0 if gradient is None else float(gradient.norm())
    assert abs(slope(along) - exact) <= TOLERANCE * size + 1e-10, name


def check_jointly(tensors, gradients, evaluate, generator):
    """As `check`, along one random direction in all tensors at once."""
    flat = torch.cat([t.detach().flatten() for t in tensors.values()])
    gradient = torch.cat(
        [gradients.get(n, torch.zeros_like(t)).flatten() for n, t in tensors.items()]
    )

    def spread():
        parts = flat.split([t.numel() for t in tensors.values()])
        for t, part in zip(tensors.values(), parts, strict=True):
            t.data.copy_(part.view(t.shape))
        return evaluate()

    check(flat, gradient, spread, "all parameters of the memory", generator)
    spread()


def grid():
    """Those of the suite whose gradient is exact."""
    for case, memory_case, rule in triples():
        costly = memory_case in ("gate", "coordinate") and case != "maml"
        marks = (pytest.mark.slow,) if costly else ()
        if case in EXACT:
            yield pytest.param(case, memory_case, rule, marks=marks)


@pytest.mark.parametrize(("case", "memory_case", "rule"), list(grid()))
def test_meta_gradient_agrees_with_finite_differences_in_every_tensor(case, memory_case, rule):
    learner = make_learner(case, rule)
    params, episode = make_params(learner), make_episode()
    memory = None if memory_case is None else make_memory(memory_case, learner)
    result = outer_step(learner, params, episode, memory=memory)
    generator = torch.Generator().manual_seed(5)
    evaluate = lambda: outer_loss(learner, params, episode, memory)  # noqa: E731
    for name, tensor in learned(learner, params).items():
        check(tensor, result.gradients[name], evaluate, name, generator)
    if memory is not None and rule == "sgd":  # the memory's own parameters do not see the rule
        check_jointly(dict(memory.named_parameters()), result.memory_gradients, evaluate, generator)
    if memory_case == OFFSETS:
        check(memory.store.keys, result.slot_key_gradient, evaluate, "slot keys", generator)


@pytest.mark.parametrize("memory_case", MEMORY_CASES)
def test_gradient_in_every_parameter_of_a_memory_agrees_with_finite_differences(memory_case):
    learner = make_learner("maml")
    params, episode = make_params(learner), make_episode()
    memory = make_memory(memory_case, learner)
    result = outer_step(learner, params, episode, memory=memory)
    generator = torch.Generator().manual_seed(6)
    evaluate = lambda: outer_loss(learner, params, episode, memory)  # noqa: E731
    for name, tensor in memory.named_parameters():
        check(tensor, result.memory_gradients.get(name), evaluate, name, generator)


def smoothed(learner, answers, y):
    """Ridge: the right class has 1 - epsilon, the others share epsilon."""
    logs, share = answers[-1].log_softmax(-1), learner.head.smoothing
    right = F.one_hot(y, logs.shape[-1]).double()
    target = right * (1 - share) + (1 - right) * share / (logs.shape[-1] - 1)
    return -(target * logs).sum(-1).mean(1)


def multi_step(learner, answers, y):
    """MAML++: query losses after every step, weighted."""
    weights = step_weights(learner.steps, learner.epoch)
    after = zip(weights, answers[1:], strict=True)
    return torch.stack([w * cross_entropy(out, y) for w, out in after]).sum(0)


OWN_LOSS = {"maml++": multi_step, "metaoptnet-ridge": smoothed, "metaoptnet-svm": smoothed}
"""Published outer losses that are not the cross-entropy of the last answer."""
MORE_THAN_ANSWERS = {"hvm", "relationnet"}
"""Losses that answers alone do not give: a divergence from what queries say, and pairs that answers normalise
by running averages. The tests of these learners hold them to their papers."""


@pytest.mark.parametrize(
    ("case", "memory_case"),
    [(c, m) for c, m in pairs(alone=True) if c in EXACT and c not in MORE_THAN_ANSWERS],
)
def test_the_outer_loss_is_that_of_the_answers(case, memory_case):
    """Training and evaluation are two ways through a learner: with a graph, and without."""
    learner = make_learner(case)
    params, episode = make_params(learner), make_episode()
    memory = None if memory_case is None else make_memory(memory_case, learner)
    answers = predict(learner, params, episode, memory=memory, batched=True).outputs
    formula = OWN_LOSS.get(case, lambda learner, answers, y: cross_entropy(answers[-1], y))
    _, _, added = begin(learner, params, episode, memory)
    expected = formula(learner, answers, episode.query.y) + added
    found = outer_step(learner, params, episode, memory=memory).losses
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", [c for c in LEARNER_CASES if c not in EXACT])
def test_where_the_gradient_is_not_exact_finite_differences_see_it(case):
    """A trait that promises less than holds would take a learner out of the law."""
    learner = make_learner(case)
    params, episode = make_params(learner), make_episode()
    step = outer_step(learner, params, episode)
    answered = lambda: float(  # noqa: E731
        cross_entropy(predict(learner, params, episode).outputs[-1], episode.query.y).mean()
    )
    generator, seen = torch.Generator().manual_seed(5), []
    for name, tensor in learned(learner, params).items():
        try:
            check(tensor, step.gradients[name], answered, name, generator)
        except AssertionError:
            seen.append(name)
    assert seen


@pytest.mark.parametrize("case", LEARNER_CASES)
def test_per_task_gradients_are_those_of_the_loss_unless_the_learner_has_its_own(case):
    learner = make_learner(case)
    params, episode = make_params(learner), make_episode()
    start, _, _ = begin(learner, params, episode)
    theta = leaves(start.theta)
    own = Start(theta, start.rates)
    fitted = learner.fit(own, episode.support)
    losses, rows = outer_rows(learner, own, fitted, episode.query, leaves=list(theta.values()))
    step = outer_step(learner, params, episode)
    for name, row in zip(theta, rows, strict=True):
        assert row.shape == theta[name].shape
        if name in step.rows:
            torch.testing.assert_close(step.rows[name], row, rtol=1e-11, atol=1e-14)
    if isinstance(learner, OwnGradient):
        return
    again = learner.loss(learner.fit(own, episode.support), episode.query)
    torch.testing.assert_close(losses, again.detach(), rtol=1e-13, atol=0)
    expected = torch.autograd.grad(again.sum(), list(theta.values()), allow_unused=True)
    for name, row, g in zip(theta, rows, expected, strict=True):
        assert torch.equal(row, torch.zeros_like(row) if g is None else g), name


def test_finite_differences_notice_a_wrong_gradient():
    """The check itself can fail: a gradient off by a millionth of a percent in one tensor is seen."""
    learner = make_learner("maml")
    params, episode = make_params(learner), make_episode()
    result = outer_step(learner, params, episode)
    name = next(iter(params))
    wrong = result.gradients[name] * (1 + 1e-4)
    with pytest.raises(AssertionError):
        check(
            params[name],
            wrong,
            lambda: outer_loss(learner, params, episode, None),
            name,
            torch.Generator().manual_seed(5),
        )
