"""The memory's state as flat named tensors: saved bit by bit, checked whole before it is restored."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchemo.core.errors import CheckpointError
from torchemo.core.types import Params
from torchemo.memory.ledger import Ledger, book_faults
from torchemo.memory.scale.rows import Layout, ValueStore
from torchemo.memory.scale.segments import FileRows, described

if TYPE_CHECKING:
    from torchemo.memory.store import EpisodicMemory

_GROUPS = ("notes", "moments")
_AT_ONCE = 1024
VERSION = "version"
"""Name of the values' version in the state of a memory that keeps them in files."""


def saved(memory: "EpisodicMemory") -> Params:
    """Return ``keys``, ``warm_keys``, ``ledger.*``, ``values.*``, ``notes.*`` and ``moments.*``.

    A memory with values in files keeps a version of them there, and returns its name as ``version``.
    """
    state: Params = {"keys": memory.keys, "warm_keys": memory.warm_keys}
    times = memory.ledger.absolute()
    for field in fields(times):
        state[f"ledger.{field.name}"] = getattr(times, field.name)
    if isinstance(memory.contents, FileRows):
        name = memory.contents.snapshot().encode()
        state[VERSION] = torch.tensor(list(name), dtype=torch.uint8, device="cpu")
    else:
        # Rows are packed, and whoever saves a state expects tensors of their own.
        state |= {
            f"values.{name}": tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in memory.values.items()
        }
    for group in _GROUPS:
        for name, tensor in getattr(memory, group).items():
            state[f"{group}.{name}"] = tensor
    return state


def restore(memory: "EpisodicMemory", state: Mapping[str, Tensor]) -> None:
    """Give a memory the state that `saved` returned; all of it is checked before anything is changed."""
    opened = _opened(memory, state)
    books = _check(memory, state, opened)
    contents = _contents(memory, _group(state, "values.")) if opened is None else opened
    device = memory.keys.device
    memory.keys = state["keys"].detach().to(device, copy=True)
    memory.warm_keys = state["warm_keys"].detach().to(device, copy=True)
    memory.ledger, memory.contents = Ledger.of(books), contents
    for group in _GROUPS:
        tensors: Params = getattr(memory, group)
        tensors.clear()
        for name, tensor in _group(state, f"{group}.").items():
            home = torch.device("cpu") if name == "steps" else device
            tensors[name] = tensor.detach().to(home, copy=True)


def _opened(memory: "EpisodicMemory", state: Mapping[str, Tensor]) -> FileRows | None:
    """Open the version that a state names; None if the state holds the values themselves."""
    if VERSION not in state:
        return None
    if memory.values_dir is None:
        raise CheckpointError(
            "memory: the values of this state are in files, and memory.values_dir is not set.",
            hint="Set memory.values_dir to the folder that holds them.",
        )
    name = bytes(state[VERSION].tolist()).decode("ascii", "replace")
    return FileRows.opened(memory.values_dir, name, owner=memory.owner)


def _contents(memory: "EpisodicMemory", values: Params) -> ValueStore | None:
    """Return a place with the values of a state, some slots at a time: files may exceed RAM."""
    if not values:
        return None
    contents = memory.room(Layout.of(values))
    for first in range(0, memory.capacity, _AT_ONCE):
        part = {n: v[first : first + _AT_ONCE].detach() for n, v in values.items()}
        count = min(_AT_ONCE, memory.capacity - first)
        contents.write(range(first, first + count), contents.stage(part), range(count))
    return contents


def _check(
    memory: "EpisodicMemory", state: Mapping[str, Tensor], opened: FileRows | None
) -> Ledger:
    """Return the saved book-keeping; raise `CheckpointError` naming the first tensor that does not fit."""
    if opened is not None and (
        (len(opened), opened.dtype) != (memory.capacity, memory.value_dtype)
        or (memory.contents is not None and opened.layout != memory.contents.layout)
    ):
        raise CheckpointError(
            f"memory: the saved values are {len(opened)} slots of {opened.about}, this memory holds"
            f" {memory.capacity} of {_about(memory)}.",
            hint="Build the memory for the network and the options of the saved run.",
        )
    expected = dict(_form(memory, state, opened))
    missing = [name for name in expected if name not in state]
    extra = [name for name in state if name not in expected]
    if missing or extra:
        raise CheckpointError(
            f"memory: the saved state lacks {missing} and has unexpected {extra}.",
            hint="Build the memory for the network and the options of the saved run.",
        )
    for name, (shape, dtype) in expected.items():
        if state[name].shape != shape or state[name].dtype != dtype:
            raise CheckpointError(
                f"memory: saved '{name}' is {list(state[name].shape)} of {state[name].dtype},"
                f" this memory holds {list(shape)} of {dtype}.",
                hint="Build the memory with the capacity, key dimension, network and dtypes of"
                " the saved run.",
            )
    books = Ledger(**{f.name: state[f"ledger.{f.name}"].detach().cpu() for f in fields(Ledger)})
    faults = list(book_faults(books))
    if faults:
        raise CheckpointError(
            f"memory: the saved book-keeping cannot be right: {' '.join(faults[:3])}",
            hint="Go back to another checkpoint of the run.",
        )
    return books


def _about(memory: "EpisodicMemory") -> str:
    if memory.contents is None:
        return str(memory.value_dtype)
    return described(memory.contents.layout, memory.value_dtype)


def _form(
    memory: "EpisodicMemory", state: Mapping[str, Tensor], opened: FileRows | None
) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Yield name, shape and dtype of what a saved state that fits holds."""
    slots, dtype = memory.capacity, memory.keys.dtype
    yield "keys", (memory.keys.shape, dtype)
    warm = len(state["warm_keys"]) if "warm_keys" in state else 0
    yield "warm_keys", ((warm, memory.key_dim), dtype)
    for field in fields(memory.ledger):
        shape = getattr(memory.ledger, field.name).shape
        flag = field.name == "referenced"
        yield f"ledger.{field.name}", (shape, torch.bool if flag else torch.int64)
    shapes = {n: v.shape[1:] for n, v in _group(state, "values.").items()}
    notes = _group(state, "notes.")
    # Only two used memories can belong to different networks: an empty one fits all.
    if memory.contents is not None and (shapes or opened is not None):
        shapes, notes = dict(memory.shapes), memory.notes
    if opened is not None:
        shapes = dict(opened.layout.shapes)
        yield VERSION, (state[VERSION].shape, torch.uint8)
    for name, shape in () if opened is not None else shapes.items():
        yield f"values.{name}", ((slots, *shape), memory.value_dtype)
    for name, note in notes.items():
        yield f"notes.{name}", ((slots, *note.shape[1:]), note.dtype)
    if any(name.startswith("moments.") for name in state):
        yield "moments.steps", ((slots,), torch.int64)
        keyed = {f"values.{name}": shape for name, shape in shapes.items()}
        for name, shape in {"keys": memory.keys.shape[1:], **keyed}.items():
            for moment in ("first", "second"):
                yield f"moments.{moment}.{name}", ((slots, *shape), dtype)


def _group(state: Mapping[str, Tensor], prefix: str) -> Params:
    return {n[len(prefix) :]: tensor for n, tensor in state.items() if n.startswith(prefix)}
