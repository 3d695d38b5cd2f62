"""The shared learner: normalisation statistics, presets, and what it refuses."""

import pytest
import torch

from tests.learners.metric.problems import (
    CASES,
    METRIC,
    MODEL,
    answers,
    begin,
    close,
    make_episode,
    make_learner,
    make_params,
    some,
)
from torchemo.config.presets import names, parts_of, preset
from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError, DataError
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.learners import LEARNERS
from torchemo.learners.build import build_learner
from torchemo.learners.hosting import host
from torchemo.learners.learner import learned, scoped
from torchemo.learners.metric.episodic import HEAD, QUERY, SUPPORT, EpisodicLearner
from torchemo.learners.metric.protonet import ProtoNet
from torchemo.memory.bound import BoundMemory
from torchemo.models import MODELS, Conv4
from torchemo.models.norm import update_running

IMAGE = (1, 16, 16)
every_case = pytest.mark.parametrize("case", CASES)


def images(case, bn):
    model = Conv4(3, in_channels=1, image_size=16, filters=6, groups=2, bn=bn)
    learner = make_learner(case, model, x=IMAGE)
    return learner, make_params(learner), make_episode(x=IMAGE)


@every_case
def test_running_statistics_are_noted_for_support_and_queries(case):
    learner, params, episode = images(case, "running")
    start = begin(learner, params, episode.support)
    fitted = learner.fit(start, episode.support)
    learner.loss(fitted, episode.query)
    passes = [(SUPPORT, start.theta, episode.support), (QUERY, fitted.state, episode.query)]
    for step, theta, batch in passes:
        expected = {}
        learner.model.at(0, sink=expected).features(theta, batch.x)
        own = {HEAD + n for n in learner.head.buffers} if step == QUERY else set()
        assert fitted.statistics[step].keys() == set(learner.model.buffers) | own
        for name, value in expected.items():
            close(fitted.statistics[step][name], value)
    kept = [*learner.model.buffers, *(HEAD + n for n in learner.head.buffers)]
    before = {n: params[n] for n in kept}
    after = update_running(before, fitted.statistics[QUERY], step=QUERY)
    assert all(not torch.equal(after[n], before[n]) for n in before)


@every_case
def test_in_training_a_batch_is_normalised_by_itself_and_the_first_statistics_are_kept(case):
    learner, params, episode = images(case, "running")
    fitted = learner.fit(begin(learner, params, episode.support), episode.support)
    whole = learner.predict(fitted, episode.query.x)
    kept = dict(fitted.statistics[QUERY])
    alone = learner.predict(fitted, episode.query.x[:, :2])
    assert not torch.allclose(alone.log_softmax(-1), whole[:, :2].log_softmax(-1))
    assert all(torch.equal(fitted.statistics[QUERY][n], kept[n]) for n in kept)


@every_case
@pytest.mark.parametrize("bn", ["running", "per_step_running"])
def test_in_evaluation_stored_statistics_are_used_and_none_are_noted(case, bn):
    learner, params, episode = images(case, bn)
    params = {n: p + 0.1 if n in learner.model.buffers else p for n, p in params.items()}
    start = begin(learner, params, episode.support)
    fitted = learner.fit(start, episode.support, graph=False)
    whole = learner.predict(fitted, episode.query.x)
    close(learner.predict(fitted, episode.query.x[:, :1]), whole[:, :1])
    assert fitted.statistics == {}
    # A head may have conditioned the network on the task.
    z = learner.model.at(SUPPORT, stored=True).features(fitted.state, episode.support.x)
    own = scoped(start.theta, HEAD)
    classifier = learner.head.fit(own, z, episode.support.y, n_way=3)
    q = learner.model.at(QUERY, stored=True).features(fitted.state, episode.query.x)
    close(whole, learner.head.logits(own, classifier, q))


@every_case
def test_running_statistics_have_no_gradient(case):
    learner, params, _ = images(case, "running")
    assert not set(learner.model.buffers) & set(learned(learner, params))
    assert set(learner.model.buffers) <= set(params)


