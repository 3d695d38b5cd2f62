"""The memory of a run as a map and a table: where slots lie, how old they are, who recalls them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.memory.inspection.slots import SlotView, principal_map, survey
from torchemo.memory.interface import TaskMemory
from torchemo.report.run.probe import Probe
from torchemo.runs.adapt import domain_name


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
        skipped: How many of these tasks skip recall: they are too unlike those of training, or they recall
            slots that failed validation.
        failed: Slots that failed validation.
    """

    capacity: int
    batches: int
    writes: int
    slots: list[Slot]
    key_map: KeyMap
    task_domains: list[str | None]
    domains: tuple[str, ...]
    skipped: int
    failed: tuple[int, ...] = ()

    @property
    def overwrites(self) -> int:
        """Writes that took the place of something."""
        return self.writes - len(self.slots)

    @property
    def recalls_are_equal(self) -> bool:
        """Return whether every task recalls all slots, so that only weights tell them apart."""
        return len({slot.recalls for slot in self.slots}) == 1


def view_memory(memory: TaskMemory, probe: Probe, domains: Sequence[str]) -> MemoryView:
    """Describe a memory that holds something."""
    seen = survey(memory.store)
    rows = [_slot(one, probe, domains) for one in seen.slots]
    order = sorted(range(seen.filled), key=lambda i: (-rows[i].recalls, -rows[i].weight, i))
    return MemoryView(
        capacity=seen.capacity,
        batches=seen.batches,
        writes=int(memory.store.ledger.generation.sum()),
        slots=[rows[i] for i in order],
        key_map=_key_map(memory.store.keys[: seen.filled][order], probe.keys),
        task_domains=[domain_name(domains, int(d)) for d in probe.domain],
        domains=tuple(domains),
        skipped=int((probe.weights == 0).all(1).sum()) if memory.may_skip else 0,
        failed=tuple(memory.failed_slots or ()),
    )


def _key_map(slots: Float[Tensor, "slot dim"], tasks: Float[Tensor, "task dim"]) -> KeyMap:
    places, explained = principal_map(torch.cat([slots, tasks]).detach().double())
    return KeyMap(places[: len(slots)], places[len(slots) :], explained)


def _slot(seen: SlotView, probe: Probe, domains: Sequence[str]) -> Slot:
    recalled_by, share = _who_recalls(probe, seen.slot)
    return Slot(
        number=seen.slot,
        age=seen.age,
        recalls=seen.recalls,
        generation=seen.generation,
        domain=None if seen.domain is None else domain_name(domains, seen.domain),
        weight=float(probe.weights[:, seen.slot].mean()),
        recalled_by=domain_name(domains, recalled_by),
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
