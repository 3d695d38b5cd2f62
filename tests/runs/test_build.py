"""Options become parts: every name is reachable, contradictions are refused with their remedy."""

from dataclasses import replace

import pytest
import torch

from torchemo.config.run import (
    AggregatorConfig,
    EMOConfig,
    KeyConfig,
    LearnerConfig,
    MemoryConfig,
    RetrievalConfig,
    ValueConfig,
)
from torchemo.core.errors import ConfigError
from torchemo.core.tree import expand
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.learners import LEARNERS
from torchemo.learners.build import build_learner
from torchemo.learners.gradient.inner import RULES
from torchemo.memory.aggregators import AGGREGATORS
from torchemo.memory.controllers import CONTROLLERS
from torchemo.models import MLP, Conv4
from torchemo.runs.build import build_emo, remembered_shapes
from torchemo.training.step import outer_step

IMAGES = TaskShape("classification", (3, 16, 16), 3)
POINTS = TaskShape("regression", (1,), 1, n_shot=5)
NET = Conv4(3, image_size=16, filters=4)


def pictures(tasks=2):
    g = torch.Generator().manual_seed(0)
    y = torch.arange(3).expand(tasks, 3).contiguous()
    return Episode(*(Batch(torch.rand(tasks, 3, 3, 16, 16, generator=g), y) for _ in range(2)))


def points(tasks=2):
    g = torch.Generator().manual_seed(0)
    rand = lambda: torch.randn(tasks, 5, 1, generator=g)  # noqa: E731
    return Episode(Batch(rand(), rand()), Batch(rand(), rand()))


SUM = AggregatorConfig(kind="sum")


def small(**changes):
    key = KeyConfig(layers=1, dim=8, heads=2, ff=8)
    return replace(EMOConfig(key=key, memory=MemoryConfig(capacity=5)), **changes)


def two_steps(learner, emo, episode):
    """Remember a batch, then use what was remembered."""
    params = learner.init(torch.Generator().manual_seed(1))
    for _ in range(2):
        step = outer_step(learner, params, episode, emo=emo)
        emo.remember(step.recall, step.values)
    assert step.recall.m > 0 or emo.consolidates
    assert all(g.isfinite().all() for g in step.gradients.values())
    return step


@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_runs_with_emo_on_pictures(name):
    learner = build_learner(LearnerConfig(name=name, steps=1), NET, IMAGES)
    two_steps(learner, build_emo(small(aggregator=SUM), learner, IMAGES), pictures())


@pytest.mark.parametrize("name", [n for n in LEARNERS if n != "proto-maml"])
def test_every_learner_runs_with_emo_on_regression(name):
    learner = build_learner(LearnerConfig(name=name, steps=1, inner_lr=0.01), MLP(1), POINTS)
    pairs = KeyConfig(embedder="pairs", layers=1, dim=8, heads=2, ff=8)
    config = small(key=pairs, aggregator=SUM)
    two_steps(learner, build_emo(config, learner, POINTS), points())


@pytest.mark.parametrize("kind", AGGREGATORS)
@pytest.mark.parametrize("controller", CONTROLLERS)
def test_every_aggregator_and_controller_can_be_named(kind, controller):
    learner = build_learner(LearnerConfig(steps=1), NET, IMAGES)
    config = small(
        aggregator=AggregatorConfig(kind=kind, layers=1),
        memory=MemoryConfig(capacity=3, controller=controller),
    )
    emo = build_emo(config, learner, IMAGES)
    assert type(emo.aggregator) is AGGREGATORS[kind]
    assert type(emo.memory.controller) is CONTROLLERS[controller]
    two_steps(learner, emo, pictures())


@pytest.mark.parametrize("content", ["first", "last", "mean", "per_step", "query", "meta"])
@pytest.mark.parametrize("align", ["none", "drop", "hungarian"])
def test_every_value_content_and_alignment_can_be_remembered(content, align):
    learner = build_learner(LearnerConfig(steps=2), NET, IMAGES)
    value = ValueConfig(content=content, head_align=align, memory_steps="all", recall_step="always")
    config = small(value=value, aggregator=AggregatorConfig(kind="sum"))
    emo = build_emo(config, learner, IMAGES)
    two_steps(learner, emo, pictures())
    head = {n for n in emo.memory.values if n.startswith("head")}
    assert bool(head) == (align != "drop")


@pytest.mark.parametrize("write", ["replace", "consolidate"])
def test_a_memory_of_scales_and_shifts_holds_and_moves_nothing_else(write):
    learner = build_learner(LearnerConfig(steps=1, adapt_bn=write == "replace"), NET, IMAGES)
    config = small(
        value=ValueConfig(content="meta", tensors="norm"),
        memory=MemoryConfig(capacity=3, write=write, warmup=1, slot_lr=0.1),
        aggregator=AggregatorConfig(kind="sum"),
    )
    emo = build_emo(config, learner, IMAGES)
    assert remembered_shapes(config, learner).keys() == set(NET.norm)
    two_steps(learner, emo, pictures())
    assert emo.memory.values.keys() == set(NET.norm)
    if write == "consolidate":
        recall = emo.recall(torch.nn.functional.normalize(torch.randn(2, 8), dim=1))
        start = expand(NET.init(torch.Generator()), 2)
        moved = emo.offset(start, recall)
        assert {n for n in start if not torch.equal(moved[n], start[n])} == set(NET.norm)


