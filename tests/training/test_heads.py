"""Head-only learners: trunks once, heads together, and the result of the loop over tasks."""

from dataclasses import replace

import pytest
import torch

from torchemo.config.run import (
    AggregatorConfig,
    EMOConfig,
    KeyConfig,
    MemoryConfig,
    RetrievalConfig,
    ValueConfig,
)
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.learners import InnerLoop, MetaSGD, ProtoMAML, Reptile, anil
from torchemo.models import MLP, Conv4
from torchemo.runs.build import build_emo
from torchemo.training import heads, step
from torchemo.training.step import outer_step, predict

WAY, TASKS = 3, 3
LOOP = InnerLoop(Conv4(WAY, image_size=16, filters=4), steps=2)
HEAD = replace(LOOP, adapts="head")
LEARNERS = {
    "anil": anil(LOOP),
    "first order": anil(replace(LOOP, order=1)),
    "proto": ProtoMAML(HEAD, n_way=WAY),
    "meta-sgd": MetaSGD(HEAD),
    "reptile": Reptile(HEAD),
    "group norm": anil(replace(LOOP, model=replace(LOOP.model, bn="group", groups=2))),
}


def episode(tasks=TASKS):
    g = torch.Generator().manual_seed(1)

    def batch(per_class):
        y = torch.arange(WAY).repeat(tasks, per_class)
        return Batch(torch.rand(*y.shape, 3, 16, 16, generator=g, dtype=torch.float64), y)

    return Episode(batch(1), batch(2))


def params(learner):
    return {n: p.double() for n, p in learner.init(torch.Generator().manual_seed(0)).items()}


def memory(learner, **policy):
    config = EMOConfig(
        memory=MemoryConfig(capacity=4, value_dtype="float64"),
        key=KeyConfig(dim=8, heads=2, ff=8, layers=1),
        retrieval=RetrievalConfig(k=2),
        aggregator=AggregatorConfig(kind="sum"),
        value=ValueConfig(memory_steps="all", **policy),
    )
    emo = build_emo(config, learner, TaskShape("classification", (3, 16, 16), WAY))
    emo = emo.to(torch.float64)
    g = torch.Generator().manual_seed(2)
    shapes = {"head.weight": (WAY, 4), "head.bias": (WAY,)}
    values = {n: torch.randn(4, *s, generator=g, dtype=torch.float64) for n, s in shapes.items()}
    emo.memory.keys = emo.memory.keys.double()
    emo.memory.write(torch.randn(4, 8, generator=g, dtype=torch.float64), values)
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
            patch.setattr(step, "separable", lambda *parts: False)
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
    found = outer_step(learner, theta, tasks, emo=emo)
    loop = one_by_one(outer_step, learner, theta, tasks, emo=emo)
    for part in ("gradients", "emo_gradients", "rows", "values"):
        assert_same(getattr(found, part), getattr(loop, part))
    assert torch.allclose(found.losses, loop.losses, rtol=1e-12)
    assert torch.allclose(found.support_losses, loop.support_losses, rtol=1e-12)
    answers = predict(learner, theta, tasks, emo=emo)
    expected = one_by_one(predict, learner, theta, tasks, emo=emo)
    for a, b in zip(answers, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    assert not answers[-1].requires_grad
    (last,) = predict(learner, theta, tasks, emo=emo, every_step=False)
    assert torch.equal(last, answers[-1])


@pytest.mark.parametrize("name", ["anil", "proto"])
def test_results_are_bitwise_the_same_for_any_number_of_workers(name):
    learner, tasks = LEARNERS[name], episode(5)
    theta, emo = params(learner), memory(learner)
    one, two = (outer_step(learner, theta, tasks, emo=emo, workers=n) for n in (1, 2))
    assert all(torch.equal(one.gradients[n], two.gradients[n]) for n in one.gradients)
    first, second = (predict(learner, theta, tasks, emo=emo, workers=n) for n in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["anil", "proto"])
def test_the_trunk_sees_every_picture_once_and_the_head_loop_runs_once(monkeypatch, name):
    learner, tasks, seen, loops = LEARNERS[name], episode(), [], []
    real, adapt = Conv4.features, type(learner).adapt

    def features(self, params, x):
        seen.append(x.shape[0] * x.shape[1])
        return real(self, params, x)

    def counted(self, start, support, **more):
        loops.append(support.x.shape[0])
        return adapt(self, start, support, **more)

    monkeypatch.setattr(Conv4, "features", features)
    monkeypatch.setattr(type(learner), "adapt", counted)
    outer_step(learner, params(learner), tasks)
    assert sorted(seen) == [WAY] * TASKS + [2 * WAY] * TASKS
    assert loops == [TASKS]


@pytest.mark.parametrize(("order", "graphs"), [(1, 1), (2, 2)])
def test_first_order_keeps_no_graph_of_the_support_set(monkeypatch, order, graphs):
    learner, kept, real = anil(replace(LOOP, order=order)), [], Conv4.features

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
    model = LOOP.model
    assert heads.separable(anil(LOOP), None, None)
    for bn in ("running", "per_step_running", "per_query_with_support"):
        assert not heads.separable(anil(replace(LOOP, model=replace(model, bn=bn))), None, None)
    assert not heads.separable(replace(anil(LOOP), loop=LOOP), None, None)
    assert heads.separable(anil(InnerLoop(MLP(3, n_in=2))), None, None)
    emo = memory(anil(LOOP), recall_step="always")
    recall = emo.recall(torch.zeros(1, 8, dtype=torch.float64))
    assert heads.separable(anil(LOOP), emo, recall)
    body = recall._replace(values={**recall.values, "conv1.weight": torch.zeros(1, 2, 4, 3, 3, 3)})
    assert not heads.separable(anil(LOOP), emo, body)
