"""Controllers: which slot of a full memory is overwritten (Eq. 6).

A controller is a state machine whose whole state is the `Ledger` it is handed: it decides, the memory
obeys. While the memory is not full a new item takes the lowest free slot whatever the controller.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol, final, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from torchemo.config.registry import NoOptions, Part, Registry
from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.memory.ledger import Ledger


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


MOST_IN_ORDER = 10**7
"""Slots of the largest memory whose order of use is kept as a list of a hundred bytes and more each."""


@dataclass(frozen=True)
class _Stamping:
    """What the controllers share: they stamp every access and every write."""

    @classmethod
    def build(cls, options: NoOptions, *, seed: int) -> "_Stamping":
        """Make the controller."""
        return cls()

    def touch(self, ledger: Ledger, slots: Int[Tensor, " m"]) -> None:
        """Make the recalled slots the most recently used, the nearest most of all."""
        ledger.stamp_access(slots)

    def wrote(self, ledger: Ledger, slot: int) -> None:
        """Stamp the write, which is also an access."""
        ledger.stamp_write(slot)

    def filled(self, ledger: Ledger, first: int, count: int) -> None:
        """Stamp the writes of free slots, all at once, as `wrote` does one by one."""
        ledger.stamp_fill(first, count)


@final
@dataclass(frozen=True)
class FIFO(_Stamping):
    """FIFO-EM: forget what was written first; recalls do not matter.

    Example:
        >>> ledger = Ledger.empty(2)
        >>> for slot in (0, 1):
        ...     FIFO().wrote(ledger, slot)
        >>> FIFO().victim(ledger)
        0
    """

    def victim(self, ledger: Ledger) -> int:
        """Return the slot with the oldest write; times of access are kept for people to see."""
        return ledger.oldest("written")


@final
@dataclass(frozen=True)
class LRU(_Stamping):
    """LRU-EM: forget what was recalled (or written) longest ago.

    Choice: the paper borrows from memories that write to the least used *or* to the last used place
    and defines only the first half; ``update_last`` is the probability of the second (0 = the paper).

    Args:
        update_last: Probability of overwriting the most recently used slot instead.
        seed: Seed of that draw, which is otherwise a function of the ledger's event counter.

    Example:
        >>> ledger = Ledger.empty(2)
        >>> for slot in (0, 1):
        ...     LRU().wrote(ledger, slot)
        >>> LRU().touch(ledger, torch.tensor([0]))
        >>> LRU().victim(ledger)
        1
    """

    update_last: float = 0.0
    seed: int = 0
    most_slots: ClassVar[int] = MOST_IN_ORDER

    def __post_init__(self) -> None:
        if not 0 <= self.update_last <= 1:
            raise ConfigError(f"lru.update_last should lie in [0, 1], got {self.update_last}.")

    @classmethod
    def build(cls, options: NoOptions, *, seed: int) -> "LRU":
        """Make the controller."""
        return cls(seed=seed)

    def victim(self, ledger: Ledger) -> int:
        """Return the slot with the oldest access."""
        if self.update_last > 0:
            generator = generator_for(self.seed, "lru", int(ledger.now))
            if float(torch.rand((), generator=generator)) < self.update_last:
                return ledger.newest("accessed")
        return ledger.oldest("accessed")


SWEEP = 1024
"""Slots that CLOCK's hand looks at in one go."""


@final
@dataclass(frozen=True)
class Clock(_Stamping):
    """CLOCK-EM: a hand sweeps the slots, spares each referenced one once and takes the first other.

    Args:
        insert_ref: Reference bit of a freshly written slot.

    Example:
        >>> ledger = Ledger.empty(2)
        >>> for slot in (0, 1):
        ...     Clock(insert_ref=False).wrote(ledger, slot)
        >>> Clock().touch(ledger, torch.tensor([0]))
        >>> Clock().victim(ledger)
        1
    """

    insert_ref: bool = True

    def touch(self, ledger: Ledger, slots: Int[Tensor, " m"]) -> None:
        """Set the reference bits of the recalled slots."""
        super().touch(ledger, slots)
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
        super().wrote(ledger, slot)
        ledger.referenced[slot] = self.insert_ref

    def filled(self, ledger: Ledger, first: int, count: int) -> None:
        """Stamp the writes of free slots and set their reference bits to ``insert_ref``."""
        super().filled(ledger, first, count)
        ledger.referenced[first : first + count] = self.insert_ref


CONTROLLERS = Registry(
    "controller",
    "memory.controller",
    {
        "fifo": "torchemo.memory.controllers:FIFO",
        "lru": "torchemo.memory.controllers:LRU",
        "clock": "torchemo.memory.controllers:Clock",
    },
    group="torchemo.controllers",
)


@runtime_checkable
class Filling(Protocol):
    """A controller that notes the writes of many free slots at once."""

    def filled(self, ledger: Ledger, first: int, count: int) -> None:
        """Note that free slots were written, one after another."""
        ...


def check_capacity(controller: Controller, capacity: int) -> None:
    """Refuse more slots than a controller can keep in order."""
    most = getattr(controller, "most_slots", None)
    if most is not None and capacity > most:
        raise ConfigError(
            f"{type(controller).__name__} keeps its slots in order of use, which takes over 100 bytes each:"
            f" it takes at most {most:,} slots, got {capacity:,}.",
            hint="Set memory.controller.name to clock or fifo, which need no order,"
            f" or memory.capacity to {most} or less.",
        )


def build_controller(part: Part, *, seed: int = 0) -> Controller:
    """Make the controller that a configuration names."""
    kind, options = CONTROLLERS.resolve(part)
    made: Controller = kind.build(options, seed=seed)
    return made
