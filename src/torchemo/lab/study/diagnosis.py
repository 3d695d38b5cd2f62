"""What the recalls of a trained run are worth: likeness of domain, agreement, size, age (A23, A25)."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torchemo.core.types import Recall
from torchemo.memory.inspection.recalls import RecallStatistics, recall_statistics
from torchemo.runs.load import Opened
from torchemo.training.step import outer_step

SIZE = 4
"""Tasks that are looked at together."""


def diagnose(opened: Opened, *, tasks: int, split: str = "test") -> dict[str, Any]:
    """Recall for ``tasks`` unseen tasks and compare with what these tasks would leave behind.

    Nothing is learned or remembered. The cosine of offsets is taken with the *negative* outer gradient of a
    task, because slots move against it.

    Returns:
        Means over tasks: same_domain, cosine and norm_ratio (over tensors and by tensor), age, distance;
        None where nothing was recalled. ``chance`` is the same-domain rate of slots drawn at random;
        ``gate_by_tensor`` the learned shares of an aggregator with gates.
    """
    system, source = opened.system, opened.source
    memory = system.memory
    if memory is None:
        return {"tasks": 0}
    memory.eval()
    seen, recalls, domains = [], [], []
    for start in range(0, tasks, SIZE):
        episode = source.sample(split, seed=0, start=start, count=min(SIZE, tasks - start))
        step = outer_step(
            system.learner, system.params, episode, memory=memory, batched=system.batched
        )
        if step.recall is None or episode.domain is None:
            continue
        seen.append(
            recall_statistics(memory.store, step.recall, step.values, domain=episode.domain)
        )
        recalls.append(step.recall)
        domains.append(episode.domain)
    sign = -1.0 if memory.offsets_start else 1.0
    result = {"tasks": tasks, "chance": 1 / len(source.domains), **_means(seen, sign)}
    gates = getattr(memory.aggregator, "gates", None)
    if gates is not None:
        result["gate_by_tensor"] = gates()
    if memory.offsets_start and recalls and recalls[0].m:
        weights = _weights(recalls, len(memory.store))
        result["same_domain"] = slot_purity(weights, torch.cat(domains))
        result["slots_in_use"] = int((weights.mean(0) > 0.5 / weights.shape[1]).sum())
    return result


def slot_purity(weights: Float[Tensor, "task slot"], domain: Int[Tensor, " task"]) -> float | None:
    """Return the share of recall weight on slots of a task's own domain, where slots have no domain.

    A slot belongs to the domain that recalls it most among the even tasks, each domain counting the
    same; the odd tasks are then judged.
    """
    known = torch.tensor(sorted(set(domain.tolist())))
    even, odd = slice(0, None, 2), slice(1, None, 2)
    if len(domain) < 2:
        return None
    by_domain = torch.stack(
        [weights[even][domain[even] == d].mean(0).nan_to_num(0.0) for d in known]
    )
    owner = known[by_domain.argmax(0)]
    judged = weights[odd]
    own = (judged * (owner[None] == domain[odd][:, None])).sum()
    total = float(judged.sum())
    return float(own) / total if total > 0 else None


def _weights(recalls: list[Recall], slots: int) -> Float[Tensor, "task slot"]:
    rows = [
        r.weights.new_zeros(len(r.slots), slots).scatter_add(1, r.slots, r.weights.detach())
        for r in recalls
    ]
    return torch.cat(rows)


def _means(seen: list[RecallStatistics], sign: float) -> dict[str, Any]:
    tensors = {
        "cosine": _by_tensor([s.cosine for s in seen], sign),
        "norm_ratio": _by_tensor([s.norm_ratio for s in seen], 1.0),
    }
    result: dict[str, Any] = {
        name: _mean([getattr(s, name) for s in seen]) for name in ("same_domain", "age", "distance")
    }
    for name, by_tensor in tensors.items():
        result[name] = _mean(list(by_tensor.values()))
        result[f"{name}_by_tensor"] = by_tensor
    return result


def _by_tensor(seen: list[dict[str, float]], sign: float) -> dict[str, float]:
    names = seen[0] if seen else {}
    means = {name: _mean([one.get(name) for one in seen]) for name in names}
    return {name: sign * mean for name, mean in means.items() if mean is not None}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
