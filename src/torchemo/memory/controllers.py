"""Controllers: which slot of a full memory is overwritten (Eq. 6).

A controller is a state machine whose whole state is the `Ledger` it is handed: it decides, the memory
obeys. While the memory is not full a new item takes the lowest free slot whatever the controller.
"""

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Literal, Protocol, final, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for


@final
@dataclass
class Ledger:
    """Book-keeping of T slots: small integer tensors, changed in place by the memory alone.

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

    @classmethod
    def empty(cls, capacity: int) -> "Ledger":
        """Return the ledger of an empty memory with ``capacity`` slots."""
        scalars = {"now", "filled", "iteration", "hand"}
        return cls(
            **{
                field.name: torch.zeros(
                    () if field.name in scalars else (capacity,),
                    dtype=torch.bool if field.name == "referenced" else torch.int64,
                )
                for field in fields(cls)
            }
        )

    def stamp_access(self, slots: Int[Tensor, " m"]) -> None:
        """Record an access to ``slots`` (nearest first) so that the nearest is the most recent."""
        m = slots.numel()
        self.accessed[slots] = self.now + torch.arange(m, 0, -1)
        self._orders["accessed"].moved(slots.tolist()[::-1], self.accessed)
        self.recalls[slots] += 1
        self.now += m

    def stamp_write(self, slot: int) -> None:
        """Record that ``slot`` was overwritten; what was known of it is reset."""
        self.now += 1
        self.written[slot] = self.now
        self._orders["written"].moved([slot], self.written)
        self.accessed[slot] = self.now
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


@final
class _Order:
    """The slots from the oldest stamp to the newest: derived from the stamps, never saved.

    Sorted once when first asked for, then kept up as stamps are given; stamps that were changed by anybody
    else (a restored state) are noticed by the tensor or its version and sorted anew.
    """

    def __init__(self) -> None:
        self._slots: OrderedDict[int, None] = OrderedDict()
        self._stamps: Tensor | None = None
        self._version = -1

    def moved(self, slots: list[int], stamps: Tensor) -> None:
        """Note that ``slots`` were just stamped, one after another, by one operation on ``stamps``."""
        if self._stamps is not stamps or stamps._version != self._version + 1:
            self._stamps = None
            return
        for slot in slots:
            self._slots.move_to_end(slot)
        self._version = stamps._version

    def ends(self, stamps: Tensor) -> tuple[int, int]:
        """Return the oldest and the newest slot."""
        if self._stamps is not stamps or stamps._version != self._version:
            self._slots = OrderedDict.fromkeys(stamps.argsort(stable=True).tolist())
            self._stamps, self._version = stamps, stamps._version
        return next(iter(self._slots)), next(reversed(self._slots))


@runtime_checkable
class Controller(Protocol):
    """Decides what a full memory forgets."""

    def touch(self, ledger: Ledger, slots: Int[Tensor, " m"]) -> None:
        """Note that a meta-training task recalled ``slots``, nearest first."""
        ...

    def victim(self, ledger: Ledger) -> int:
        """Choose the slot of a full memory to overwrite."""
        ...

    def wrote(self, ledger: Ledger, slot: int) -> None:
        """Note that ``slot`` was written."""
        ...


@final
@dataclass(frozen=True)
class FIFO:
    """FIFO-EM: forget what was written first; recalls do not matter.

    Example:
        >>> ledger = Ledger.empty(2)
        >>> for slot in (0, 1):
        ...     FIFO().wrote(ledger, slot)
        >>> FIFO().victim(ledger)
        0
    """

    def touch(self, ledger: Ledger, slots: Int[Tensor, " m"]) -> None:
        """Keep the access times (they are shown to people); eviction ignores them."""
        ledger.stamp_access(slots)

    def victim(self, ledger: Ledger) -> int:
        """Return the slot with the oldest write."""
        return ledger.oldest("written")

    def wrote(self, ledger: Ledger, slot: int) -> None:
        """Stamp the write."""
        ledger.stamp_write(slot)


@final
@dataclass(frozen=True)
class LRU:
    """LRU-EM: forget what was recalled (or written) longest ago.

    Reading: the paper borrows from memories that write to the least used *or* to the last used place
    and defines only the first half; ``update_last`` is the probability of the second (0 = the paper).

    Args:
        update_last: Probability of overwriting the most recently used slot instead.
        seed: Seed of that draw, which is otherwise a function of the ledger's event counter.
    """

    update_last: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.update_last <= 1:
            raise ConfigError(f"lru.update_last should lie in [0, 1], got {self.update_last}.")

    def touch(self, ledger: Ledger, slots: Int[Tensor, " m"]) -> None:
        """Make the recalled slots the most recent, the nearest most of all."""
        ledger.stamp_access(slots)

    def victim(self, ledger: Ledger) -> int:
        """Return the slot with the oldest access."""
        if self.update_last > 0:
            generator = generator_for(self.seed, "lru", int(ledger.now))
            if float(torch.rand((), generator=generator)) < self.update_last:
                return ledger.newest("accessed")
        return ledger.oldest("accessed")

    def wrote(self, ledger: Ledger, slot: int) -> None:
        """Stamp the write, which is also an access."""
        ledger.stamp_write(slot)


SWEEP = 1024
"""Slots that CLOCK's hand looks at in one go."""


@final
@dataclass(frozen=True)
class Clock:
    """CLOCK-EM: a hand sweeps the slots, spares each referenced one once and takes the first other.

    Args:
        insert_ref: Reference bit of a freshly written slot.
    """

    insert_ref: bool = True

    def touch(self, ledger: Ledger, slots: Int[Tensor, " m"]) -> None:
        """Set the reference bits of the recalled slots."""
        ledger.stamp_access(slots)
        ledger.referenced[slots] = True

    def victim(self, ledger: Ledger) -> int:
        """Sweep: clear reference bits until one is found clear; leave the hand one past the victim."""
        capacity = ledger.referenced.numel()
        at = int(ledger.hand)
        while True:  # one round clears every bit, so this ends
            ahead = ledger.referenced[at : at + SWEEP]
            # argmin of booleans is the first clear bit.
            clear = int(ahead.long().argmin())
            if not ahead[clear]:
                break
            ahead[:] = False
            at = (at + len(ahead)) % capacity
        ledger.referenced[at : at + clear] = False
        ledger.hand.fill_((at + clear + 1) % capacity)
        return at + clear

    def wrote(self, ledger: Ledger, slot: int) -> None:
        """Stamp the write and set the slot's reference bit to ``insert_ref``."""
        ledger.stamp_write(slot)
        ledger.referenced[slot] = self.insert_ref


CONTROLLERS: dict[str, type[FIFO] | type[LRU] | type[Clock]] = {
    "fifo": FIFO,
    "lru": LRU,
    "clock": Clock,
}
