"""Nearest-neighbour search over slot keys: exact, or at random for a control.

Approximate search, for 10^5 slots and more, is in `torchemo.memory.scale`.
"""

from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torchemo.config.registry import Registry
from torchemo.core.rng import generator_for
from torchemo.memory.store import EpisodicMemory


@runtime_checkable
class Index(Protocol):
    """Nearest-neighbour search over slot keys."""

    def search(
        self, keys: Float[Tensor, "task dim"], slot_keys: Float[Tensor, "slot dim"], *, m: int
    ) -> Int[Tensor, "task m"]:
        """Return the m slots nearest to each key, nearest first."""
        ...


@final
class ExactIndex:
    """Exact Euclidean search; equal distances are ordered by slot number."""

    def search(
        self, keys: Float[Tensor, "task dim"], slot_keys: Float[Tensor, "slot dim"], *, m: int
    ) -> Int[Tensor, "task m"]:
        """Return the m nearest slots of each task by (distance, slot number)."""
        # Direct subtraction: the expanded quadratic form cancels and makes near ties unstable.
        squared = (keys[:, None] - slot_keys[None]).square().sum(-1)
        return squared.sort(dim=1, stable=True).indices[:, :m]


@final
class RandomIndex:
    """A control: m different slots at random, whatever the keys say.

    The draw is a function of the seed, the key and the number of slots alone, so it is reproducible.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def search(
        self, keys: Float[Tensor, "task dim"], slot_keys: Float[Tensor, "slot dim"], *, m: int
    ) -> Int[Tensor, "task m"]:
        """Return m random slots of each task, nearest first."""
        filled = slot_keys.shape[0]
        rows = []
        for key in keys.detach():
            name = key.cpu().double().numpy().tobytes().hex()
            generator = generator_for(self.seed, "random-slots", filled, name)
            drawn = torch.randperm(filled, generator=generator)[:m].to(keys.device)
            rows.append(drawn[(slot_keys[drawn] - key).square().sum(-1).argsort(stable=True)])
        return torch.stack(rows)


@runtime_checkable
class Following(Protocol):
    """An index with a structure of its own that follows the memory's writes."""

    def follow(self, memory: EpisodicMemory) -> None:
        """Take over what was written since the last call; the memory is not changed."""
        ...

    def learn(self, memory: EpisodicMemory) -> None:
        """Learn how the keys are spread, where that is due."""
        ...


INDICES = Registry(
    "index",
    "memory.index",
    {
        "exact": "torchemo.memory.search:ExactIndex",
        "random": "torchemo.memory.search:RandomIndex",
        "approximate": "torchemo.memory.scale.approximate:ApproximateIndex",
        "ivfpq": "torchemo.memory.scale.compressed:CompressedIndex",
    },
    group="torchemo.indices",
)
