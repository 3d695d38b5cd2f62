"""What a memory holds, slot by slot, where its keys lie, and whether its state is consistent."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torchemo.core.errors import CheckpointError, ConfigError
from torchemo.core.tree import norms
from torchemo.core.types import Params
from torchemo.memory.controllers import FIFO
from torchemo.memory.ledger import book_faults, say_slots
from torchemo.memory.scale.segments import FileRows
from torchemo.memory.store import EpisodicMemory

UNIT_TOLERANCE = 1e-3
"""How far the length of a unit key may be from 1."""

MOST = 20_000
"""Slots of the largest memory that is listed slot by slot."""
_AT_ONCE, _NUMBERS = 256, 1 << 24

PREFIX = "store."
"""How the tensors of the slots are named in the state of a memory."""


class SlotView(NamedTuple):
    """One filled slot.

    Attributes:
        slot: Its number.
        age: Remembered batches since it was written.
        recalls: How often what it holds was recalled.
        generation: How often it was written.
        domain: Where its task came from; None where that is not remembered.
        nearest: The slot with the nearest key; None if it is alone.
        distance: Distance of the two keys.
        norm: Norm of its value over all tensors.
        place: Its key on a map of all keys: the first two principal components.
    """

    slot: int
    age: int
    recalls: int
    generation: int
    domain: int | None
    nearest: int | None
    distance: float | None
    norm: float
    place: tuple[float, float]


class MemoryView(NamedTuple):
    """A memory at a glance.

    Attributes:
        capacity: T, how many slots there are.
        filled: How many hold something.
        batches: Batches remembered so far.
        mean_age: Mean age of the filled slots, in batches; None if there are none.
        turnover: How often a slot was overwritten, on average.
        mapped: Share of the keys' variance that the map shows.
        slots: The filled slots.
    """

    capacity: int
    filled: int
    batches: int
    mean_age: float | None
    turnover: float
    mapped: float
    slots: tuple[SlotView, ...]


def restored_memory(
    state: Mapping[str, Tensor], *, value_dtype: torch.dtype, values_dir: Path | None = None
) -> EpisodicMemory:
    """Build the memory that was saved within the state of a memory, without its network."""
    own = {n.removeprefix(PREFIX): t for n, t in state.items() if n.startswith(PREFIX)}
    keys = own.get("keys")
    if keys is None or keys.dim() != 2 or keys.shape[1] < 1:
        raise CheckpointError("the saved state has no keys of a memory.")
    memory = EpisodicMemory(
        keys.shape[0],
        keys.shape[1],
        controller=FIFO(),  # it is only looked at
        value_dtype=value_dtype,
        key_dtype=keys.dtype,
        values_dir=values_dir,
    )
    memory.load_state_dict(own)
    return memory


def survey(memory: EpisodicMemory) -> MemoryView:
    """Look at every filled slot of a memory.

    Raises:
        ConfigError: There are too many for a list.
    """
    n, ledger = len(memory), memory.ledger
    _refuse_too_many(n)
    keys = memory.keys[:n].double()
    distances, nearest = _neighbours(keys)
    places, explained = principal_map(keys)
    sizes = torch.cat([keys[:0, 0], *(norms(_doubles(memory, part)) for part in _parts(memory))])
    domain = memory.notes["domain"].tolist() if "domain" in memory.notes else None
    slots = tuple(
        SlotView(
            slot=i,
            age=int(memory.ages[i]),
            recalls=int(ledger.recalls[i]),
            generation=int(ledger.generation[i]),
            domain=None if domain is None else domain[i],
            nearest=None if n < 2 else int(nearest[i]),
            distance=None if n < 2 else float(distances[i]),
            norm=float(sizes[i]),
            place=(float(places[i, 0]), float(places[i, 1])),
        )
        for i in range(n)
    )
    return MemoryView(
        capacity=memory.capacity,
        filled=n,
        batches=int(ledger.iteration),
        mean_age=float(memory.ages.double().mean()) if n else None,
        turnover=float((ledger.generation[:n] - 1).double().mean()) if n else 0.0,
        mapped=sum(explained),
        slots=slots,
    )


def _refuse_too_many(filled: int) -> None:
    if filled > MOST:
        raise ConfigError(
            f"this memory has {filled:,} filled slots; at most {MOST:,} can be listed and mapped.",
            hint="Check it with: torchemo memory verify RUN",
        )


def principal_map(
    keys: Float[Tensor, "key dim"],
) -> tuple[Float[Tensor, "key 2"], tuple[float, float]]:
    """Put keys on a plane by their first two principal components.

    Returns:
        Coordinates, each axis turned so that its largest one is positive; and the share of the variance
        along either axis (1 and 0 if there is none).
    """
    places = keys.new_zeros(keys.shape[0], 2)
    if keys.shape[0] < 2:
        return places, (1.0, 0.0)
    left, sizes, _ = torch.linalg.svd(keys - keys.mean(0), full_matrices=False)
    axes = min(2, sizes.numel())
    found = left[:, :axes] * sizes[:axes]
    largest = found.gather(0, found.abs().argmax(0, keepdim=True))
    places[:, :axes] = torch.where(largest < 0, -found, found)
    if not sizes.any():
        return places, (1.0, 0.0)
    shares = (sizes.square() / sizes.square().sum()).tolist()
    return places, (shares[0], shares[1] if axes == 2 else 0.0)


def faults(memory: EpisodicMemory, *, unit: bool) -> list[str]:
    """List everything that cannot be true of a memory that was written by its own rules."""
    return [*_bad_content(memory, unit=unit), *book_faults(memory.ledger.absolute())]


def _parts(memory: EpisodicMemory) -> Iterator[Int[Tensor, " slot"]]:
    """Yield the filled slots, some at a time: values in files may exceed RAM."""
    if memory.contents is not None:
        for first in range(0, len(memory), _AT_ONCE):
            yield torch.arange(first, min(first + _AT_ONCE, len(memory)), device="cpu")


def _doubles(memory: EpisodicMemory, slots: Int[Tensor, " slot"]) -> Params:
    if memory.contents is None:
        return {}
    rows = memory.contents.read(slots).double()
    return memory.contents.layout.unpack(rows)


def _bad_files(memory: EpisodicMemory) -> Iterator[str]:
    """Read every value; name the slots whose bytes are not those that were written."""
    for part in _parts(memory):
        try:
            _doubles(memory, part)
        except CheckpointError:
            for slot in part:
                try:
                    _doubles(memory, slot[None])
                except CheckpointError as error:
                    yield error.message


def _neighbours(keys: Float[Tensor, "slot dim"]) -> tuple[Tensor, Tensor]:
    """Return the distance to the nearest other key of each slot, and whose it is."""
    if keys.shape[0] < 2:
        return keys.new_zeros(0), keys.new_zeros(0, dtype=torch.int64)
    distances, nearest = keys.new_zeros(len(keys)), torch.zeros_like(keys[:, 0], dtype=torch.int64)
    block = max(1, _NUMBERS // keys.numel())
    for first in range(0, len(keys), block):
        own = keys[first : first + block]
        apart = (own[:, None] - keys[None]).square().sum(-1).sqrt()
        rows = torch.arange(len(own), device=keys.device)
        apart[rows, first + rows] = torch.inf
        found = apart.min(1)
        distances[first : first + block], nearest[first : first + block] = found
    return distances, nearest


def _bad_content(memory: EpisodicMemory, *, unit: bool) -> Iterator[str]:
    filled, in_files = len(memory), isinstance(memory.contents, FileRows)
    parts = {"key": memory.keys}
    parts |= {} if in_files else {f"value '{n}'": v for n, v in memory.values.items()}
    parts |= {f"note '{n}'": v for n, v in memory.notes.items()}
    parts |= {f"moment '{n}'": v for n, v in memory.moments.items()}
    for what, tensor in parts.items():
        rows = tensor.reshape(memory.capacity, -1)
        yield from say_slots(~rows.isfinite().all(1), f"{what} is not finite")
        if what == "key" or what.startswith("value"):
            left = (rows != 0).any(1)
            left[:filled] = False
            yield from say_slots(left, f"{what} is there although the slot is empty")
    if in_files:
        yield from _bad_files(memory)
    if unit and filled:
        off = (memory.keys[:filled].double().norm(dim=1) - 1).abs() > UNIT_TOLERANCE
        yield from say_slots(off, "key is no unit vector")
