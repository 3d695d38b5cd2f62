"""Validation tasks looked at again with the best checkpoint: where their keys lie and what they recall."""

from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torchemo.core.types import Episode, Recall
from torchemo.data.source import TaskSource
from torchemo.memory.interface import TaskMemory
from torchemo.runs.load import Opened
from torchemo.runs.train import VALIDATION_SEED

PROBES = 64
"""Validation tasks whose keys are shown."""

_BATCH = 8


class Probe(NamedTuple):
    """Validation tasks 0 .. n - 1 as the memory sees them.

    Attributes:
        keys: Their keys.
        domain: Their domains.
        weights: Recall weight that each puts on each filled slot.
    """

    keys: Float[Tensor, "task dim"]
    domain: Int[Tensor, " task"]
    weights: Float[Tensor, "task slot"]


def validation_tasks(
    source: TaskSource, *, start: int, count: int, queries: bool = True
) -> Episode:
    """Draw the tasks that every validation of a run uses, if need be with few queries.

    Without ``queries``, tasks of images have one query per class, which leaves their support sets as they
    are. Tasks of points always keep theirs, because their support depends on it.
    """
    few = not queries and source.shape.kind == "classification"
    return source.sample(
        "val", seed=VALIDATION_SEED, start=start, count=count, n_query=1 if few else None
    )


def first_of_each_domain(source: TaskSource, *, at_most: int) -> list[int]:
    """Return the number of the first validation task of each domain, in the order of the domains."""
    first: dict[int, int] = {}
    for number in range(PROBES):
        episode = validation_tasks(source, start=number, count=1, queries=False)
        if episode.domain is not None:
            first.setdefault(int(episode.domain[0]), number)
        if len(first) == len(source.domains):
            break
    return [number for _, number in sorted(first.items())][:at_most]


def probe(opened: Opened) -> Probe | None:
    """Encode validation tasks and read the memory for them; None if the run has no memory."""
    memory = opened.system.memory
    if memory is None:
        return None
    parts = [
        _look(opened, memory, validation_tasks(opened.source, start=i, count=_BATCH, queries=False))
        for i in range(0, PROBES, _BATCH)
    ]
    return Probe(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _look(opened: Opened, memory: TaskMemory, episode: Episode) -> Probe:
    # What is recalled does not depend on inner steps, so that none are taken.
    recall = cast(Recall, opened.system.predict(episode, steps=0, every_step=False).recall)
    weights = recall.keys.new_zeros(len(recall.keys), len(memory.store))
    weights = weights.scatter_add(1, recall.slots, recall.weights)
    unknown = torch.full((len(recall.keys),), -1)
    return Probe(recall.keys, unknown if episode.domain is None else episode.domain, weights)
