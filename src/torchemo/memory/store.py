"""The episodic memory M = {(K_t, V_t)}: T slots of a task key and what is remembered with it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from torchemo.core.checks import check_rows_finite
from torchemo.core.errors import ConfigError, MemoryWriteError, ShapeError
from torchemo.core.tree import check_same_structure, is_finite
from torchemo.core.types import Params
from torchemo.memory.controllers import LRU, Controller, Filling, check_capacity
from torchemo.memory.ledger import Ledger
from torchemo.memory.scale.journal import Journal
from torchemo.memory.scale.rows import Layout, PackedRows, ValueStore
from torchemo.memory.scale.segments import FileRows
from torchemo.memory.slots import SlotAdam, slot_gradients, zero_moments
from torchemo.memory.state import restore, saved


@final
class EpisodicMemory(nn.Module):
    """Keys, values and book-keeping of at most ``capacity`` past tasks.

    The value of a slot is one packed row, so that reading is one gather. The structure of the values is
    that of the first write; other structures are refused. A refused write changes nothing, and a memory
    in eval mode refuses all of them.

    Args:
        capacity: T, the number of slots; 0 switches the memory off.
        key_dim: Dimension d of a key.
        controller: Who chooses the slot to overwrite when all are filled.
        value_dtype: How values are kept, float32 (default), bfloat16 or float64; they are read back in
            the dtype of the keys.
        key_dtype: How keys are kept.
        values_dir: Keep values in files in this folder, so that they may exceed RAM. A saved state then
            holds the name of a version in this folder instead of the values
            (`torchemo.memory.scale.segments`).

    Example:
        >>> import torch
        >>> memory = EpisodicMemory(2, 3)
        >>> memory.write(torch.eye(3)[:2], {"w": torch.tensor([[1.0], [2.0]])})
        [0, 1]
        >>> memory.read(torch.tensor([[1, 0]]))["w"].flatten().tolist()
        [2.0, 1.0]
    """

    def __init__(
        self,
        capacity: int,
        key_dim: int,
        *,
        controller: Controller | None = None,
        value_dtype: torch.dtype = torch.float32,
        key_dtype: torch.dtype = torch.float32,
        values_dir: Path | None = None,
    ) -> None:
        super().__init__()
        if capacity < 0:
            raise ConfigError(f"memory capacity should be 0 (off) or more, got {capacity}.")
        if key_dim < 1:
            raise ConfigError(f"key dimension should be 1 or more, got {key_dim}.")
        self.capacity = capacity
        self.controller: Controller = LRU() if controller is None else controller
        check_capacity(self.controller, capacity)
        self.value_dtype = value_dtype
        self.values_dir = values_dir
        self.ledger = Ledger.empty(capacity)
        self.keys = torch.zeros(capacity, key_dim, dtype=key_dtype, device="cpu")
        self.contents: ValueStore | None = None
        self.owner: str | None = ""
        self.notes: Params = {}
        self.moments: Params = {}
        self.warm_keys = self.keys[:0].clone()
        self.journal = Journal()

    def __len__(self) -> int:
        return int(self.ledger.filled)

    def extra_repr(self) -> str:
        """Say how full it is, where a memory is printed."""
        return f"{len(self)} of {self.capacity} slots filled, keys of dimension {self.key_dim}"

    @property
    def key_dim(self) -> int:
        """Dimension of a key."""
        return self.keys.shape[1]

    @property
    def values(self) -> Params:
        """Values of all slots ``{name: [T, *shape]}``: in RAM the memory's own, from files copies."""
        return {} if self.contents is None else self.contents.tensors()

    @values.setter
    def values(self, values: Params) -> None:
        self.contents = PackedRows.of(values)

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Names and shapes of what is remembered; empty before the first write."""
        return {} if self.contents is None else self.contents.layout.shapes

    @property
    def ages(self) -> Int[Tensor, " slot"]:
        """How many remembered batches ago each filled slot was written."""
        return self.ledger.iteration - self.ledger.born[: len(self)]

    # -- reading ---------------------------------------------------------------------------------

    def read(self, slots: Int[Tensor, "task m"]) -> Params:
        """Gather the values of ``slots``: ``{name: [B, m, *shape]}`` in the dtype of the keys."""
        if self.contents is None:
            return {}
        # Values in files are on the host, and read to where the keys are.
        return {
            name: value.to(self.keys).contiguous().view(*slots.shape, *value.shape[1:])
            for name, value in self.contents.gather(slots.flatten()).items()
        }

    def read_notes(self, slots: Int[Tensor, "task m"]) -> Params:
        """Gather what else is remembered with ``slots``."""
        return {
            name: note.index_select(0, slots.flatten()).view(*slots.shape, *note.shape[1:])
            for name, note in self.notes.items()
        }

    # -- writing ---------------------------------------------------------------------------------

    def touch(
        self, slots: Int[Tensor, "task m"], *, generations: Int[Tensor, "task m"] | None = None
    ) -> None:
        """Tell the controller what was recalled, task by task, nearest slot first.

        Slots that were overwritten since they were read (another generation) are left alone.
        """
        self._refuse_in_eval("touch")
        # The ledger is on the host, wherever the keys are.
        for b, row in enumerate(slots.cpu()):
            if generations is not None:
                row = row[self.ledger.generation[row] == generations[b]]
            if row.numel():
                self.controller.touch(self.ledger, row)

    def write(
        self,
        keys: Float[Tensor, "task dim"],
        values: Params,
        *,
        notes: Params | None = None,
        checked: bool = False,
    ) -> list[int]:
        """Write B tasks in order, each to the lowest free slot or over the controller's victim (Eq. 6).

        With ``checked``, `check_write` has been called with the same.

        Returns:
            The slots written, in task order (empty when the capacity is 0).
        """
        if not checked:
            self.check_write(keys, values, notes or {})
        if self.capacity == 0:
            return []
        notes = notes or {}
        with torch.inference_mode(False):  # a slot is written again, whoever writes it first
            contents = self.room(Layout.of(values)) if self.contents is None else self.contents
            staged = contents.stage(values)  # may fail for want of room: nothing is changed before
            self._allocate(contents, notes)
        slots = self._fill(keys, notes)
        for b in range(len(slots), keys.shape[0]):
            slots.append(self._claim())
            self._put(slots[b], slots[b:], keys[b], {n: note[b] for n, note in notes.items()})
        last = {slot: b for b, slot in enumerate(slots)}  # a batch may be larger than the memory
        contents.write(list(last), staged, list(last.values()))
        return slots

    def step_slots(
        self,
        rows: Params,
        slots: Int[Tensor, "task m"],
        *,
        weights: Float[Tensor, "task m"],
        optimizer: SlotAdam,
        key_gradient: Float[Tensor, "slot dim"] | None = None,
        checked: bool = False,
    ) -> None:
        """Step the recalled slots along the per-task outer gradients, weighted by a_bj.

        Args:
            rows: G_b ``{name: [B, *shape]}``.
            slots: Recalled slots.
            weights: Recall weights a_bj, zero where a task was adapted without recall.
            optimizer: The slots' own Adam step.
            key_gradient: Gradient of the outer loss in the keys of the filled slots, if they learn.
            checked: `check_write` has been called with the same.
        """
        self._refuse_in_eval("step_slots")
        filled, contents = len(self), self.contents
        if not checked:
            self._check_numbers(self._kept(rows, tasks=slots.shape[0]))
        if filled == 0 or slots.numel() == 0 or contents is None:
            return
        if key_gradient is not None and not checked:
            self.check_slot_keys(key_gradient, what="key gradient")
        weights, step = weights.detach(), optimizer.step_group_
        gradients = slot_gradients(rows, slots, weights, filled=filled)
        moved = optimizer.moved(slots, weights, filled=filled)
        self.moments = self.moments or zero_moments(self.keys, self.shapes)
        self.moments["steps"][:filled] += moved
        with contents.changing(filled) as values:
            for name, gradient in gradients.items():
                step(values[name], gradient, self.moments, moved, group=f"values.{name}")
        if key_gradient is not None and optimizer.key_lr > 0:
            step(self.keys[:filled], key_gradient, self.moments, moved, group="keys")
            # Slot keys are unit vectors: softmax weights compare directions, and free keys run away.
            self.keys[:filled][moved] = nn.functional.normalize(self.keys[:filled][moved], dim=1)

    def seed(self, keys: Float[Tensor, "slot dim"], template: Mapping[str, torch.Size]) -> None:
        """Fill the first slots with ``keys`` and zero values, ready to learn."""
        zeros = {name: keys.new_zeros(keys.shape[0], *shape) for name, shape in template.items()}
        self.write(keys, zeros)
        self.warm_keys = self.warm_keys[:0]

    def warm_up(self, keys: Float[Tensor, "task dim"], *, keep: int = 400) -> None:
        """Collect keys of tasks that came before the slots were seeded; the last ``keep`` stay."""
        self._refuse_in_eval("warm_up")
        self.warm_keys = torch.cat([self.warm_keys, keys.detach().to(self.keys.dtype)])[-keep:]

    def rekey(self, keys: Float[Tensor, "slot dim"]) -> None:
        """Replace the keys of all filled slots (the key network has moved since they were written)."""
        self._refuse_in_eval("rekey")
        self.check_slot_keys(keys, what="key")
        self.keys[: len(self)] = keys.detach()

    def end_batch(self) -> None:
        """Count one remembered batch; ages are measured in these."""
        self._refuse_in_eval("end_batch")
        self.ledger.iteration += 1

    # -- inside ----------------------------------------------------------------------------------

    def _fill(self, keys: Tensor, notes: Params) -> list[int]:
        """Write as many tasks as there are free slots, all at once; return these slots."""
        first = len(self)
        count = min(len(keys), self.capacity - first)
        if count == 0 or not isinstance(self.controller, Filling):
            return []
        slots = list(range(first, first + count))
        self.ledger.filled += count
        self.controller.filled(self.ledger, first, count)
        own = {name: note[:count] for name, note in notes.items()}
        self._put(slice(first, first + count), slots, keys[:count], own)
        return slots

    def _put(self, at: slice | int, slots: list[int], keys: Tensor, notes: Params) -> None:
        """Give one slot, or a range, its keys and notes."""
        self.keys[at] = keys.detach()
        self.journal.wrote(slots, self.keys)
        for name, note in notes.items():
            self.notes[name][at] = note.detach()
        for moment in self.moments.values():
            moment[at] = 0

    def _claim(self) -> int:
        """Take the lowest free slot or the controller's victim, and stamp it as written."""
        filled = len(self)
        if filled < self.capacity:
            slot = filled
            self.ledger.filled += 1
        else:
            slot = self.controller.victim(self.ledger)
        self.controller.wrote(self.ledger, slot)
        return slot

    def _allocate(self, contents: ValueStore, notes: Params) -> None:
        if self.contents is None:
            self.contents = contents
            for name, note in notes.items():
                shape = (self.capacity, *note.shape[1:])
                self.notes[name] = torch.zeros(shape, dtype=note.dtype, device=self.keys.device)

    def room(self, layout: Layout) -> ValueStore:
        """Return zeros for the values of all slots, beside the keys or in files."""
        if self.values_dir is not None:
            made = FileRows(self.values_dir, self.capacity, layout, self.value_dtype)
            made.owner = self.owner
            return made
        shape = (self.capacity, layout.numbers)
        rows = torch.zeros(shape, dtype=self.value_dtype, device=self.keys.device)
        return PackedRows(rows, layout)

    # -- refusals --------------------------------------------------------------------------------

    def _refuse_in_eval(self, verb: str) -> None:
        if not self.training:
            raise MemoryWriteError(
                f"{verb}: the memory is in eval mode and may only be read.",
                hint="Call .train() before meta-training; validation and test never write.",
            )

    def check_write(
        self, keys: Tensor, values: Params, notes: Params, *, slot_keys: Tensor | None = None
    ) -> None:
        """Raise what `write` would raise, or `step_slots` with this key gradient, and change nothing."""
        self._refuse_in_eval("write")
        if keys.dim() != 2 or keys.shape[1] != self.key_dim:
            raise ShapeError(
                f"write: keys should have shape [tasks, {self.key_dim}], got {list(keys.shape)}."
            )
        numbers = {"key": keys.to(self.keys.dtype), **self._kept(values, tasks=keys.shape[0])}
        if self.contents is not None:
            expected = {name: note.shape[1:] for name, note in self.notes.items()}
            check_same_structure(expected, notes, what="notes remembered with a task")
        for name, note in notes.items():
            if note.shape[0] != keys.shape[0]:
                raise ShapeError(
                    f"write: note '{name}' should have {keys.shape[0]} tasks, got {note.shape[0]}."
                )
            numbers[f"note '{name}'"] = note
        self._check_numbers(numbers, slot_keys)

    def _kept(self, values: Params, *, tasks: int) -> Params:
        """Check the shapes of values, and return them as they would be stored."""
        if not values:
            raise ShapeError(
                "write: no value tensors were given.", hint="Pass {name: [B, *shape]}."
            )
        if self.contents is not None:
            check_same_structure(dict(self.shapes), values, what="values to remember")
        for name, value in values.items():
            if value.shape[0] != tasks:
                raise ShapeError(
                    f"write: value '{name}' should have {tasks} tasks, got {value.shape[0]}."
                )
        # As stored: a large number can be infinite in a shorter format.
        return {f"value '{n}'": v.detach().to(self.value_dtype) for n, v in values.items()}

    def _check_numbers(self, numbers: Params, slot_keys: Tensor | None = None) -> None:
        """Refuse numbers that are not finite; a device is waited for once."""
        if slot_keys is not None:
            self._check_slot_shape(slot_keys, what="key gradient")
        finite = is_finite(numbers).all()
        if bool(finite if slot_keys is None else finite & slot_keys.isfinite().all()):
            return
        for what, tensor in numbers.items():
            check_rows_finite(tensor, what=what, where="task")
        if slot_keys is not None:
            self.check_slot_keys(slot_keys, what="key gradient")

    def check_slot_keys(self, keys: Tensor, *, what: str) -> None:
        """Raise if a tensor for the keys of all filled slots has another shape or is not finite."""
        self._check_slot_shape(keys, what=what)
        check_rows_finite(keys.to(self.keys.dtype), what=what, where="slot")

    def _check_slot_shape(self, keys: Tensor, *, what: str) -> None:
        if keys.shape != (len(self), self.key_dim):
            raise ShapeError(
                f"{what} of the filled slots: expected shape {[len(self), self.key_dim]},"
                f" got {list(keys.shape)}."
            )

    # -- moving and saving -----------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "EpisodicMemory":
        """Follow the network to another device (``.to``); dtypes, ledger and files stay."""
        device = fn(self.keys[:0]).device
        self.keys, self.warm_keys = self.keys.to(device), self.warm_keys.to(device)
        for group in (self.notes, self.moments):
            group.update({n: t.to(device) for n, t in group.items() if n != "steps"})
        if self.contents is not None:
            self.contents.moved(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination.update({prefix + name: tensor for name, tensor in saved(self).items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: object,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {n[len(prefix) :]: t for n, t in state_dict.items() if n.startswith(prefix)}
        if own:
            restore(self, own)
        else:
            missing_keys.append(f"{prefix}keys")
