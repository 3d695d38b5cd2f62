"""The size of a memory, told before the first step, is the size it has when it is full."""

from dataclasses import replace

import pytest
import torch

from torchemo.config.run import (
    DataConfig,
    EMOConfig,
    KeyConfig,
    LearnerConfig,
    MemoryConfig,
    ModelConfig,
    RetrievalConfig,
    RunConfig,
    TrainConfig,
    ValueConfig,
)
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.data.source import RegressionTasks, open_source
from torchemo.memory.state import saved
from torchemo.runs.experiment import build_trainer
from torchemo.runs.footprint import footprint

SLOTS = 3
POINTS = RunConfig(
    model=ModelConfig(name="mlp", hidden=(4,)),
    learner=LearnerConfig(steps=2),
    data=DataConfig(source=("regression:arml6",), n_shot=4, n_query=3),
    train=TrainConfig(tasks=2),
    emo=EMOConfig(
        memory=MemoryConfig(capacity=SLOTS),
        key=KeyConfig(embedder="pairs", dim=8, heads=2, ff=8, layers=1),
        retrieval=RetrievalConfig(k=2),
    ),
)
SPARSE = ("ledger.now", "ledger.filled", "ledger.iteration", "ledger.hand", "warm_keys")
"""What a memory holds beside its slots."""


RATES = LearnerConfig(name="meta-sgd", steps=2, rate_memory=0.1, rate_init=(0.01, 0.02))


def remembering(*, value=POINTS.emo.value, learner=POINTS.learner, **memory):
    """The run with another kind of memory."""
    store = MemoryConfig(capacity=SLOTS, **memory)
    return replace(POINTS, learner=learner, emo=replace(POINTS.emo, memory=store, value=value))


VARIANTS = {
    "first": POINTS,
    "per step": remembering(value=ValueConfig(content="per_step")),
    "bfloat16": remembering(value_dtype="bfloat16"),
    "re-keyed": remembering(rekey_every=2),
    "rates": remembering(learner=RATES),
    "rates per step": remembering(learner=RATES, value=ValueConfig(content="per_step")),
    "consolidated": remembering(write="consolidate", warmup=2, value=ValueConfig(content="meta")),
}


def held_bytes(memory):
    assert len(memory) == SLOTS
    held = {n: t for n, t in saved(memory).items() if n not in SPARSE}
    return sum(t.numel() * t.element_size() for t in held.values())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_size_told_before_is_the_size_after(name):
    config = VARIANTS[name]
    source = open_source(config.data)
    assert isinstance(source, RegressionTasks)
    trainer = build_trainer(config, source.shape)
    told = footprint(config.emo, trainer, source.shape)
    for start in range(0, 10, 2):
        trainer.step(source.sample("train", seed=0, start=start, count=2))
    memory = trainer.emo.memory
    assert told.memory_bytes == held_bytes(memory)


def test_prototypes_and_support_sets_of_pictures_are_counted():
    shape = TaskShape("classification", (3, 16, 16), 2, n_shot=1)
    config = RunConfig(
        model=ModelConfig(filters=2),
        learner=LearnerConfig(steps=1),
        emo=EMOConfig(
            memory=MemoryConfig(capacity=SLOTS, rekey_every=9),
            key=KeyConfig(dim=8, heads=2, ff=8, layers=1),
            value=ValueConfig(head_align="hungarian"),
        ),
    )
    trainer = build_trainer(config, shape)
    told = footprint(config.emo, trainer, shape)
    batch = Batch(torch.rand(SLOTS, 2, *shape.x), torch.arange(2).repeat(SLOTS, 1))
    trainer.step(Episode(batch, batch, domain=torch.zeros(SLOTS, dtype=torch.int64)))
    assert told.memory_bytes == held_bytes(trainer.emo.memory)


def test_parameters_are_counted_and_no_memory_takes_no_room():
    config = replace(POINTS, emo=EMOConfig(memory=MemoryConfig(capacity=0)))
    shape = open_source(config.data).shape
    told = footprint(config.emo, build_trainer(config, shape), shape)
    # 2 inputs, 4 hidden units, 1 output.
    assert told == (2 * 4 + 4 + 4 + 1, 0, 0, 0)
    assert told.memory_bytes == 0
