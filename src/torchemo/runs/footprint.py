"""How large a run is, known before its first step: parameters, and the memory slot by slot."""

import math
from typing import NamedTuple

import torch

from torchemo.config.run import EMOConfig
from torchemo.core.tree import detach
from torchemo.core.types import Batch, TaskShape
from torchemo.learners.gradient.meta_sgd import RATE
from torchemo.memory.emo import EMO
from torchemo.runs.build import remembered_shapes
from torchemo.training.trainer import Trainer

_LEDGER_BYTES = 5 * 8 + 1
"""Times, generation and recalls of a slot, and its reference bit."""


class Footprint(NamedTuple):
    """What a run holds.

    Attributes:
        parameters: Numbers that the learner meta-learns.
        emo_parameters: Numbers in key network, retrieval and aggregator.
        slots: T, the capacity of the memory; 0 without one.
        slot_bytes: Key, values, notes and book-keeping of one slot.
    """

    parameters: int
    emo_parameters: int
    slots: int
    slot_bytes: int

    @property
    def memory_bytes(self) -> int:
        """The whole memory when it is full."""
        return self.slots * self.slot_bytes


def footprint(config: EMOConfig, trainer: Trainer, shape: TaskShape) -> Footprint:
    """Return how large a run is.

    Args:
        config: Options of the memory.
        trainer: What will be trained.
        shape: What the tasks look like.
    """
    parameters = sum(p.numel() for p in trainer.learned.values())
    if trainer.emo is None:
        return Footprint(parameters, 0, 0, 0)
    own = sum(p.numel() for p in trainer.emo.parameters())
    memory = trainer.emo.memory
    key_bytes = memory.keys.element_size()
    values = _values(config, trainer)
    one = memory.key_dim * key_bytes + values * memory.value_dtype.itemsize + _LEDGER_BYTES
    if trainer.emo.consolidates:
        # Two moments of Adam for every number, and a step count; no notes: a slot is no single task.
        one += 2 * (memory.key_dim + values) * key_bytes + 8
    else:
        one += _note_bytes(config, trainer.emo, trainer, shape)
    return Footprint(parameters, own, memory.capacity, one)


def _values(config: EMOConfig, trainer: Trainer) -> int:
    """Count the numbers of one remembered value."""
    steps = trainer.learner.loop.steps if config.value.content == "per_step" else 1
    return sum(
        math.prod(shape) * (1 if name.startswith(RATE) else steps)
        for name, shape in remembered_shapes(config, trainer.learner).items()
    )


def _note_bytes(config: EMOConfig, emo: EMO, trainer: Trainer, shape: TaskShape) -> int:
    """Count the bytes of a slot's domain and, where they are kept, its prototypes and support set."""
    size = 8
    example = torch.zeros(1, shape.support, *shape.x)
    if config.memory.rekey_every is not None:
        targets = 8 if shape.kind == "classification" else 4 * shape.n_out
        size += 4 * example.numel() + shape.support * targets
    if config.value.head_align == "hungarian" and emo.encoder is not None:
        labels = torch.arange(shape.support)[None] % shape.n_out
        with torch.no_grad():
            found = emo.encoder.prototypes(
                Batch(example, labels), shape.n_out, params=detach(trainer.params)
            )
        size += found.numel() * found.element_size()
    return size
