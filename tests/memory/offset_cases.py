"""Slots that hold offsets, and a loss that is not linear in anything."""

import hashlib

import torch
import torch.nn.functional as F

from torchemo.core.rng import generator_for
from torchemo.memory.store import EpisodicMemory

DTYPE = torch.float64
SHAPES = {"w": (3, 2), "b": (3,), "s": ()}
DIM = 4


def randn(*shape, seed=0):
    return torch.randn(shape, generator=generator_for(seed, "consolidation"), dtype=DTYPE)


def unit(*shape, seed=0):
    return F.normalize(randn(*shape, seed=seed), dim=-1)


def tree(tasks, *, seed=0):
    return {
        name: randn(tasks, *shape, seed=seed + i) for i, (name, shape) in enumerate(SHAPES.items())
    }


def digest(module):
    state = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        state.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        state.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def seeded(slots=3, *, capacity=None, keys=None):
    """Return a store whose slots hold offsets of zero."""
    memory = EpisodicMemory(capacity or slots, DIM, value_dtype=DTYPE, key_dtype=DTYPE)
    memory.seed(
        unit(slots, DIM, seed=9) if keys is None else keys,
        {name: torch.Size(shape) for name, shape in SHAPES.items()},
    )
    return memory


def outer_losses(theta):
    """A loss per task that is not linear in anything."""
    targets = {"w": 0.3, "b": -0.2, "s": 0.5}
    return sum(
        (torch.sin(theta[n]) - t).square().reshape(len(theta[n]), -1).sum(1)
        for n, t in targets.items()
    )
