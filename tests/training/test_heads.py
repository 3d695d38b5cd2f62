"""Head-only learners: trunks once, heads together, and the result of the loop over tasks."""

from dataclasses import replace

import pytest
import torch

from torchemo.config.registry import Part
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.learners.gradient.anil import ANIL
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.maml import MAML
from torchemo.learners.gradient.meta_sgd import MetaSGD
from torchemo.learners.gradient.proto_maml import ProtoMAML
from torchemo.learners.gradient.reptile import Reptile
from torchemo.learners.hosting import host
from torchemo.learners.metric.episodic import EpisodicLearner
from torchemo.learners.metric.protonet import ProtoNet
from torchemo.memory.emo import EMO, EMOOptions
from torchemo.models import MLP, Conv4
from torchemo.training import heads, step
from torchemo.training import predict as predicting
from torchemo.training.predict import predict
from torchemo.training.solve import Held
from torchemo.training.step import outer_step

WAY, TASKS = 3, 3
LOOP = InnerLoop(Conv4(WAY, image_size=16, filters=4), steps=2, adapts="head")
LEARNERS = {
    "anil": ANIL(LOOP),
    "first order": ANIL(replace(LOOP, order=1)),
    "proto": ProtoMAML(LOOP, n_way=WAY),
    "meta-sgd": MetaSGD(LOOP),
    "reptile": Reptile(LOOP),
    "group norm": ANIL(replace(LOOP, model=replace(LOOP.model, bn="group", groups=2))),
}


def episode(tasks=TASKS):
    g = torch.Generator().manual_seed(1)

    def batch(per_class):
        y = torch.arange(WAY).repeat(tasks, per_class)
        return Batch(torch.rand(*y.shape, 3, 16, 16, generator=g, dtype=torch.float64), y)

    return Episode(batch(1), batch(2))


def params(learner):
    return {n: p.double() for n, p in learner.init(torch.Generator().manual_seed(0)).items()}


def memory(learner):
    options = EMOOptions(
        capacity=4,
        k=2,
        value_dtype="float64",
        memory_steps="all",
        key=Part("transformer", {"dim": 8, "heads": 2, "ff": 8, "layers": 1}),
        aggregator=Part("sum"),
    )
    emo = EMO.build(options, host(learner), TaskShape("classification", (3, 16, 16), WAY))
    emo = emo.to(torch.float64)
    g = torch.Generator().manual_seed(2)
    shapes = {"head.weight": (WAY, 4), "head.bias": (WAY,)}
    values = {n: torch.randn(4, *s, generator=g, dtype=torch.float64) for n, s in shapes.items()}
    emo.store.keys = emo.store.keys.double()
    emo.store.write(torch.randn(4, 8, generator=g, dtype=torch.float64), values)
    return emo


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-9, atol=1e-12), name


@pytest.fixture
def one_by_one(monkeypatch):
    """Return a function that runs a step as the loop over tasks, without this module."""

    def run(function, *arguments, **more):
        with monkeypatch.context() as patch:
            for module in (step, predicting):
                patch.setattr(module, "head_learner", lambda *parts: None)
            return function(*arguments, **more)

    return run


