"""The size of a memory, reported before the first step, is the size it has when it is full."""

from dataclasses import replace

import pytest
import torch

from torchemo.config.registry import Part
from torchemo.config.run import DataConfig, RunConfig, TrainConfig
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.data.source import RegressionTasks, open_source
from torchemo.learners.hosting import host
from torchemo.memory.aggregators import Sum
from torchemo.memory.emo import EMO, EMOOptions
from torchemo.memory.state import saved
from torchemo.runs.experiment import build_trainer
from torchemo.runs.footprint import footprint
from torchemo.training.trainer import Trainer

SLOTS = 3
KEY = {"dim": 8, "heads": 2, "ff": 8, "layers": 1}
PAIRS = Part("transformer", {"embedder": "pairs", **KEY})
GRADIENTS = Part(
    "gradients", {"capacity": SLOTS, "k": 2, "key": PAIRS, "aggregator": Part("gated")}
)
POINTS = RunConfig(
    model=Part("mlp", {"hidden": (4,)}),
    learner=Part("maml", {"steps": 2}),
    data=DataConfig(source=("regression:arml6",), n_shot=4, n_query=3),
    train=TrainConfig(tasks=2),
    memory=GRADIENTS,
)
SPARSE = ("ledger.now", "ledger.filled", "ledger.iteration", "ledger.hand", "warm_keys")
"""What a memory holds beside its slots."""


RATES = Part("meta-sgd", {"steps": 2, "rate_memory": 0.1, "rate_init": (0.01, 0.02)})
PER_STEP = GRADIENTS.set(content="per_step")
VARIANTS = {
    "first": POINTS,
    "per step": replace(POINTS, memory=PER_STEP),
    "bfloat16": replace(POINTS, memory=GRADIENTS.set(value_dtype="bfloat16")),
    "rates": replace(POINTS, learner=RATES),
    "rates per step": replace(POINTS, learner=RATES, memory=PER_STEP),
    "offsets": replace(
        POINTS, memory=Part("offsets", {"capacity": SLOTS, "k": 2, "warmup": 2, "key": PAIRS})
    ),
}


def rekeyed(trainer, options, tasks):
    """A trainer whose memory keeps the support sets too; runs have no option for that."""
    learner = trainer.learner
    made = EMO.build(options, host(learner), tasks)
    memory = EMO(
        made.store,
        made.retrieval,
        Sum(),
        encoder=made.encoder,
        head=made.head,
        head_align=made.head_align,
        n_way=made.n_way,
        rekey_every=2,
    )
    return Trainer(learner, memory=memory)


def held_bytes(memory):
    assert len(memory) == SLOTS
    held = {n: t for n, t in saved(memory).items() if n not in SPARSE}
    # Times are saved as 64-bit numbers and kept as 32-bit ones.
    held |= {n: getattr(memory.ledger, n[7:]) for n in held if n.startswith("ledger.")}
    return sum(t.numel() * t.element_size() for t in held.values())


@pytest.mark.parametrize("name", [*VARIANTS, "re-keyed"])
def test_the_size_reported_before_is_the_size_after(name):
    config = VARIANTS.get(name, POINTS)
    source = open_source(config.data)
    assert isinstance(source, RegressionTasks)
    trainer = build_trainer(config, source.shape)
    if name == "re-keyed":
        trainer = rekeyed(trainer, EMOOptions(**GRADIENTS.options), source.shape)
    told = footprint(trainer.system, source.shape)
    for start in range(0, 10, 2):
        trainer.step(source.sample("train", seed=0, start=start, count=2))
    assert told.memory_bytes == held_bytes(trainer.memory.store)


def test_prototypes_and_support_sets_of_images_are_counted():
    shape = TaskShape("classification", (3, 16, 16), 2, n_shot=1)
    config = RunConfig(model=Part("conv4", {"filters": 2}), learner=Part("maml", {"steps": 1}))
    options = EMOOptions(capacity=SLOTS, key=Part("transformer", KEY), head_align="hungarian")
    trainer = rekeyed(build_trainer(config, shape), options, shape)
    told = footprint(trainer.system, shape)
    batch = Batch(torch.rand(SLOTS, 2, *shape.x), torch.arange(2).repeat(SLOTS, 1))
    trainer.step(Episode(batch, batch, domain=torch.zeros(SLOTS, dtype=torch.int64)))
    held = trainer.memory.store
    assert {"prototypes", "domain"} < held.notes.keys()
    assert told.memory_bytes == held_bytes(held)


def test_parameters_are_counted_and_no_memory_takes_no_room():
    config = replace(POINTS, memory=Part("none"))
    shape = open_source(config.data).shape
    told = footprint(build_trainer(config, shape).system, shape)
    # 2 inputs, 4 hidden units, 1 output.
    assert told == (2 * 4 + 4 + 4 + 1, 0, 0, 0)
    assert told.memory_bytes == 0


def test_parameters_of_a_memory_are_counted():
    shape = open_source(POINTS.data).shape
    trainer = build_trainer(POINTS, shape)
    told = footprint(trainer.system, shape)
    assert (told.parameters, told.slots) == (2 * 4 + 4 + 4 + 1, SLOTS)
    # One gate for each of four tensors, a temperature, and the key network.
    key = sum(weights.numel() for weights in trainer.memory.encoder.parameters())
    assert told.memory_parameters == 4 + 1 + key
    smaller = build_trainer(replace(POINTS, memory=Part("gradients", {"capacity": 0})), shape)
    assert footprint(smaller.system, shape).slots == 0
