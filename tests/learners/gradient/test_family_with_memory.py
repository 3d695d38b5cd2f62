"""Memories on the learners that look at a task first: keys, gated gradients, memories per group."""

import pytest
import torch
from torch import nn

from tests.learners.gradient.problems import (
    IMAGES,
    POINTS,
    learner_part,
    point_episode,
    points,
)
from tests.learners.gradient.test_tsa_maml import tasks
from torchemo.config.registry import Part
from torchemo.config.run import OuterConfig
from torchemo.core.errors import ConfigError
from torchemo.core.tree import expand, select
from torchemo.core.types import Batch, Episode
from torchemo.learners import learner as seam
from torchemo.learners.build import build_learner
from torchemo.learners.hosting import host
from torchemo.learners.learner import network_names
from torchemo.memory import MEMORIES
from torchemo.memory.aggregators import Gated, Sum
from torchemo.memory.emo import EMO
from torchemo.memory.recall import Retrieval
from torchemo.memory.store import EpisodicMemory
from torchemo.models import Conv4
from torchemo.training.predict import predict
from torchemo.training.step import outer_step
from torchemo.training.trainer import Trainer

PAIRS = Part("transformer", {"embedder": "pairs", "layers": 1, "dim": 8, "heads": 2, "ff": 8})
SMALL = Part(
    "gradients",
    {
        "capacity": 6,
        "k": 2,
        "value_dtype": "float64",
        "memory_steps": "all",
        "key": PAIRS,
        "aggregator": Part("sum"),
    },
)
FAMILY = ("arml", "hsml", "tsa-maml", "bmg", "musml")
OWN_KEY = SMALL.set(key=Part("learner"))
TINY = {"task_dim": 3, "vertices": 2, "tree": (2, 2)}


def build(part, learner, tasks, **more):
    """Make the memory that a configuration names."""
    kind, options = MEMORIES.resolve(part)
    return kind.build(options, host(learner), tasks, **more)


def start_of(learner, params, support):
    theta = select(params, network_names(params))
    return seam.start_of(learner, params, support, base=expand(theta, len(support.x)))


@pytest.mark.parametrize("name", FAMILY)
def test_what_is_remembered_changes_the_next_step_of_every_learner(name):
    learner = points(name, **TINY)
    params = {n: p.double() for n, p in learner.init(torch.Generator().manual_seed(0)).items()}
    memory = build(SMALL, learner, POINTS, dtype=torch.float64)
    episode = point_episode()
    first = outer_step(learner, params, episode, memory=memory)
    assert torch.equal(first.losses, outer_step(learner, params, episode).losses)
    memory.remember(first.recall, first.values)
    second = outer_step(learner, params, episode, memory=memory)
    assert second.recall.m == 2
    assert not torch.allclose(second.losses, first.losses)


@pytest.mark.parametrize("name", ["arml", "hsml"])
def test_arml_remembers_gradients_in_its_gated_tensors(name):
    learner = points(name, **TINY)
    params = {n: p.double() for n, p in learner.init(torch.Generator().manual_seed(0)).items()}
    memory, episode = build(SMALL, learner, POINTS, dtype=torch.float64), point_episode()
    found = outer_step(learner, params, episode, memory=memory).values
    start = start_of(learner, params, episode.support)
    gated = {n: t.detach().requires_grad_() for n, t in start.theta.items()}
    out = learner.model(gated, episode.support.x)
    loss = (out - episode.support.y).square().mean((1, 2)).sum()
    theirs = torch.autograd.grad(loss, list(gated.values()))
    for tensor, expected in zip(gated, theirs, strict=True):
        torch.testing.assert_close(found[tensor], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["arml", "hsml", "bmg"])
def test_the_description_of_arml_can_be_the_key(name):
    learner = points(name, base="arml", **TINY)
    params = {n: p.double() for n, p in learner.init(torch.Generator().manual_seed(0)).items()}
    memory, episode = build(OWN_KEY, learner, POINTS, dtype=torch.float64), point_episode()
    assert memory.encoder is None
    assert memory.store.key_dim == 6
    step = outer_step(learner, params, episode, memory=memory)
    key = start_of(learner, params, episode.support).about["key"]
    assert torch.equal(step.recall.keys, key)
    memory.remember(step.recall, step.values)
    again = predict(learner, params, episode, memory=memory).recall
    assert again.slots[:, 0].tolist() == [0, 1, 2]  # every task knows itself again
    assert torch.equal(again.distances[:, 0], torch.zeros(3).double())


@pytest.mark.parametrize("name", ["maml", "arml", "hsml"])
def test_offsets_move_the_initialisation_before_any_gates(name):
    options = {"capacity": 3, "k": 2, "warmup": 1, "value_dtype": "float64"}
    chosen = Part("offsets", {**options, "key": PAIRS if name == "maml" else Part("learner")})
    learner = points(name, **TINY)
    params = {n: p.double() for n, p in learner.init(torch.Generator().manual_seed(0)).items()}
    memory, episode = build(chosen, learner, POINTS, dtype=torch.float64), point_episode()
    for _ in range(3):
        step = outer_step(learner, params, episode, memory=memory)
        gradient = step.slot_key_gradient
        memory.remember(step.recall, step.values, slot_key_gradient=gradient)
    step = outer_step(learner, params, episode, memory=memory)
    answers = predict(learner, params, episode, memory=memory).outputs
    offset = {n: s.detach() for n, s in memory.offset(step.recall).items()}
    assert all(s.abs().sum() > 0 for s in offset.values())
    for b in range(3):
        parts = (episode.support, episode.query)
        alone = Episode(*(Batch(part.x[b : b + 1], part.y[b : b + 1]) for part in parts))
        moved = {n: p + offset[n][b] if n in offset else p for n, p in params.items()}
        plain = outer_step(learner, moved, alone)
        torch.testing.assert_close(step.losses[b], plain.losses[0])
        torch.testing.assert_close(answers[-1][b], predict(learner, moved, alone).outputs[-1][0])
        for n in offset:  # what is remembered is the gradient in what the memory adds
            torch.testing.assert_close(step.values[n][b], plain.gradients[n])


