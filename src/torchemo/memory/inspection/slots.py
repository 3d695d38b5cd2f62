"""What a memory holds, slot by slot, where its keys lie, and whether its books are in order."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import CheckpointError
from torchemo.core.tree import norms
from torchemo.memory.store import EpisodicMemory

UNIT_TOLERANCE = 1e-3
"""How far the length of a unit key may be from 1."""

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


def restored_memory(state: Mapping[str, Tensor], *, value_dtype: torch.dtype) -> EpisodicMemory:
    """Build the memory that was saved within the state of a memory, without its network."""
    own = {n.removeprefix(PREFIX): t for n, t in state.items() if n.startswith(PREFIX)}
    keys = own.get("keys")
    if keys is None or keys.dim() != 2 or keys.shape[1] < 1:
        raise CheckpointError("the saved state has no keys of a memory.")
    memory = EpisodicMemory(
        keys.shape[0], keys.shape[1], value_dtype=value_dtype, key_dtype=keys.dtype
    )
    memory.load_state_dict(own)
    filled = int(memory.ledger.filled)
    if not 0 <= filled <= memory.capacity:
        raise CheckpointError(
            f"{filled} slots are said to be filled, the memory has {memory.capacity}."
        )
    return memory


def survey(memory: EpisodicMemory) -> MemoryView:
    """Look at every filled slot of a memory."""
    n, ledger = len(memory), memory.ledger
    keys = memory.keys[:n].double()
    distances, nearest = _neighbours(keys)
    places, explained = principal_map(keys)
    values = {name: value[:n].double() for name, value in memory.values.items()}
    sizes = norms(values) if values and n else torch.zeros(n, dtype=torch.float64)
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
    return [*_bad_content(memory, unit=unit), *_bad_books(memory)]


def _neighbours(keys: Float[Tensor, "slot dim"]) -> tuple[Tensor, Tensor]:
    """Return the distance to the nearest other key of each slot, and whose it is."""
    if keys.shape[0] < 2:
        return keys.new_zeros(0), keys.new_zeros(0, dtype=torch.int64)
    apart = (keys[:, None] - keys[None]).square().sum(-1).sqrt().fill_diagonal_(torch.inf)
    found = apart.min(1)
    return found.values, found.indices


def _bad_content(memory: EpisodicMemory, *, unit: bool) -> Iterator[str]:
    filled = len(memory)
    parts = {"key": memory.keys, **{f"value '{n}'": v for n, v in memory.values.items()}}
    parts |= {f"note '{n}'": v for n, v in memory.notes.items()}
    parts |= {f"moment '{n}'": v for n, v in memory.moments.items()}
    for what, tensor in parts.items():
        rows = tensor.reshape(memory.capacity, -1)
        yield from _slots(~rows.isfinite().all(1), f"{what} is not finite")
        if what == "key" or what.startswith("value"):
            left = (rows != 0).any(1)
            left[:filled] = False
            yield from _slots(left, f"{what} is there although the slot is empty")
    if unit and filled:
        off = (memory.keys[:filled].double().norm(dim=1) - 1).abs() > UNIT_TOLERANCE
        yield from _slots(off, "key is no unit vector")


def _bad_books(memory: EpisodicMemory) -> Iterator[str]:
    ledger, capacity = memory.ledger, memory.capacity
    held = torch.arange(capacity) < len(memory)
    now, batches = ledger.now, ledger.iteration
    yield from _slots(held & (ledger.generation < 1), "is filled although it was never written")
    yield from _slots(
        ~held & (ledger.generation + ledger.written + ledger.recalls != 0),
        "was written although it is empty",
    )
    yield from _slots(
        held & ((ledger.written < 1) | (ledger.accessed > now)), "has a time that never was"
    )
    yield from _slots(held & (ledger.accessed < ledger.written), "was used before it was written")
    yield from _slots(
        held & ((ledger.born < 0) | (ledger.born > batches)), "was written in a batch to come"
    )
    yield from _slots(held & (ledger.recalls < 0), "was recalled less than never")
    if capacity and not 0 <= int(ledger.hand) < capacity:
        yield f"the hand of the clock is at {int(ledger.hand)}, there are {capacity} slots."
    times = ledger.accessed[held]
    if len(set(times.tolist())) < len(times):
        yield "two slots have the same time of last use."


def _slots(bad: Tensor, what: str) -> Iterator[str]:
    """Say which slots are bad, if any are."""
    numbers = bad.nonzero().flatten().tolist()
    if numbers:
        more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
        yield f"slot {', '.join(map(str, numbers[:3]))}{more}: {what}."
