"""What every metric learner must obey, whatever its head."""

from dataclasses import replace

import pytest
import torch

from tests.learners.metric.problems import (
    CASES,
    MODEL,
    answers,
    begin,
    close,
    labels_of,
    make_base,
    make_episode,
    make_learner,
    make_params,
    randn,
    rows,
    some,
)
from torchemo.core.errors import ConfigError
from torchemo.core.tree import expand
from torchemo.core.types import Batch, Episode, Start
from torchemo.learners.head import Head, LinearHead
from torchemo.learners.hosting import remembered_by
from torchemo.learners.learner import AnyWay, Learner, Scheduled, StartsPerTask, scoped, steps_of
from torchemo.learners.metric.episodic import HEAD
from torchemo.learners.metric.ridge import ConvexHead
from torchemo.models import Conv4
from torchemo.training.predict import predict
from torchemo.training.step import outer_step

pytestmark = pytest.mark.parametrize("case", CASES)
ORDER = torch.tensor([2, 0, 1])
UNSEEN = ("key.bias", "score.bias")
"""What a softmax may not see: it adds the same number to all."""


def made(case, **changes):
    learner = make_learner(case)
    return learner, make_params(learner), make_episode(**changes)


def relabelled(episode, order):
    return Episode(*(Batch(b.x, order[b.y]) for b in (episode.support, episode.query)))


def test_it_is_a_learner_without_an_inner_loop_and_without_a_head_of_the_network(case):
    learner = make_learner(case)
    assert isinstance(learner, Learner)
    assert isinstance(learner, AnyWay)
    assert isinstance(learner, StartsPerTask)
    assert steps_of(learner) == 0
    assert not learner.traits.inner_loop
    assert learner.traits.reads_labels_at_start
    params = learner.init(torch.Generator().manual_seed(0))
    own = {HEAD + name for name in learner.head.init(torch.Generator())}
    own |= {name for name in params if name.startswith("state/")}
    assert set(params) - own == {"layer1.weight", "layer1.bias"}
    assert remembered_by(learner, "meta").keys() == {"layer1.weight", "layer1.bias"}


def test_gradients_agree_with_finite_differences(case):
    learner, params, episode = made(case)
    if not learner.traits.exact_meta_gradient:
        pytest.skip("declares that some gradients are cut")
    start = begin(learner, params, episode.support)
    _, found = rows(learner, start, episode)
    h = 1e-5
    for name in found:
        leaf = start.theta[name]
        v = randn(*leaf.shape, seed=7)
        ends = []
        for sign in (1, -1):
            moved = Start({**start.theta, name: leaf.detach() + sign * h * v})
            ends.append(learner.loss(learner.fit(moved, episode.support), episode.query).detach())
        slope = (ends[0] - ends[1]) / (2 * h)
        along = (found[name] * v).flatten(1).sum(1) if v.dim() > 1 else found[name] * v
        assert along.abs().min() > 1e-8 or name.endswith(UNSEEN), name
        close(along, slope, rtol=1e-6, atol=1e-10)


def test_the_head_alone_passes_gradcheck_in_support_and_query_features(case):
    learner = make_learner(case)
    y = make_episode().support.y
    params = expand(scoped(make_params(learner), HEAD), 2)

    def logits(q, z):
        return learner.head.logits(params, learner.head.fit(params, z, y, n_way=3), q)

    z, q = randn(2, 6, 5), randn(2, 5, 5, seed=1).requires_grad_()
    # Random directions: the whole matrix of a large head takes long.
    z.requires_grad_(learner.traits.exact_meta_gradient)
    assert torch.autograd.gradcheck(logits, (q, z), fast_mode=True)


def test_the_order_of_support_examples_and_of_queries_does_not_matter(case):
    learner, params, episode = made(case)
    support, query = episode.support, episode.query
    s, q = torch.tensor([4, 0, 5, 2, 1, 3]), torch.tensor([3, 5, 0, 1, 4, 2])
    s = torch.arange(6) if learner.head.ordered else s
    other = Episode(Batch(support.x[:, s], support.y[:, s]), Batch(query.x[:, q], query.y[:, q]))
    close(answers(learner, params, other), answers(learner, params, episode)[:, q])


def test_relabelling_a_task_relabels_its_answers_and_changes_no_loss(case):
    learner, params, episode = made(case)
    if not learner.traits.label_equivariant:
        pytest.skip("declares that labels have parameters of their own")
    other = relabelled(episode, ORDER)
    close(answers(learner, params, other)[..., ORDER], answers(learner, params, episode))
    before, after = (rows(learner, begin(learner, params, e.support), e) for e in (episode, other))
    close(after[0], before[0])
    for name, row in before[1].items():
        close(after[1][name], row)


def test_tasks_are_independent_and_may_begin_at_offsets_of_their_own(case):
    """An offset memory moves the start of each task before it is fitted."""
    learner, params, episode = made(case, tasks=3)
    start = begin(learner, params, episode.support)
    offset = {n: 0.3 * randn(*t.shape, seed=i) for i, (n, t) in enumerate(start.theta.items())}
    moved = {n: (t.detach() + offset[n]).requires_grad_() for n, t in start.theta.items()}
    losses, found = rows(learner, Start(moved), episode)
    assert not torch.allclose(losses, rows(learner, start, episode)[0])
    for b in range(3):
        own = {n: t[b : b + 1].detach().requires_grad_() for n, t in moved.items()}
        loss, row = rows(learner, Start(own), some(episode, slice(b, b + 1)))
        close(losses[b : b + 1], loss)
        for name, expected in row.items():
            close(found[name][b : b + 1], expected)


