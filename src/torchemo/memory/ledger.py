"""The book-keeping of slots: when each was written, recalled and overwritten.

The ledger is the whole state of a controller (`torchemo.memory.controllers`), and saved with the memory.
"""

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Literal, final

import torch
from jaxtyping import Int
from torch import Tensor


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
