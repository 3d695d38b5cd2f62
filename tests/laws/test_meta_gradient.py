"""Law: the meta-gradient is the derivative of the mean outer loss, in every tensor."""

import pytest
import torch

from tests.laws.cases import (
    EMO_CASES,
    LEARNER_CASES,
    RULE_CASES,
    make_emo,
    make_episode,
    make_learner,
    make_params,
)
from torchemo.core.losses import cross_entropy
from torchemo.core.tree import expand, select
from torchemo.learners.gradient.maml_plus_plus import MAMLPlusPlus, step_weights
from torchemo.learners.learner import learned, network_names
from torchemo.training.step import outer_step, predict

STEP, TOLERANCE = 1e-5, 1e-6
EXACT = [case for case in LEARNER_CASES if make_learner(case).traits.exact_meta_gradient]


def outer_loss(learner, params, episode, emo):
    """The mean outer loss by the evaluation path: no graph, no leaves, no rows."""
    answers = predict(learner, params, episode, emo=emo, batched=True)
    if isinstance(learner, MAMLPlusPlus) and learner.multi_step_loss:
        weights = [0.0, *step_weights(learner.loop.steps, learner.epoch)]
    else:
        weights = [0.0] * learner.loop.steps + [1.0]
    losses = [
        w * cross_entropy(out, episode.query.y) for w, out in zip(weights, answers, strict=True)
    ]
    theta = select(params, network_names(params))
    with torch.no_grad():  # what the learner adds before any adaptation
        start = learner.start(params, episode.support, base=expand(theta, len(answers[0])))
    added = 0.0 if start.auxiliary is None else float(start.auxiliary.mean())
    return float(torch.stack(losses).sum(0).mean()) + added


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

    check(flat, gradient, spread, "all parameters of EMO", generator)
    spread()


def grid():
    """Every learner x aggregator x rule; the unit tier takes each pair of two of them once."""
    for case in EXACT:
        for emo_case in (None, *EMO_CASES):
            for rule in RULE_CASES:
                often = rule == "sgd" or case == "maml" or emo_case is None
                costly = emo_case in ("gate", "coordinate") and case != "maml"
                marks = () if often and not costly else (pytest.mark.slow,)
                yield pytest.param(case, emo_case, rule, marks=marks)


@pytest.mark.parametrize(("case", "emo_case", "rule"), list(grid()))
def test_meta_gradient_agrees_with_finite_differences_in_every_tensor(case, emo_case, rule):
    learner = make_learner(case, rule)
    params, episode = make_params(learner), make_episode()
    emo = None if emo_case is None else make_emo(emo_case, learner)
    result = outer_step(learner, params, episode, emo=emo)
    generator = torch.Generator().manual_seed(5)
    evaluate = lambda: outer_loss(learner, params, episode, emo)  # noqa: E731
    for name, tensor in learned(learner, params).items():
        check(tensor, result.gradients[name], evaluate, name, generator)
    if emo is not None and rule == "sgd":  # EMO's own parameters do not see the rule
        check_jointly(dict(emo.named_parameters()), result.emo_gradients, evaluate, generator)
    if emo is not None and emo.consolidates:
        check(emo.memory.keys, result.recall.slot_keys.grad, evaluate, "slot keys", generator)


@pytest.mark.parametrize("emo_case", EMO_CASES)
def test_gradient_in_every_parameter_of_emo_agrees_with_finite_differences(emo_case):
    learner = make_learner("maml")
    params, episode = make_params(learner), make_episode()
    emo = make_emo(emo_case, learner)
    result = outer_step(learner, params, episode, emo=emo)
    generator = torch.Generator().manual_seed(6)
    evaluate = lambda: outer_loss(learner, params, episode, emo)  # noqa: E731
    for name, tensor in emo.named_parameters():
        check(tensor, result.emo_gradients.get(name), evaluate, name, generator)


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