def grouped(scope, capacity=12):
    stages = {"groups": 2, "first_stage": 2, "cluster_tasks": 12}
    part = Part("tsa-maml", {"inner_lr": 0.02, "steps": 2, **stages})
    learner = build_learner(part, points("maml").model, POINTS)
    chosen = SMALL.set(capacity=capacity, scope=scope, value_dtype="float32")
    memory = build(chosen, learner, POINTS)
    made = Trainer(learner, memory=memory, config=OuterConfig(lr=1e-3))
    for i in range(14):
        made.step(tasks(i))
    return made


def test_with_a_memory_per_group_a_task_recalls_its_own_group_alone():
    made = grouped("group")
    episode = tasks(30, 6)
    recall = made.system.predict(episode).recall
    own = start_of(made.learner, made.params, episode.support).about["group"]
    assert own.unique().numel() == 2
    remembered = made.memory.store.notes["group"]
    for b in range(6):
        same = remembered[recall.slots[b]] == own[b]
        assert same.any()
        assert torch.equal(recall.weights[b] > 0, same)
    shared = grouped("shared")
    assert "group" not in shared.memory.store.notes
    mixed = shared.system.predict(episode).recall
    assert (mixed.weights > 0).all()


@pytest.mark.parametrize("weights", ["uniform", "softmax"])
@pytest.mark.parametrize("aggregator", [Sum(), Gated(["w"])])
def test_a_memory_per_group_is_as_good_as_a_memory_for_each(aggregator, weights):
    for gate in aggregator.parameters():
        nn.init.constant_(gate, 0.7)

    def made(scope):
        store = EpisodicMemory(12, 3)
        return EMO(store, Retrieval(2, weights=weights), aggregator, scope=scope)

    draw = torch.Generator().manual_seed(0)
    together, apart = made("group"), [made("shared"), made("shared")]
    for _ in range(4):
        keys, grads = (torch.randn(3, n, generator=draw) for n in (3, 2))
        group = torch.randint(2, (3,), generator=draw)
        recall = together.recall(keys, group=group)
        found = together.combine({"w": grads}, recall)["w"]
        for b, g in enumerate(group.tolist()):
            own = apart[g].recall(keys[b : b + 1])
            expected = apart[g].combine({"w": grads[b : b + 1]}, own)["w"]
            torch.testing.assert_close(found[b : b + 1], expected)
        together.remember(recall, {"w": grads})
        for b, g in enumerate(group.tolist()):
            apart[g].remember(apart[g].recall(keys[b : b + 1]), {"w": grads[b : b + 1]})


def test_slots_of_another_group_are_not_kept_alive_by_a_recall():
    store = EpisodicMemory(4, 2)
    emo = EMO(store, Retrieval(4, weights="softmax"), Sum(), scope="group")
    for group in (0, 1, 0):
        recall = emo.recall(torch.randn(1, 2), group=torch.tensor([group]))
        emo.remember(recall, {"w": torch.ones(1, 2)})
    assert store.ledger.recalls[:3].tolist() == [1, 0, 0]


def test_the_family_runs_with_emo_on_images():
    net = Conv4(3, image_size=16, filters=4)
    g, y = torch.Generator().manual_seed(1), torch.arange(3).repeat(2, 1)
    episode = Episode(*(Batch(torch.rand(2, 3, 3, 16, 16, generator=g), y) for _ in range(2)))
    key = Part("transformer", {"layers": 1, "dim": 8, "heads": 2, "ff": 8})
    stages = {"first_stage": 1, "cluster_tasks": 2, "groups": 2}
    for name in FAMILY:
        learner = build_learner(learner_part(name, steps=1, **stages, **TINY), net, IMAGES)
        chosen = SMALL.set(key=key, capacity=4, value_dtype="float32")
        made = Trainer(learner, memory=build(chosen, learner, IMAGES))
        losses = [made.step(episode).losses for _ in range(4)]
        assert all(loss.isfinite().all() for loss in losses)


@pytest.mark.parametrize(
    ("chosen", "learner", "words"),
    [
        (SMALL.set(key=Part("learner")), "maml", "describes its tasks"),
        (SMALL.set(content="query"), "musml", "coordinates"),
        (SMALL.set(tensors="norm"), "musml", "nothing is left to remember of MUSML"),
        (
            SMALL.set(scope="group", aggregator=Part("mean")),
            "tsa-maml",
            "a different number of slots",
        ),
        (Part("offsets", {"key": PAIRS, "scope": "group"}), "tsa-maml", "unknown option.*scope"),
    ],
)
def test_contradictions_are_refused(chosen, learner, words):
    with pytest.raises(ConfigError, match=words):
        build(chosen, points(learner), POINTS)


def test_a_memory_per_group_is_refused_by_a_learner_without_groups():
    emo = EMO(EpisodicMemory(4, 2), Retrieval(4), Sum(), scope="group")
    with pytest.raises(ConfigError, match="groups tasks"):
        emo.recall(torch.randn(1, 2))