def made(learner="maml", **parts):
    """A memory of these parts for a learner on pictures, by its name or its switches."""
    chosen = LearnerConfig(name=learner) if isinstance(learner, str) else learner
    return build_emo(small(**parts), build_learner(chosen, NET, IMAGES), IMAGES)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_can_be_named(rule):
    learner = build_learner(LearnerConfig(rule=rule, inner_lr=0.3), NET, IMAGES)
    assert type(learner.loop.rule) is RULES[rule]
    assert learner.loop.rule.lr == 0.3


@pytest.mark.parametrize(
    "key",
    [
        KeyConfig(network="mean", dim=8),
        KeyConfig(network="statistics"),
        KeyConfig(embedder="shared", layers=1, dim=8, heads=2),
        KeyConfig(embedder="frozen_random", layers=1, dim=8, heads=2),
        KeyConfig(use_labels=True, layers=1, dim=8, heads=2),
    ],
    ids=lambda k: f"{k.network}-{k.embedder}",
)
def test_every_key_network_can_be_named(key):
    learner = build_learner(LearnerConfig(steps=1), NET, IMAGES)
    two_steps(learner, build_emo(small(key=key), learner, IMAGES), pictures())


def test_consolidation_with_and_without_novelty():
    learner = build_learner(LearnerConfig(steps=1), NET, IMAGES)
    for novelty, expected in ((0.0, 4), (None, 5)):
        memory = MemoryConfig(capacity=5, write="consolidate", novelty=novelty, warmup=2)
        config = small(memory=memory, value=ValueConfig(content="meta"))
        emo = build_emo(config, learner, IMAGES)
        two_steps(learner, emo, pictures())
        # Novel tasks claim slots of their own (each twice, at distance 0 the second time);
        # otherwise all slots are seeded from past keys after the warm-up.
        assert len(emo.memory) == (2 if novelty == 0.0 else expected)


def test_the_summed_conventions_scale_rates_and_values():
    learner = build_learner(LearnerConfig(inner_loss_scale="n_way"), NET, IMAGES)
    assert learner.loop.loss_scale == 3
    shape = TaskShape("classification", (3, 16, 16), 3, n_shot=5)
    scales = {"mean": 1, "sum": 15, "n_times_mean": 3}
    for reduction, scale in scales.items():
        config = small(value=ValueConfig(reduction=reduction))
        assert build_emo(config, learner, shape).policy.value_scale == scale


def test_key_training_decides_whether_the_outer_loss_reaches_the_keys():
    learner = build_learner(LearnerConfig(steps=1), NET, IMAGES)
    for training, weights, reached in (
        ("outer", "softmax", True),
        ("outer", "uniform", False),
        ("self_recognition", "softmax", False),
        ("none", "softmax", False),
    ):
        config = small(
            key=KeyConfig(layers=1, dim=8, heads=2, ff=8, training=training),
            retrieval=RetrievalConfig(weights=weights),
            aggregator=AggregatorConfig(kind="sum"),
        )
        step = two_steps(learner, build_emo(config, learner, IMAGES), pictures())
        assert any(n.startswith("encoder") for n in step.emo_gradients) == reached


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EMOConfig(key=KeyConfig(unit=False)), "unit keys"),
        (lambda: EMOConfig(memory=MemoryConfig(write="consolidate")), "content = meta"),
        (
            lambda: EMOConfig(
                memory=MemoryConfig(write="consolidate"),
                value=ValueConfig(content="meta"),
                retrieval=RetrievalConfig(weights="uniform"),
            ),
            "softmax",
        ),
        (lambda: made(memory=MemoryConfig(afterwards=1.5)), "between 0 and 1"),
        (lambda: made(memory=MemoryConfig(afterwards=0.5)), "are consolidated"),
        (lambda: build_learner(LearnerConfig(name="proto-maml"), MLP(1), POINTS), "regression"),
        (
            lambda: build_emo(small(), build_learner(LearnerConfig(), MLP(1), POINTS), POINTS),
            "pairs",
        ),
        (
            lambda: remembered_shapes(
                small(value=ValueConfig(head_align="drop")),
                build_learner(LearnerConfig(name="anil"), NET, IMAGES),
            ),
            "nothing is left",
        ),
        (
            lambda: build_emo(
                small(value=ValueConfig(tensors="norm")),
                build_learner(LearnerConfig(), NET, IMAGES),
                IMAGES,
            ),
            "nothing is left.*norm",
        ),
        (
            lambda: made(value=ValueConfig(content="meta", tensors="norm")),
            "not adapted",
        ),
        (
            lambda: made("anil", value=ValueConfig(content="meta", head_align="drop")),
            "not adapted",
        ),
        (lambda: made("reptile"), "Reptile has no outer gradient"),
        (
            lambda: made(
                LearnerConfig(name="meta-sgd", rate_memory=0.1), value=ValueConfig(content="meta")
            ),
            "inner rates",
        ),
        (lambda: made(memory=MemoryConfig(scope="group")), "groups tasks"),
        (lambda: made(memory=MemoryConfig(capacity=4, min_fill=5)), "never reached"),
        (lambda: made(memory=MemoryConfig(capacity=-1)), "capacity"),
        (lambda: made(memory=MemoryConfig(max_age=0)), "max_age"),
        (lambda: made(key=KeyConfig(network="mean", use_labels=True)), "use_labels"),
        (
            lambda: made(
                key=KeyConfig(network="learned_statistics", unit=False),
                retrieval=RetrievalConfig(k=2, weights="uniform"),
            ),
            "unit vectors",
        ),
        (
            lambda: made(
                "tsa-maml",
                memory=MemoryConfig(scope="group"),
                aggregator=AggregatorConfig(kind="sum"),
                retrieval=RetrievalConfig(index="random"),
            ),
            "searched exactly",
        ),
    ],
)
def test_contradictions_are_refused_with_their_remedy(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
