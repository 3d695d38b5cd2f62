"""Laws: what a learner declares about itself is so, and its fit holds what it promises."""

import pytest
import torch

from tests.laws.cases import (
    LEARNER_CASES,
    STEPS,
    TASKS,
    begin,
    fitting_memories,
    make_episode,
    make_learner,
    make_memory,
    make_params,
    problem,
    takes_offsets,
)
from torchemo.core.errors import ConfigError
from torchemo.core.types import Batch, Episode
from torchemo.learners import LEARNERS
from torchemo.learners.hosting import host
from torchemo.learners.learner import Learner, Stepwise, steps_of
from torchemo.memory.bound import BoundMemory
from torchemo.memory.build import remembered_shapes
from torchemo.memory.emo import EMO, EMOOptions
from torchemo.training.predict import predict

CASES = list(LEARNER_CASES)
INNER = [case for case in CASES if make_learner(case).traits.inner_loop]
CLOSED = [case for case in CASES if case not in INNER]


def fit(case, *, graph=True, **more):
    """Fit a learner to the tasks of `make_episode`."""
    learner = make_learner(case)
    params, episode = make_params(learner), make_episode()
    start, _, _ = begin(learner, params, episode)
    return learner, learner.fit(start, episode.support, graph=graph, **more), episode


def test_every_learner_is_one_and_has_a_name_of_its_own():
    made = [make_learner(name) for name in LEARNERS]
    assert all(isinstance(learner, Learner) for learner in made)
    titles = [learner.title for learner in made]
    assert all(titles)
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("case", INNER)
def test_an_inner_loop_gives_its_path_gradients_and_support_losses(case):
    learner, fitted, episode = fit(case)
    assert isinstance(learner, Stepwise)
    assert steps_of(learner) == STEPS
    assert len(fitted.path) == STEPS + 1
    assert len(fitted.gradients) == STEPS
    assert fitted.support_losses.shape == (TASKS, STEPS)
    moved = host(learner).adapted
    theta = fitted.path[0]
    assert moved
    for name in set(moved) & set(theta):
        # A head of equal rows sends the body no gradient in the first step.
        assert not torch.equal(theta[name], fitted.path[-1][name]), name
    for name in set(learner.model.init(torch.Generator())) & set(theta) - set(moved):
        assert torch.equal(theta[name], fitted.path[-1][name]), name
    whole, again = fit(case, graph=False)[1], fit(case, graph=False, steps=1)[1]
    assert len(again.path) == 2
    first, last = (learner.predict(whole, episode.query.x, step=s) for s in (1, STEPS))
    if "musml" not in case:  # the subspace is chosen after the last step, whichever that is
        assert torch.equal(first, learner.predict(again, episode.query.x))
    assert torch.equal(last, learner.predict(whole, episode.query.x))
    both = learner.predict_path(whole, episode.query.x, steps=[1, STEPS])
    assert all(torch.equal(a, b) for a, b in zip(both, (first, last), strict=True))


@pytest.mark.parametrize("case", CLOSED)
def test_without_an_inner_loop_there_are_no_steps_to_ask_for(case):
    learner, fitted, episode = fit(case)
    assert not isinstance(learner, Stepwise)
    assert steps_of(learner) == 0
    assert (fitted.path, fitted.gradients, fitted.support_losses) == ((), (), None)
    _, more, _ = fit(case, steps=7)
    answers = learner.predict(fitted, episode.query.x)
    assert torch.equal(answers, learner.predict(more, episode.query.x))
    assert torch.equal(answers, learner.predict(fitted, episode.query.x, step=3))
    params = make_params(learner)
    for every_step, steps in ((True, None), (True, 4), (False, 4)):
        found = predict(learner, params, episode, steps=steps, every_step=every_step)
        assert len(found.outputs) == 1


@pytest.mark.parametrize("case", INNER)
def test_inner_gradients_are_on_the_graph_if_and_only_if_the_learner_is_of_second_order(case):
    learner, fitted, _ = fit(case)
    kept = [g.requires_grad for gradients in fitted.gradients for g in gradients.values()]
    assert all(kept) if learner.traits.second_order else not any(kept)
    _, evaluated, _ = fit(case, graph=False)
    assert not any(t.requires_grad for t in evaluated.state.values())


@pytest.mark.parametrize("case", CASES)
def test_answers_are_the_same_with_and_without_a_graph(case):
    learner, kept, episode = fit(case)
    _, free, _ = fit(case, graph=False)
    with_graph, without = (learner.predict(one, episode.query.x) for one in (kept, free))
    torch.testing.assert_close(with_graph.detach(), without, rtol=1e-12, atol=1e-13)
    assert (kept.evaluation, free.evaluation) == (False, True)


@pytest.mark.parametrize("case", CASES)
def test_a_query_is_answered_as_if_it_were_alone(case):
    """On a network that normalises nothing."""
    learner, fitted, episode = fit(case, graph=False)
    together = learner.predict(fitted, episode.query.x)
    for i in range(episode.query.x.shape[1]):
        alone = learner.predict(fitted, episode.query.x[:, i : i + 1])
        torch.testing.assert_close(alone, together[:, i : i + 1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("case", CASES)
def test_labels_are_read_at_the_start_only_where_it_is_declared(case):
    learner = make_learner(case)
    params, episode = make_params(learner), make_episode()
    support = Batch(episode.support.x, episode.support.y.roll(1, 1))
    other = Episode(support, episode.query)
    assert not torch.equal(support.y, episode.support.y)
    a, b = (predict(learner, params, e).outputs for e in (episode, other))
    assert not torch.allclose(a[-1], b[-1])  # labels are used in the end
    if not learner.traits.reads_labels_at_start:
        assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("case", CLOSED)
def test_a_memory_of_gradients_is_refused_where_no_step_could_take_them(case):
    learner = make_learner(case)
    with pytest.raises(ConfigError, match=f"{learner.title} takes no gradient steps"):
        EMO.build(EMOOptions(), host(learner), problem.shape)
    with pytest.raises(ConfigError, match="nothing is left to remember"):
        remembered_shapes(host(learner), "first")
    emo = make_memory("sum", make_learner("maml"))
    params, episode = make_params(learner), make_episode()
    start, _, _ = begin(learner, params, episode)
    bound = BoundMemory(emo, emo.recall(emo.encode(episode.support)))
    with pytest.raises(ConfigError, match="no inner steps"):
        learner.fit(start, episode.support, memory=bound)


def test_only_a_memory_of_rates_leaves_no_room_for_offsets():
    """The laws take every learner with every memory that fits; this is what they leave out."""
    refused = {case for case in CASES if not takes_offsets(make_learner(case))}
    assert refused == {"meta-sgd/rate_memory"}
    assert all(fitting_memories(case) for case in CASES)
    # Other distributions may register learners; of ours, metric ones alone have no inner loop.
    assert {c for c in CLOSED if "metric" in type(make_learner(c)).__module__} == set(CLOSED)
