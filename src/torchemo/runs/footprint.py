"""How large a run is, known before its first step: parameters, and the memory slot by slot."""

import math
from typing import NamedTuple

import torch

from torchemo.core.errors import ResourceError
from torchemo.core.tree import detach
from torchemo.core.types import Batch, TaskShape
from torchemo.learners.hosting import host
from torchemo.learners.learner import learned
from torchemo.memory.build import RATE, remembered_shapes
from torchemo.memory.interface import TaskMemory
from torchemo.memory.scale.segment import stride_of
from torchemo.memory.scale.segments import check_folder
from torchemo.memory.values import numbers_per_entry
from torchemo.runs.storage.durable import megabytes
from torchemo.training.device import device_memory, home
from torchemo.training.system import System

_LEDGER_BYTES = 5 * 4 + 1
"""Times, generation and recalls of a slot, and its reference bit."""


class Footprint(NamedTuple):
    """What a run holds.

    Attributes:
        parameters: Numbers that the learner meta-learns.
        memory_parameters: Numbers in key network, retrieval and aggregator.
        slots: T, the capacity of the memory; 0 without one.
        slot_bytes: Key, values, notes and book-keeping of one slot.
    """

    parameters: int
    memory_parameters: int
    slots: int
    slot_bytes: int

    @property
    def memory_bytes(self) -> int:
        """The whole memory when it is full."""
        return self.slots * self.slot_bytes


def footprint(system: System, shape: TaskShape) -> Footprint:
    """Return how large a run is."""
    parameters = sum(p.numel() for p in learned(system.learner, system.params).values())
    memory = system.memory
    if memory is None:
        return Footprint(parameters, 0, 0, 0)
    own = sum(p.numel() for p in memory.parameters())
    store = memory.store
    key_bytes = store.keys.element_size()
    values = _values(system, memory)
    one = store.key_dim * key_bytes + values * store.value_dtype.itemsize + _LEDGER_BYTES
    if memory.offsets_start:
        # Two moments of Adam for every number, and a step count; no notes: a slot is no single task.
        one += 2 * (store.key_dim + values) * key_bytes + 8
    else:
        one += _note_bytes(memory, system, shape)
    return Footprint(parameters, own, store.capacity, one)


def refuse_too_large(system: System, shape: TaskShape) -> None:
    """Refuse a memory that this machine or its folder cannot hold before its first slot is touched."""
    size = footprint(system, shape)
    device = home(system.params)
    machine = device_memory(device)
    memory = system.memory
    if memory is None:
        return
    if memory.store.values_dir is not None:
        row = stride_of(_values(system, memory) * memory.store.value_dtype.itemsize)
        check_folder(memory.store.values_dir, size.slots * row)
        return
    if machine is None or size.memory_bytes <= machine:
        return
    raise ResourceError(
        f"a memory of {size.slots} slots takes {megabytes(size.memory_bytes)},"
        f" {'this machine' if device.type == 'cpu' else device} has"
        f" {megabytes(machine)}.",
        hint="Use fewer slots (memory.capacity), or keep values in files (memory.values_dir).",
    )


def _values(system: System, memory: TaskMemory) -> int:
    """Count the numbers of one remembered value."""
    learner = host(system.learner)
    shapes = remembered_shapes(
        learner, memory.content, tensors=memory.tensors, drop_head=memory.drop_head
    )
    return sum(
        math.prod(shape)
        * numbers_per_entry(memory.content, 1 if name.startswith(RATE) else learner.steps)
        for name, shape in shapes.items()
    )


def _note_bytes(memory: TaskMemory, system: System, shape: TaskShape) -> int:
    """Count the bytes of a slot's domain and, where they are kept, its prototypes and support set."""
    size = 8
    device = home(system.params)
    example = torch.zeros(1, shape.support, *shape.x, device=device)
    if memory.keeps_support:
        targets = 8 if shape.kind == "classification" else 4 * shape.n_out
        size += 4 * example.numel() + shape.support * targets
    if memory.keeps_prototypes and memory.encoder is not None:
        labels = torch.arange(shape.support, device=device)[None] % shape.n_out
        with torch.no_grad():
            found = memory.encoder.prototypes(
                Batch(example, labels), shape.n_out, params=detach(system.params)
            )
        size += found.numel() * found.element_size()
    return size
