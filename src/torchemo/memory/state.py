"""The memory's state as flat named tensors: saved bit by bit, checked whole before it is restored."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchemo.core.errors import CheckpointError
from torchemo.core.types import Params

if TYPE_CHECKING:
    from torchemo.memory.store import EpisodicMemory

_GROUPS = ("values", "notes", "moments")


def saved(memory: "EpisodicMemory") -> Params:
    """Return ``keys``, ``warm_keys``, ``ledger.*``, ``values.*``, ``notes.*`` and ``moments.*``."""
    state: Params = {"keys": memory.keys, "warm_keys": memory.warm_keys}
    for field in fields(memory.ledger):
        state[f"ledger.{field.name}"] = getattr(memory.ledger, field.name)
    for group in _GROUPS:
        for name, tensor in getattr(memory, group).items():
            state[f"{group}.{name}"] = tensor
    return state


def restore(memory: "EpisodicMemory", state: Mapping[str, Tensor]) -> None:
    """Give a memory the state that `saved` returned; all of it is checked before anything is changed."""
    _check(memory, state)
    memory.keys = state["keys"].detach().clone()
    memory.warm_keys = state["warm_keys"].detach().clone()
    for field in fields(memory.ledger):
        setattr(memory.ledger, field.name, state[f"ledger.{field.name}"].detach().clone())
    for group in _GROUPS:
        tensors: Params = getattr(memory, group)
        tensors.clear()
        for name, tensor in _group(state, f"{group}.").items():
            if group == "values" and memory.values_dir is not None:
                tensors[name] = memory.room(tensor.shape[1:]).copy_(tensor.detach())
            else:
                tensors[name] = tensor.detach().clone()


def _check(memory: "EpisodicMemory", state: Mapping[str, Tensor]) -> None:
    """Raise `CheckpointError` naming the first saved tensor that does not fit this memory."""
    expected = dict(_form(memory, state))
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


def _form(
    memory: "EpisodicMemory", state: Mapping[str, Tensor]
) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Yield name, shape and dtype of what a saved state that fits holds."""
    slots, dtype = memory.capacity, memory.keys.dtype
    yield "keys", (memory.keys.shape, dtype)
    warm = len(state["warm_keys"]) if "warm_keys" in state else 0
    yield "warm_keys", ((warm, memory.key_dim), dtype)
    for field in fields(memory.ledger):
        buffer = getattr(memory.ledger, field.name)
        yield f"ledger.{field.name}", (buffer.shape, buffer.dtype)
    values, notes = _group(state, "values."), _group(state, "notes.")
    # Only two used memories can belong to different networks: an empty one fits all.
    if memory.values and values:
        values, notes = memory.values, memory.notes
    for name, value in values.items():
        yield f"values.{name}", ((slots, *value.shape[1:]), memory.value_dtype)
    for name, note in notes.items():
        yield f"notes.{name}", ((slots, *note.shape[1:]), note.dtype)
    if any(name.startswith("moments.") for name in state):
        yield "moments.steps", ((slots,), torch.int64)
        keyed = {"keys": memory.keys} | {f"values.{name}": v for name, v in values.items()}
        for name, tensor in keyed.items():
            for moment in ("first", "second"):
                yield f"moments.{moment}.{name}", ((slots, *tensor.shape[1:]), dtype)


def _group(state: Mapping[str, Tensor], prefix: str) -> Params:
    return {n[len(prefix) :]: tensor for n, tensor in state.items() if n.startswith(prefix)}
