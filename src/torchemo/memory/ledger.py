"""The book-keeping of slots: when each was written, recalled and overwritten.

The ledger is the whole state of a controller (`torchemo.memory.controllers`), and saved with the memory.
In RAM a slot takes 21 bytes: times are 32-bit numbers counted from a base, and 64-bit again when saved.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, final

import torch
from jaxtyping import Int
from torch import Tensor

SPAN = 2**31 - 1
"""Events between the base and the last time that a 32-bit number can hold."""

_TIMES = ("written", "accessed")


@final
@dataclass
class Ledger:
    """Book-keeping of T slots: small integer tensors, changed in place by the memory alone.

    Times in ``written`` and ``accessed`` are counted from a base; 0 says that there is none. After 2^31
    events the base moves up. Should some slot be older than that, times are replaced by their ranks, which
    keep every order between them. `absolute` returns times as they are saved.

    Attributes:
        now: Event counter: +1 for every touched slot and every write, so access times never tie.
        filled: Occupancy n; slots 0..n-1 hold something.
        iteration: How many batches of tasks were remembered.
        written: ``now`` at the last write of each slot.
        accessed: ``now`` at the last access of each slot (a write is an access).
        referenced: CLOCK's reference bits.
        hand: CLOCK's hand.
        generation: How often each slot was written.
        born: ``iteration`` at the last write of each slot; staleness is counted from it.
        recalls: How often what the slot holds was recalled.
    """

    now: Tensor
    filled: Tensor
    iteration: Tensor
    written: Tensor
    accessed: Tensor
    referenced: Tensor
    hand: Tensor
    generation: Tensor
    born: Tensor
    recalls: Tensor

    def __post_init__(self) -> None:
        self._orders = {"written": _Order(), "accessed": _Order()}
        self._base = 0

    @classmethod
    def empty(cls, capacity: int) -> "Ledger":
        """Return the ledger of an empty memory with ``capacity`` slots."""
        scalars = {"now", "filled", "iteration", "hand"}
        return cls(
            **{
                field.name: torch.zeros(
                    () if field.name in scalars else (capacity,),
                    dtype=_kept(field.name) if field.name not in scalars else torch.int64,
                    device="cpu",
                )
                for field in fields(cls)
            }
        )

    @classmethod
    def of(cls, saved: "Ledger") -> "Ledger":
        """Return a ledger to work with from one with absolute times."""
        made = cls(*(getattr(saved, f.name).clone() for f in fields(cls)))
        if int(made.now) > SPAN:
            made._renew(0)
        for field in fields(cls):
            tensor = getattr(made, field.name)
            if tensor.dim():
                setattr(made, field.name, tensor.to(_kept(field.name)))
        return made

    def absolute(self) -> "Ledger":
        """Return a copy of 64-bit numbers with times since the beginning, as it is saved."""
        plain = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            kept = torch.bool if tensor.dtype == torch.bool else torch.int64
            plain[field.name] = tensor.to(kept, copy=True)
        for name in _TIMES if self._base else ():
            plain[name] = torch.where(plain[name] > 0, plain[name] + self._base, 0)
        return Ledger(**plain)

    def _after(self, events: int) -> int:
        """Return the present moment counted from the base, which first makes room for more events."""
        if int(self.now) - self._base + events > SPAN:
            self._renew(events)
        return int(self.now) - self._base

    def _renew(self, events: int) -> None:
        """Move the base to just before the oldest time; if that makes no room, replace times by ranks."""
        times = torch.stack([getattr(self, name) for name in _TIMES]).long()
        held = times > 0
        oldest = int(times[held].min()) if bool(held.any()) else int(self.now) - self._base
        now = int(self.now) - self._base - (oldest - 1)
        if now + events <= SPAN:
            times, self._base = times - (oldest - 1), self._base + oldest - 1
        else:
            # Equal times stay equal, so a slot that was only written is told from one that was recalled.
            kinds, rank = torch.unique(times[held], return_inverse=True)
            times[held] = rank + 1
            self._base = int(self.now) - len(kinds)
        times = torch.where(held, times, 0)
        for name, stamps in zip(_TIMES, times, strict=True):
            setattr(self, name, stamps.to(_kept(name)))

    def stamp_access(self, slots: Int[Tensor, " m"]) -> None:
        """Record an access to ``slots`` (nearest first) so that the nearest is the most recent."""
        m = slots.numel()
        self.accessed[slots] = self._after(m) + torch.arange(
            m, 0, -1, dtype=self.accessed.dtype, device="cpu"
        )
        self._orders["accessed"].moved(slots.tolist()[::-1], self.accessed)
        self.recalls[slots] += 1
        self.now += m

    def stamp_fill(self, first: int, count: int) -> None:
        """Record that ``count`` free slots from ``first`` on were written, one after another."""
        new = slice(first, first + count)
        times = self._after(count) + torch.arange(
            1, count + 1, dtype=self.written.dtype, device="cpu"
        )
        self.now += count
        for name, stamps in (("written", self.written), ("accessed", self.accessed)):
            stamps[new] = times
            self._orders[name].moved(list(range(first, first + count)), stamps)
        self.generation[new] += 1
        self.born[new] = self.iteration
        self.recalls[new] = 0

    def stamp_write(self, slot: int) -> None:
        """Record that ``slot`` was overwritten; what was known of it is reset."""
        now = self._after(1) + 1
        self.now += 1
        self.written[slot] = now
        self._orders["written"].moved([slot], self.written)
        self.accessed[slot] = now
        self._orders["accessed"].moved([slot], self.accessed)
        self.generation[slot] += 1
        self.born[slot] = self.iteration
        self.recalls[slot] = 0

    def oldest(self, stamp: Literal["written", "accessed"]) -> int:
        """Return the slot with the smallest stamp; the time it takes does not depend on T."""
        return self._orders[stamp].ends(getattr(self, stamp))[0]

    def newest(self, stamp: Literal["written", "accessed"]) -> int:
        """Return the slot with the largest stamp."""
        return self._orders[stamp].ends(getattr(self, stamp))[1]


def _kept(name: str) -> torch.dtype:
    """Return the type in which a field of one number per slot is kept."""
    return torch.bool if name == "referenced" else torch.int32


def book_faults(ledger: Ledger) -> Iterator[str]:
    """Say what cannot be true of book-keeping with absolute times that was done by its own rules."""
    capacity, filled = ledger.written.numel(), int(ledger.filled)
    if not 0 <= filled <= capacity:
        yield f"{filled} slots are said to be filled, the memory has {capacity}."
        return
    held = torch.arange(capacity, device="cpu") < filled
    now, batches = ledger.now, ledger.iteration
    yield from say_slots(held & (ledger.generation < 1), "is filled although it was never written")
    yield from say_slots(
        ~held & (ledger.generation + ledger.written + ledger.recalls != 0),
        "was written although it is empty",
    )
    yield from say_slots(
        held & ((ledger.written < 1) | (ledger.accessed > now)), "has a time that never was"
    )
    yield from say_slots(
        held & (ledger.accessed < ledger.written), "was used before it was written"
    )
    yield from say_slots(
        held & ((ledger.born < 0) | (ledger.born > batches)), "was written in a batch to come"
    )
    yield from say_slots(held & (ledger.recalls < 0), "was recalled less than never")
    if capacity and not 0 <= int(ledger.hand) < capacity:
        yield f"the hand of the clock is at {int(ledger.hand)}, there are {capacity} slots."
    times = ledger.accessed[held]
    if len(torch.unique(times)) < len(times):
        yield "two slots have the same time of last use."


def say_slots(bad: Tensor, what: str) -> Iterator[str]:
    """Say which slots are bad, if any are."""
    numbers = bad.nonzero().flatten().tolist()
    if numbers:
        more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
        yield f"slot {', '.join(map(str, numbers[:3]))}{more}: {what}."


@final
class _Order:
    """The slots from the oldest stamp to the newest: derived from the stamps, never saved.

    Worked out once when first asked for, then kept up as stamps are given; stamps that were changed by
    anybody else (a restored state) are noticed by the tensor or its version, and worked out anew. Slots
    that are stamped in turn, as FIFO does, are a ring: one number says where it begins, and 10^8 slots
    need no list of a hundred bytes each.
    """

    def __init__(self) -> None:
        self._slots: OrderedDict[int, None] = OrderedDict()
        self._oldest: int | None = None  # where the ring begins; None if the order is a list
        self._stamps: Tensor | None = None
        self._version = -1

    def moved(self, slots: list[int], stamps: Tensor) -> None:
        """Note that ``slots`` were just stamped, one after another, by one operation on ``stamps``."""
        if self._stamps is not stamps or stamps._version != self._version + 1:
            self._stamps = None
            return
        count = stamps.numel()
        for slot in slots:
            if slot == self._oldest:
                self._oldest = (slot + 1) % count
                continue
            if self._oldest is not None:
                # No ring any more. A list is made when somebody asks: CLOCK, after FIFO, never does.
                self._oldest = self._stamps = None
                return
            self._slots.move_to_end(slot)
        self._version = stamps._version

    def ends(self, stamps: Tensor) -> tuple[int, int]:
        """Return the oldest and the newest slot."""
        if self._stamps is not stamps or stamps._version != self._version:
            self._work_out(stamps)
        if self._oldest is not None:
            return self._oldest, (self._oldest - 1) % stamps.numel()
        return next(iter(self._slots)), next(reversed(self._slots))

    def _work_out(self, stamps: Tensor) -> None:
        first = int(stamps.argmin())
        turned = stamps.roll(-first)
        self._slots, self._oldest = OrderedDict(), first
        if not bool((turned[1:] > turned[:-1]).all()):
            order = stamps.argsort(stable=True).tolist()
            self._slots, self._oldest = OrderedDict.fromkeys(order), None
        self._stamps, self._version = stamps, stamps._version