@pytest.mark.parametrize("chunk", [2, 8])
@pytest.mark.parametrize("with_memory", [False, True])
@pytest.mark.parametrize("name", LEARNERS)
def test_heads_together_give_what_a_loop_over_tasks_gives(
    one_by_one, monkeypatch, name, with_memory, chunk
):
    monkeypatch.setattr(heads, "CHUNK", chunk)
    learner, tasks = LEARNERS[name], episode()
    theta, emo = params(learner), memory(learner) if with_memory else None
    found = outer_step(learner, theta, tasks, memory=emo)
    loop = one_by_one(outer_step, learner, theta, tasks, memory=emo)
    for part in ("gradients", "memory_gradients", "rows", "values"):
        assert_same(getattr(found, part), getattr(loop, part))
    assert torch.allclose(found.losses, loop.losses, rtol=1e-12)
    assert torch.allclose(found.support_losses, loop.support_losses, rtol=1e-12)
    answers = predict(learner, theta, tasks, memory=emo).outputs
    expected = one_by_one(predict, learner, theta, tasks, memory=emo).outputs
    for a, b in zip(answers, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    assert not answers[-1].requires_grad
    (last,) = predict(learner, theta, tasks, memory=emo, every_step=False).outputs
    assert torch.equal(last, answers[-1])


@pytest.mark.parametrize("name", ["anil", "proto"])
def test_results_are_bitwise_the_same_for_any_number_of_workers(name):
    learner, tasks = LEARNERS[name], episode(5)
    theta, emo = params(learner), memory(learner)
    one, two = (outer_step(learner, theta, tasks, memory=emo, workers=n) for n in (1, 2))
    assert all(torch.equal(one.gradients[n], two.gradients[n]) for n in one.gradients)
    first, second = (predict(learner, theta, tasks, memory=emo, workers=n).outputs for n in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["anil", "proto"])
def test_the_trunk_sees_every_image_once_and_the_head_loop_runs_once(monkeypatch, name):
    learner, tasks, seen, loops = LEARNERS[name], episode(), [], []
    real, fit = Conv4.features, type(learner).fit

    def features(self, params, x):
        seen.append(x.shape[0] * x.shape[1])
        return real(self, params, x)

    def counted(self, start, support, **more):
        loops.append(support.x.shape[0])
        return fit(self, start, support, **more)

    monkeypatch.setattr(Conv4, "features", features)
    monkeypatch.setattr(type(learner), "fit", counted)
    outer_step(learner, params(learner), tasks)
    assert sorted(seen) == [WAY] * TASKS + [2 * WAY] * TASKS
    assert loops == [TASKS]


@pytest.mark.parametrize(("order", "graphs"), [(1, 1), (2, 2)])
def test_first_order_keeps_no_graph_of_the_support_set(monkeypatch, order, graphs):
    learner, kept, real = ANIL(replace(LOOP, order=order)), [], Conv4.features

    def features(self, params, x):
        out = real(self, params, x)
        kept.append(out.requires_grad)
        return out

    monkeypatch.setattr(Conv4, "features", features)
    outer_step(learner, params(learner), episode())
    assert sum(kept) == graphs * TASKS
    kept.clear()
    predict(learner, params(learner), episode())
    assert sum(kept) == 0


def test_what_moves_the_trunk_or_its_statistics_is_left_to_the_loop():
    model, anil = LOOP.model, LEARNERS["anil"]
    assert heads.head_learner(anil, None) is not None
    for bn in ("running", "per_step_running", "per_query_with_support"):
        other = ANIL(replace(LOOP, model=replace(model, bn=bn)))
        assert heads.head_learner(other, None) is None
    assert heads.head_learner(ANIL(replace(LOOP, adapts="all")), None) is None
    assert heads.head_learner(MAML(replace(LOOP, adapts="all")), None) is None
    assert heads.head_learner(EpisodicLearner(model, ProtoNet(), n_way=WAY), None) is None
    small = ANIL(InnerLoop(MLP(3, n_in=2), adapts="head"))
    assert heads.head_learner(small, None) is not None
    emo = memory(anil)
    emo.recall_step = "always"
    recall = emo.recall(torch.zeros(1, 8, dtype=torch.float64))
    assert emo.opening(recall) is not None
    assert heads.head_learner(anil, Held(emo, recall)) is not None
    body = recall._replace(
        values={**recall.values, "conv1.weight": torch.zeros(1, 2, 4, 3, 3, 3).double()}
    )
    assert heads.head_learner(anil, Held(emo, body)) is None


def test_the_learner_of_the_head_is_the_same_learner_on_features():
    for learner in LEARNERS.values():
        headed = heads.head_learner(learner, None)
        assert type(headed) is type(learner)
        assert headed.traits == learner.traits
        assert headed.model.head == learner.model.head
        x = torch.rand(2, 5, 4)
        assert headed.model.features({}, x) is x
