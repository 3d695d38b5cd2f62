"""What a recall was worth: age, likeness of domain, and how recalled and own values agree (A23, A25)."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torchemo.core.tree import norms
from torchemo.core.types import Params, Recall
from torchemo.memory.aggregators import weighted_sum
from torchemo.memory.store import EpisodicMemory

NEGLIGIBLE = 1e-6
"""Share of a task's largest gradient below which another is rounding."""


class RecallStatistics(NamedTuple):
    """Means over the tasks of a batch; None where a batch cannot tell.

    Attributes:
        age: Batches since the recalled slots were written.
        distance: Distance to them.
        same_domain: Share of recall weight on slots of the task's own domain.
        cosine: Cosine of the recalled mean and the task's own value, per tensor that has one.
        norm_ratio: Norm of the recalled mean over that of the task's own value, per tensor that has one.
    """

    age: float | None
    distance: float | None
    same_domain: float | None
    cosine: dict[str, float]
    norm_ratio: dict[str, float]


def recall_statistics(
    memory: EpisodicMemory,
    recall: Recall,
    values: Params,
    *,
    domain: Int[Tensor, " task"] | None = None,
) -> RecallStatistics:
    """Compare what was recalled with what the tasks themselves leave behind; call before `remember`.

    Args:
        memory: The memory that was read.
        recall: What it recalled.
        values: The tasks' own values, of the structure of the remembered ones.
        domain: Domains of the tasks.
    """
    pending = pending_statistics(memory, recall, values, domain=domain)
    found: RecallStatistics = fetched([pending])[0]
    return found


class Pending(NamedTuple):
    """Statistics whose numbers are still on the device; NaN where a batch cannot tell.

    Attributes:
        age: Batches since the recalled slots were written, known on the host.
        names: Names of the numbers.
        numbers: The numbers.
    """

    age: float | None
    names: tuple[str, ...]
    numbers: list[Tensor]


def pending_statistics(
    memory: EpisodicMemory,
    recall: Recall,
    values: Params,
    *,
    domain: Int[Tensor, " task"] | None = None,
) -> Pending:
    """Compute what `recall_statistics` returns without waiting for the device."""
    if recall.m == 0:
        return Pending(None, (), [])
    ages = (memory.ledger.iteration - memory.ledger.born[recall.on_host()[0]]).double()
    found = {"distance": recall.distances.mean()}
    if domain is not None and recall.notes is not None and "domain" in recall.notes:
        own = recall.notes["domain"] == domain.to(recall.slots.device)[:, None]
        weights = recall.weights.detach()
        found["same_domain"] = (weights * own).sum() / weights.sum()
    sizes = {name: norms({"": own}) for name, own in values.items()}
    largest = torch.stack([*sizes.values(), recall.distances.new_zeros(len(recall.slots))]).amax(0)
    for name, own in values.items():
        if name in recall.values and recall.values[name].shape[2:] == own.shape[1:]:
            # Biases before a normalisation have no gradient but rounding: nothing can agree with it.
            there = sizes[name] > NEGLIGIBLE * largest
            recalled = _rows(weighted_sum(recall.values[name], recall.weights.detach()))
            cosines = torch.cosine_similarity(recalled, _rows(own))
            found[f"cosine/{name}"] = _mean(cosines, there)
            found[f"norm_ratio/{name}"] = _mean(norms({"": recalled}) / sizes[name], there)
    return Pending(float(ages.mean()), tuple(found), list(found.values()))


def fetched(pending: Sequence[Pending], *further: Tensor) -> list[Any]:
    """Fetch statistics, and further single numbers after them, in one wait."""
    numbers = [n for one in pending for n in one.numbers] + list(further)
    values = iter(torch.stack([n.to(numbers[0]) for n in numbers]).tolist() if numbers else ())
    found: list[Any] = [_read(one, [next(values) for _ in one.names]) for one in pending]
    return [*found, *values]


def _read(pending: Pending, values: list[float]) -> RecallStatistics:
    known = {n: v for n, v in zip(pending.names, values, strict=True) if not math.isnan(v)}
    parts: dict[str, dict[str, float]] = {"cosine": {}, "norm_ratio": {}}
    for name, value in known.items():
        part, _, tensor = name.partition("/")
        if tensor:
            parts[part][tensor] = value
    return RecallStatistics(pending.age, known.get("distance"), known.get("same_domain"), **parts)


def _mean(numbers: Float[Tensor, " task"], there: Tensor) -> Tensor:
    """Average over the tasks that can tell; NaN if none can."""
    return torch.where(there, numbers, 0).sum() / there.sum()


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1)  # also of a single number per task
