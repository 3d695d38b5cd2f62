"""BMG: its identity with MAML, its target, and what no gradient goes through."""

import pytest
import torch

from tests.laws.cases import make_memory
from tests.learners.gradient.problems import (
    make_episode,
    make_params,
    point_episode,
    points,
    vectors,
    with_maml,
)
from tests.models.oracles import REFUSALS
from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy
from torchemo.core.tree import expand
from torchemo.core.types import Batch, Start
from torchemo.learners.gradient.bmg import BMG, TARGET
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.maml import MAML
from torchemo.learners.learner import Fitted, outer_rows, within
from torchemo.models import MLP
from torchemo.training.predict import predict
from torchemo.training.step import outer_step

BASES = ("maml", "anil", "boil", "meta-sgd", "maml++", "proto-maml", "arml", "hsml")
SMALL = {"task_dim": 3, "vertices": 2, "tree": (2, 2), "multi_step_loss": False}


@pytest.mark.parametrize("base", BASES)
def test_matching_parameters_one_step_ahead_is_zeta_times_the_meta_gradient(base):
    switches = {"target_steps": 1, "target_rate": 0.3, "match": "l2", "aux_weight": 0.0, **SMALL}
    learner = vectors("bmg", base=base, **switches)
    plain = vectors(base, aux_weight=0.0, **SMALL)
    params, episode = make_params(plain), make_episode()
    ours, theirs = (outer_step(one, params, episode).gradients for one in (learner, plain))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], 0.3 * theirs[name], rtol=1e-11, atol=1e-15)


def fitted_pair(learner, params, episode):
    tasks = len(episode.support.x)
    theta = {n: t.clone().requires_grad_() for n, t in expand(params, tasks).items()}
    start = Start(theta)
    return start, learner.fit(start, episode.support)


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_the_target_is_where_more_support_steps_and_one_query_step_lead(ahead):
    learner = vectors("bmg", target_steps=ahead, target_rate=0.2, match="l2")
    params, maml, _ = with_maml(learner)
    episode = make_episode()
    tasks = len(episode.support.x)
    further = maml.fit(Start(expand(params, tasks)), episode.support, steps=2 + ahead - 1).state
    end = {n: t.detach().requires_grad_() for n, t in further.items()}
    losses = cross_entropy(maml.model(end, episode.query.x), episode.query.y)
    step = torch.autograd.grad(losses.sum(), list(end.values()))
    _, fitted = fitted_pair(learner, params, episode)
    apart = sum(
        (t.detach() - 0.2 * g - fitted.path[-1][n].detach()).square().flatten(1).sum(1)
        for (n, t), g in zip(end.items(), step, strict=True)
    )
    found = outer_step(learner, params, episode).losses
    torch.testing.assert_close(found, 0.5 * apart, rtol=1e-11, atol=1e-15)
    assert (found > 0).all()


@pytest.mark.parametrize("match", ["kl", "l2"])
@pytest.mark.parametrize("kind", ["classes", "points"])
def test_the_gradient_is_that_of_the_distance_to_a_fixed_target(match, kind):
    """Finite differences of the outer loss with the target held where it was."""
    make, episode = (vectors, make_episode()) if kind == "classes" else (points, point_episode())
    learner = make("bmg", target_steps=3, match=match)
    params = make_params(learner)
    rows = outer_step(learner, params, episode).rows
    start, fitted = fitted_pair(learner, params, episode)
    target = learner._target(fitted, episode.query)
    net = learner.model

    def distance(theta):
        moved = learner.fit(Start(theta), episode.support).path[-1]
        if match == "l2":
            return 0.5 * sum((moved[n] - target[n]).square().sum() for n in target)
        out, wanted = net(moved, episode.query.x), net({**moved, **target}, episode.query.x)
        if kind == "points":
            return 0.5 * (out - wanted).square().mean(1).sum()
        p = wanted.softmax(-1)
        return (p * (p.log() - out.log_softmax(-1))).sum(-1).mean(1).sum()

    g = torch.Generator().manual_seed(0)
    for name, tensor in start.theta.items():
        v = torch.randn(tensor.shape, generator=g, dtype=torch.float64)
        h = 1e-5
        along = [
            float(distance({**start.theta, name: tensor + s * h * v}).detach()) for s in (1, -1)
        ]
        slope = (along[0] - along[1]) / (2 * h)
        assert slope == pytest.approx(float((rows[name] * v).sum()), rel=1e-6, abs=1e-10), name


def test_the_loss_is_zero_where_the_target_answers_the_same():
    learner = vectors("bmg", target_steps=1, target_rate=0.0)
    found = outer_step(learner, make_params(learner), make_episode())
    torch.testing.assert_close(found.losses, torch.zeros(2).double(), atol=1e-15, rtol=0)
    far = vectors("bmg", target_steps=3, target_rate=0.5)
    assert (outer_step(far, make_params(far), make_episode()).losses > 0).all()


def test_answers_are_those_of_the_learner_underneath():
    learner, plain = vectors("bmg", base="anil"), vectors("anil")
    params, episode = make_params(plain), make_episode()
    ours, theirs = (predict(one, params, episode).outputs for one in (learner, plain))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_target_follows_recalled_directions_and_counts_its_steps_on():
    learner = vectors("bmg", target_steps=3, match="l2")
    params, episode = make_params(learner), make_episode()
    steps, rows = [], {}
    for use in ("all", "first"):
        memory = make_memory("sum", learner, memory_steps=use)
        combine, seen = memory.combine, []

        def counted(grads, recall, *, step, theta, combine=combine, seen=seen):
            seen.append(step)
            return combine(grads, recall, step=step, theta=theta)

        memory.combine = counted
        found = outer_step(learner, params, episode, memory=memory, batched=True)
        steps.append(seen)
        rows[use] = found.losses
    assert steps == [[0, 1, 2, 3], [0, 1, 2, 3]]  # two inner steps, two towards the target
    assert not torch.allclose(rows["all"], rows["first"])


def test_annealing_underneath_continues():
    learner = vectors("bmg", base="maml++", first_order_epochs=1)
    assert not learner.scheduled(0).traits.second_order
    assert learner.scheduled(10_000).traits.second_order
    plain = vectors("bmg")
    assert plain.scheduled(10_000) is plain


def test_divergence_is_from_the_target_to_the_answers_by_hand():
    still = BMG(MAML(InnerLoop(MLP(2, n_in=1, hidden=()), steps=0)), target_rate=0.0)
    bias = {"here": torch.tensor([[0.3, -0.2]]), "target": torch.tensor([[1.0, 0.0]])}
    zero = torch.zeros(1, 2, 1)
    here, target = ({"head.weight": zero, "head.bias": b} for b in bias.values())
    leaf = {n: t.clone().requires_grad_() for n, t in here.items()}
    fitted = Fitted({**leaf, **within(TARGET, target)}, path=(leaf,))
    query = Batch(torch.ones(1, 1, 1), torch.zeros(1, 1, dtype=torch.int64))
    losses, _ = outer_rows(still, Start(leaf), fitted, query, leaves=list(leaf.values()))
    p, q = (b[0].softmax(0) for b in (bias["target"], bias["here"]))
    assert float(losses[0]) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)


def test_bad_switches_are_refused():
    for wrong in ({"target_steps": 0}, {"match": "cosine"}):
        with pytest.raises(REFUSALS):
            vectors("bmg", **wrong)
    for name in ("bmg", "musml", "tsa-maml"):
        with pytest.raises(ConfigError, match="does not go over"):
            BMG(vectors(name))