def test_any_number_of_classes_and_of_examples_in_each(case):
    learner = make_learner(case)
    params = make_params(learner)
    for shots in ((1, 1), (4, 1, 2, 1, 3), (1,) * 7):
        if (learner.head.most_classes or len(shots)) < len(shots):
            with pytest.raises(ConfigError, match="at most"):
                learner.for_classes(len(shots))
            continue
        episode = make_episode(shots=shots)
        out = answers(learner.for_classes(len(shots)), params, episode)
        assert out.shape == (2, 2 * len(shots), len(shots))
        assert out.isfinite().all()
    assert learner.n_way == 3


def test_answers_are_right_for_labels_that_tell_and_at_chance_for_shuffled_ones(case):
    learner = make_learner(case)
    params, episode = make_params(learner), make_episode(300, (2, 2, 2), spread=8.0)
    shuffled = labels_of(300, (2, 2, 2), seed=9)
    wrong = Episode(Batch(episode.support.x, shuffled), episode.query)
    right, chance = (
        (answers(learner, params, e, graph=False).argmax(-1) == e.query.y).double().mean()
        for e in (episode, wrong)
    )
    assert right > 0.75 or learner.head.learns_to_compare
    assert abs(chance - 1 / 3) < 0.05


def test_without_a_graph_answers_are_the_same_and_nothing_is_kept(case):
    learner, params, episode = made(case)
    close(answers(learner, params, episode, graph=False), answers(learner, params, episode))
    fitted = learner.fit(begin(learner, params, episode.support), episode.support, graph=False)
    assert fitted.evaluation
    assert not any(t.requires_grad for n, t in fitted.state.items() if "classifier/" in n)


def test_the_loss_is_that_of_the_answers(case):
    learner, params, episode = made(case)
    fitted = learner.fit(begin(learner, params, episode.support), episode.support)
    logp = learner.predict(fitted, episode.query.x).log_softmax(-1).detach()
    losses = learner.loss(fitted, episode.query).tolist()
    if type(learner.head).losses not in (Head.losses, ConvexHead.losses):
        pytest.skip("has a loss of its own, tested with its paper")
    epsilon = getattr(learner.head, "smoothing", 0.0)
    y = episode.query.y
    for b in range(2):
        total = 0.0
        for q in range(y.shape[1]):
            for k in range(3):
                target = 1 - epsilon if k == y[b, q] else epsilon / 2
                total -= float(target * logp[b, q, k])
        assert losses[b] == pytest.approx(total / y.shape[1])


def test_answers_do_not_depend_on_base_classes_and_a_loss_takes_them(case):
    learner, params, episode = made(case)
    known = replace(episode, base=make_base(learner))
    step = [
        outer_step(learner.scheduled(0) if isinstance(learner, Scheduled) else learner, params, e)
        for e in (episode, known)
    ]
    assert step[1].losses.isfinite().all()
    assert all(row.isfinite().all() for row in step[1].rows.values())
    for found in (predict(learner, params, e).outputs[-1] for e in (episode, known)):
        close(found, answers(learner, params, episode, graph=False), rtol=0, atol=0)


def test_a_linear_classifier_is_a_head_for_the_network(case):
    learner, params, episode = made(case)
    fitted = learner.fit(begin(learner, params, episode.support), episode.support)
    assert (set(MODEL.head) <= set(fitted.state)) == isinstance(learner.head, LinearHead)
    if isinstance(learner.head, LinearHead):
        close(MODEL(fitted.state, episode.query.x), learner.predict(fitted, episode.query.x))


def test_float32_stays_float32(case):
    learner = make_learner(case)
    params = learner.init(torch.Generator().manual_seed(0))
    episode = make_episode()
    single = Episode(*(Batch(b.x.float(), b.y) for b in (episode.support, episode.query)))
    out = answers(learner, params, single)
    assert out.dtype == torch.float32
    assert rows(learner, begin(learner, params, single.support), single)[0].dtype == torch.float32


def test_gradients_through_convolutions_and_their_normalisation(case):
    model = Conv4(3, in_channels=1, image_size=16, filters=5, activation="softplus")
    learner = make_learner(case, model, x=(1, 16, 16))
    if not learner.traits.exact_meta_gradient:
        pytest.skip("declares that some gradients are cut")
    params, episode = make_params(learner), make_episode(x=(1, 16, 16), queries=1)
    start = begin(learner, params, episode.support)
    _, found = rows(learner, start, episode)
    h = 1e-5
    for name in ("conv1.weight", "norm2.scale", "conv4.weight"):
        v = randn(*params[name].shape, seed=3)
        ends = []
        for sign in (1, -1):
            moved = Start({**start.theta, name: start.theta[name].detach() + sign * h * v})
            ends.append(learner.loss(learner.fit(moved, episode.support), episode.query).detach())
        along = (found[name] * v).flatten(1).sum(1)
        close(along, (ends[0] - ends[1]) / (2 * h), rtol=1e-5, atol=1e-9)


def test_expanded_starts_without_a_copy_are_as_good(case):
    learner, params, episode = made(case)
    fitted = learner.fit(Start(expand(params, 2)), episode.support)
    close(learner.predict(fitted, episode.query.x), answers(learner, params, episode))