@every_case
def test_a_query_normalised_with_the_support_set_does_not_see_the_others(case):
    learner, params, episode = images(case, "per_query_with_support")
    start = begin(learner, params, episode.support)
    fitted = learner.fit(start, episode.support)
    whole = learner.predict(fitted, episode.query.x)
    close(learner.predict(fitted, episode.query.x[:, 2:3]), whole[:, 2:3])
    both = torch.cat([episode.support.x, episode.query.x[:, 2:3]], 1)
    q = learner.model.features(fitted.state, both)[:, -1:]
    own = {n.removeprefix("head/"): t for n, t in fitted.state.items() if n.startswith("head/")}
    kept = {n.removeprefix("classifier/"): t for n, t in fitted.state.items() if "classifier/" in n}
    close(whole[:, 2:3], learner.head.logits(own, kept, q))
    loss = learner.loss(fitted, episode.query)
    assert torch.autograd.grad(loss.sum(), start.theta["conv1.weight"])[0].abs().sum() > 0


@every_case
@pytest.mark.parametrize("bn", ["layer", "group", "none", "transductive"])
def test_images_of_tasks_are_independent(case, bn):
    learner, params, episode = images(case, bn)
    whole = answers(learner, params, episode)
    close(whole[1:], answers(learner, params, some(episode, slice(1, 2))), rtol=1e-9)


@pytest.mark.parametrize("name", METRIC)
def test_presets_are_of_known_options_and_without_memories(name):
    found = {n for n in names() if parts_of(n)[0] == name}
    assert {name} <= found <= {name, f"{name}-published"}
    config = preset(name)
    shape = TaskShape("classification", (3, 32, 32), 5, base_classes=64)
    kind, options = LEARNERS.resolve(config.learner)
    network, network_options = MODELS.resolve(config.model)
    learner = kind.build(options, network.build(network_options, shape), shape)
    assert learner.title == kind.title
    assert learner.model.bn == "running"
    assert learner.n_way == 5


@every_case
def test_regression_is_refused(case):
    kind, options = LEARNERS.resolve(CASES[case])
    with pytest.raises(
        ConfigError, match=f"{kind.title} needs classes; these tasks are regression"
    ):
        kind.build(options, MODEL, TaskShape("regression", (2,), 1))
    learner, episode = make_learner(case), make_episode()
    support = Batch(episode.support.x, episode.support.x[..., :1])
    with pytest.raises(DataError, match="labels should be whole numbers"):
        learner.fit(begin(learner, make_params(learner), support), support)


@every_case
def test_a_class_without_a_support_example_is_refused(case):
    learner, episode = make_learner(case), make_episode()
    params, (x, y) = make_params(learner), episode.support
    y = torch.stack([y[0], torch.where(y[1] == 1, 2, y[1])])
    with pytest.raises(DataError, match="support set of task 1: class 1 has no example"):
        answers(learner, params, Episode(Batch(x, y), episode.query))


@every_case
def test_labels_beyond_the_classes_are_refused(case):
    learner, episode = make_learner(case), make_episode()
    params = make_params(learner)
    two = learner.for_classes(2)
    with pytest.raises(DataError, match=r"support labels of task 0: labels should lie in 0\.\.1"):
        answers(two, params, episode)
    fitted = learner.fit(begin(learner, params, episode.support), episode.support)
    with pytest.raises(DataError, match=r"query labels of task 1: labels should lie in 0\.\.2"):
        learner.loss(fitted, Batch(episode.query.x, episode.query.y + torch.tensor([[0], [1]])))


def test_one_class_is_refused():
    with pytest.raises(ConfigError, match="two classes or more, got n_way 1"):
        EpisodicLearner(MODEL, ProtoNet(), n_way=1)


@every_case
def test_a_memory_of_gradients_is_refused(case):
    learner, episode = make_learner(case), make_episode()
    assert not host(learner).inner_loop
    start = begin(learner, make_params(learner), episode.support)
    with pytest.raises(ConfigError, match="takes no inner steps") as caught:
        learner.fit(start, episode.support, memory=BoundMemory(None, None))
    assert "memory.name = offsets" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("matchingnet", "scale", 0.0),
        ("metaoptnet-ridge", "scale", -1.0),
        ("metaoptnet-ridge", "regularization", 0.0),
        ("metaoptnet-ridge", "regularization", float("inf")),
        ("metaoptnet-ridge", "smoothing", 0.5),
        ("metaoptnet-ridge", "smoothing", -0.1),
    ],
)
def test_bad_options_are_refused(name, option, value):
    tasks = TaskShape("classification", (2,), 3)
    with pytest.raises(ConfigError, match=rf"learner\.{option}'? should be .*got {value}"):
        build_learner(Part(name, {option: value}), MODEL, tasks)


def test_unknown_options_are_refused():
    with pytest.raises(ConfigError) as caught:
        LEARNERS.resolve(Part("protonet", {"regularization": 1.0}))
    assert "It is an option of metaoptnet-ridge" in caught.value.hint
