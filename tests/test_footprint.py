"""The size of a memory, told before the first step, is the size it has when it is full."""

from dataclasses import replace

import pytest

from torchemo.build import TaskShape
from torchemo.config import (
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
from torchemo.experiment import build_trainer
from torchemo.footprint import footprint
from torchemo.memory_state import saved
from torchemo.source import RegressionTasks, open_source

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


def variants():
    emo = POINTS.emo
    yield "first", POINTS
    yield "per step", replace(POINTS, emo=replace(emo, value=ValueConfig(content="per_step")))
    yield (
        "bfloat16",
        replace(
            POINTS, emo=replace(emo, memory=MemoryConfig(capacity=SLOTS, value_dtype="bfloat16"))
        ),
    )
    yield (
        "re-keyed",
        replace(POINTS, emo=replace(emo, memory=MemoryConfig(capacity=SLOTS, rekey_every=2))),
    )
    yield (
        "rates",
        replace(
            POINTS,
            learner=LearnerConfig(
                name="meta-sgd", steps=2, rate_memory=0.1, rate_init=(0.01, 0.02)
            ),
        ),
    )
    yield (
        "consolidated",
        replace(
            POINTS,
            emo=replace(
                emo,
                memory=MemoryConfig(capacity=SLOTS, write="consolidate", warmup=2),
                value=ValueConfig(content="meta"),
            ),
        ),
    )


VARIANTS = dict(variants())


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
    assert len(memory) == SLOTS
    held = {n: t for n, t in saved(memory).items() if n not in SPARSE}
    assert told.memory_bytes == sum(t.numel() * t.element_size() for t in held.values())


def test_prototypes_for_head_alignment_are_counted():
    shape = TaskShape("classification", (3, 16, 16), 2, n_shot=1)
    config = RunConfig(
        model=ModelConfig(filters=2),
        emo=EMOConfig(
            memory=MemoryConfig(capacity=2),
            key=KeyConfig(dim=8, heads=2, ff=8, layers=1),
        ),
    )
    aligned = replace(config, emo=replace(config.emo, value=ValueConfig(head_align="hungarian")))
    sizes = [footprint(c.emo, build_trainer(c, shape), shape).slot_bytes for c in (config, aligned)]
    # Two prototypes of 8 numbers in float32.
    assert sizes[1] - sizes[0] == 2 * 8 * 4


def test_parameters_are_counted_and_no_memory_takes_no_room():
    config = replace(POINTS, emo=EMOConfig(memory=MemoryConfig(capacity=0)))
    shape = open_source(config.data).shape
    told = footprint(config.emo, build_trainer(config, shape), shape)
    # 2 inputs, 4 hidden units, 1 output.
    assert told == (2 * 4 + 4 + 4 + 1, 0, 0, 0)
    assert told.memory_bytes == 0
