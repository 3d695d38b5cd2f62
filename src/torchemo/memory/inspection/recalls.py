"""What a recall was worth: age, likeness of domain, and how recalled and own values agree (A23, A25)."""

from typing import NamedTuple

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
    if recall.m == 0:
        return RecallStatistics(None, None, None, {}, {})
    ages = (memory.ledger.iteration - memory.ledger.born[recall.slots]).double()
    same = None
    if domain is not None and recall.notes is not None and "domain" in recall.notes:
        same = _share(recall.weights.detach(), recall.notes["domain"] == domain[:, None])
    cosine, ratio = {}, {}
    sizes = {name: norms({"": own}) for name, own in values.items()}
    largest = torch.stack([*sizes.values(), torch.zeros(len(recall.slots))]).amax(0)
    for name, own in values.items():
        if name in recall.values and recall.values[name].shape[2:] == own.shape[1:]:
            # Biases before a normalisation have no gradient but rounding: nothing can agree with it.
            there = sizes[name] > NEGLIGIBLE * largest
            if not bool(there.any()):
                continue
            recalled = _rows(weighted_sum(recall.values[name], recall.weights.detach()))[there]
            cosine[name] = float(torch.cosine_similarity(recalled, _rows(own)[there]).mean())
            ratio[name] = float((norms({"": recalled}) / sizes[name][there]).mean())
    return RecallStatistics(float(ages.mean()), float(recall.distances.mean()), same, cosine, ratio)


def _share(weights: Float[Tensor, "task m"], same: Tensor) -> float | None:
    total = float(weights.sum())
    return float((weights * same).sum()) / total if total > 0 else None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1)  # also of a single number per task
