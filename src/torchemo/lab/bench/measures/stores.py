"""Full memories to measure: any number of slots, filled at once."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from torchemo.config.registry import Part
from torchemo.core.rng import generator_for
from torchemo.core.types import TaskShape
from torchemo.learners.hosting import host
from torchemo.learners.learner import Learner
from torchemo.memory import MEMORIES
from torchemo.memory.aggregators import Sum
from torchemo.memory.emo import EMO
from torchemo.memory.interface import TaskMemory
from torchemo.memory.recall import Retrieval
from torchemo.memory.search import INDICES
from torchemo.memory.state import saved
from torchemo.memory.store import EpisodicMemory

K, KEY_DIM, CLUSTERS = 20, 64, 1000


def build_memory(part: Part, learner: Learner, shape: TaskShape) -> TaskMemory:
    """Make the memory that a configuration names, for a learner on such tasks."""
    kind, options = MEMORIES.resolve(part)
    made: TaskMemory = kind.build(options, host(learner), shape)
    return made


def full_of_vectors(
    slots: int,
    *,
    size: int,
    k: int = K,
    index: str = "exact",
    spread: Literal["clusters", "uniform"] = "clusters",
) -> EMO:
    """Return EMO whose full memory holds one vector of ``size`` numbers in each slot."""
    store = EpisodicMemory(slots, KEY_DIM)
    store.write(unit_keys(1, "first"), {"w": torch.ones(1, size)})
    # Slot by slot a million writes would take longer than what is measured.
    state = dict(saved(store))
    state["keys"] = unit_keys(slots, "slots", spread=spread)
    state["ledger.filled"] = torch.tensor(slots)
    state["ledger.accessed"] = state["ledger.written"] = torch.arange(1, slots + 1)
    state["ledger.generation"] = torch.ones_like(state["ledger.generation"])
    state["ledger.now"] = torch.tensor(slots)
    store.load_state_dict(state)
    emo = EMO(store, Retrieval(k, index=INDICES[index]()), Sum())
    emo.retrieval.learn(store)
    return emo


def unit_keys(
    count: int,
    name: str,
    dim: int = KEY_DIM,
    *,
    spread: Literal["clusters", "uniform"] = "uniform",
) -> Tensor:
    """Draw keys: around a thousand centres, as tasks of a thousand kinds, or everywhere alike."""
    g = generator_for(0, "keys", name)
    keys = torch.randn(count, dim, generator=g)
    if spread == "clusters":
        centres = unit_keys(CLUSTERS, "centres", dim)
        keys = centres[torch.randint(0, CLUSTERS, (count,), generator=g)] + 0.06 * keys
    return normalize(keys, dim=1)
