"""The memory of a run as a picture and a table: where slots lie, how old they are, who recalls them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.emo import EMO
from torchemo.memory import EpisodicMemory
from torchemo.report.probe import Probe


class Slot(NamedTuple):
    """One row of the table of slots.

    Attributes:
        number: Which slot.
        age: Batches since it was written.
        recalls: How often its content was recalled in training.
        generation: How often it was written.
        domain: Where the task in it came from, if that was remembered.
        weight: Mean recall weight that validation tasks put on it.
        recalled_by: The domain whose validation tasks put most weight on it.
        share: That domain's share of the weight, every domain counting the same.
    """

    number: int
    age: int
    recalls: int
    generation: int
    domain: str | None
    weight: float
    recalled_by: str | None
    share: float


class KeyMap(NamedTuple):
    """Keys in the plane of their two largest principal components.

    Attributes:
        slots: Places of the filled slots.
        tasks: Places of validation tasks.
        explained: Share of the variance along either axis.
    """

    slots: Float[Tensor, "slot 2"]
    tasks: Float[Tensor, "task 2"]
    explained: tuple[float, float]


class MemoryView(NamedTuple):
    """What the report shows of a memory.

    Attributes:
        capacity: Slots there are.
        batches: Batches remembered.
        writes: Tasks written, all in all.
        slots: The filled slots, most recalled first.
        key_map: Where their keys lie, in the order of ``slots``.
        task_domains: Domain names of the validation tasks in ``key_map``.
        domains: All domains, in their order.
    """

    capacity: int
    batches: int
    writes: int
    slots: list[Slot]
    key_map: KeyMap
    task_domains: list[str | None]
    domains: tuple[str, ...]

    @property
    def overwrites(self) -> int:
        """Writes that took the place of something."""
        return self.writes - len(self.slots)

    @property
    def recalls_are_equal(self) -> bool:
        """Whether every task recalls all slots, so that only weights tell them apart."""
        return len({slot.recalls for slot in self.slots}) == 1


def view_memory(emo: EMO, probe: Probe, domains: Sequence[str]) -> MemoryView:
    """Describe a memory that holds something."""
    memory, filled = emo.memory, len(emo.memory)
    rows = [_slot(memory, number, probe, domains) for number in range(filled)]
    order = sorted(range(filled), key=lambda i: (-rows[i].recalls, -rows[i].weight, i))
    slot_keys = memory.keys[:filled]
    return MemoryView(
        capacity=memory.capacity,
        batches=int(memory.ledger.iteration),
        writes=int(memory.ledger.generation.sum()),
        slots=[rows[i] for i in order],
        key_map=principal_plane(slot_keys[order], probe.keys),
        task_domains=[_name(domains, int(d)) for d in probe.domain],
        domains=tuple(domains),
    )


def principal_plane(slots: Float[Tensor, "slot dim"], tasks: Float[Tensor, "task dim"]) -> KeyMap:
    """Project keys on the two principal components of all of them, computed in float64.

    The sign of an axis is free; it is chosen so that its largest loading is positive.
    """
    keys = torch.cat([slots, tasks]).detach().double()
    centred = keys - keys.mean(0)
    _, singular, axes = torch.linalg.svd(centred, full_matrices=False)
    plane = torch.zeros(2, keys.shape[1], dtype=torch.float64)
    plane[: len(axes[:2])] = axes[:2]
    largest = plane.gather(1, plane.abs().argmax(1, keepdim=True))
    places = centred @ torch.where(largest < 0, -plane, plane).T
    variance = torch.cat([singular.square(), torch.zeros(2, dtype=torch.float64)])
    share = (variance[:2] / variance.sum().clamp_min(1e-300)).tolist()
    return KeyMap(places[: len(slots)], places[len(slots) :], (share[0], share[1]))


def _slot(memory: EpisodicMemory, number: int, probe: Probe, domains: Sequence[str]) -> Slot:
    ledger = memory.ledger
    note = memory.notes.get("domain")
    recalled_by, share = _who_recalls(probe, number)
    return Slot(
        number=number,
        age=int(memory.ages[number]),
        recalls=int(ledger.recalls[number]),
        generation=int(ledger.generation[number]),
        domain=None if note is None else _name(domains, int(note[number])),
        weight=float(probe.weights[:, number].mean()),
        recalled_by=_name(domains, recalled_by),
        share=share,
    )


def _who_recalls(probe: Probe, slot: int) -> tuple[int, float]:
    """Return the domain whose tasks put most weight on a slot, and its share; -1 if none does."""
    present = sorted(set(probe.domain.tolist()) - {-1})
    means = [float(probe.weights[probe.domain == d, slot].mean()) for d in present]
    if not means or max(means) <= 0:
        return -1, 0.0
    best = max(range(len(means)), key=means.__getitem__)
    return present[best], means[best] / sum(means)


def _name(domains: Sequence[str], number: int) -> str | None:
    return domains[number] if 0 <= number < len(domains) else None
