"""The episodic memory M = {(K_t, V_t)}: T slots of a task key and what is remembered with it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from torchemo.core.errors import ConfigError, MemoryWriteError, ShapeError
from torchemo.core.tree import check_same_structure, is_finite
from torchemo.core.types import Params
from torchemo.memory.controllers import LRU, Controller
from torchemo.memory.ledger import Ledger
from torchemo.memory.scale.journal import Journal
from torchemo.memory.scale.mapped import mapped_zeros
from torchemo.memory.slots import SlotAdam, slot_gradients
from torchemo.memory.state import restore, saved


@final
class EpisodicMemory(nn.Module):
    """Keys, values and book-keeping of at most ``capacity`` past tasks.

    One buffer per tensor, ``[T, *shape]``, so that reading is one gather. The structure of the values is
    that of the first write; other structures are refused. A refused write changes nothing, and a memory
    in eval mode refuses all of them.

    Args:
        capacity: T, the number of slots; 0 switches the memory off.
        key_dim: Dimension d of a key.
        controller: Who chooses the slot to overwrite when all are filled.
        value_dtype: How values are kept, float32 (default), bfloat16 or float64; they are read back in
            the dtype of the keys.
        key_dtype: How keys are kept.
        values_dir: Keep values in memory-mapped files in this folder, so that they may exceed RAM. The files
            have no name and vanish with the memory: what lasts is the saved state.

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
        self.value_dtype = value_dtype
        self.values_dir = values_dir
        self.ledger = Ledger.empty(capacity)
        self.keys = torch.zeros(capacity, key_dim, dtype=key_dtype)
        self.values: Params = {}
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
    def ages(self) -> Int[Tensor, " slot"]:
        """How many remembered batches ago each filled slot was written."""
        return self.ledger.iteration - self.ledger.born[: len(self)]

    # -- reading ---------------------------------------------------------------------------------

    def read(self, slots: Int[Tensor, "task m"]) -> Params:
        """Gather the values of ``slots``: ``{name: [B, m, *shape]}`` in the dtype of the keys."""
        return {name: self._gather(buffer, slots) for name, buffer in self.values.items()}

    def read_notes(self, slots: Int[Tensor, "task m"]) -> Params:
        """Gather what else is remembered with ``slots``."""
        return {
            name: note.index_select(0, slots.flatten()).view(*slots.shape, *note.shape[1:])
            for name, note in self.notes.items()
        }

    def _gather(self, buffer: Tensor, slots: Tensor) -> Tensor:
        rows = buffer.index_select(0, slots.flatten()).to(self.keys.dtype)
        return rows.view(*slots.shape, *buffer.shape[1:])

    # -- writing ---------------------------------------------------------------------------------

    def touch(
        self, slots: Int[Tensor, "task m"], *, generations: Int[Tensor, "task m"] | None = None
    ) -> None:
        """Tell the controller what was recalled, task by task, nearest slot first.

        Slots that were overwritten since they were read (another generation) are left alone.
        """
        self._refuse_in_eval("touch")
        for b, row in enumerate(slots):
            if generations is not None:
                row = row[self.ledger.generation[row] == generations[b]]
            if row.numel():
                self.controller.touch(self.ledger, row)

    def write(
        self, keys: Float[Tensor, "task dim"], values: Params, *, notes: Params | None = None
    ) -> list[int]:
        """Write B tasks in order, each to the lowest free slot or over the controller's victim (Eq. 6).

        Returns:
            The slots written, in task order (empty when the capacity is 0).
        """
        self.check_write(keys, values, notes or {})
        if self.capacity == 0:
            return []
        self._allocate(values, notes or {})
        slots = []
        for b in range(keys.shape[0]):
            slot = self._claim()
            self.keys[slot] = keys[b].detach()
            self.journal.wrote(slot, self.keys)
            for name, value in values.items():
                self.values[name][slot] = value[b].detach().to(self.value_dtype)
            for name, note in (notes or {}).items():
                self.notes[name][slot] = note[b].detach()
            for moment in self.moments.values():
                moment[slot] = 0
            slots.append(slot)
        return slots

    def step_slots(
        self,
        rows: Params,
        slots: Int[Tensor, "task m"],
        *,
        weights: Float[Tensor, "task m"],
        optimizer: SlotAdam,
        key_gradient: Float[Tensor, "slot dim"] | None = None,
    ) -> None:
        """Step the recalled slots along the per-task outer gradients, weighted by a_bj.

        Args:
            rows: G_b ``{name: [B, *shape]}``.
            slots: Recalled slots.
            weights: Recall weights a_bj, zero where a task was adapted without recall.
            optimizer: The slots' own Adam step.
            key_gradient: Gradient of the outer loss in the keys of the filled slots, if they learn.
        """
        self._refuse_in_eval("step_slots")
        self._check_values(rows, tasks=slots.shape[0])
        filled = len(self)
        if filled == 0 or slots.numel() == 0:
            return
        if key_gradient is not None:
            self.check_slot_keys(key_gradient, what="key gradient")
        gradients = slot_gradients(rows, slots, weights.detach(), filled=filled)
        moved = torch.ones(filled, dtype=torch.bool)
        if optimizer.update == "lazy":
            moved = torch.zeros(filled, dtype=torch.bool)
            moved[slots[weights.detach() > 0]] = True
        self._start_moments()
        self.moments["steps"][:filled] += moved
        for name, gradient in gradients.items():
            self._adam(self.values[name], gradient, f"values.{name}", moved, optimizer, keys=False)
        if key_gradient is not None and optimizer.key_lr > 0:
            self._adam(self.keys, key_gradient, "keys", moved, optimizer, keys=True)
            # Slot keys are unit vectors: softmax weights compare directions, and free keys run away.
            stepped = moved.nonzero().flatten()
            self.keys[stepped] = nn.functional.normalize(self.keys[stepped], dim=1)

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

    def _allocate(self, values: Params, notes: Params) -> None:
        if self.values or self.notes:
            return
        for name, value in values.items():
            self.values[name] = self.room(value.shape[1:], device=value.device)
        for name, note in notes.items():
            self.notes[name] = note.new_zeros(self.capacity, *note.shape[1:])

    def room(self, shape: Sequence[int], *, device: torch.device | None = None) -> Tensor:
        """Return zeros for the values of one tensor in all slots, in RAM or in a mapped file."""
        full = (self.capacity, *shape)
        if self.values_dir is None:
            return torch.zeros(full, dtype=self.value_dtype, device=device)
        return mapped_zeros(full, dtype=self.value_dtype, folder=self.values_dir)

    def _start_moments(self) -> None:
        if self.moments:
            return
        self.moments["steps"] = torch.zeros(self.capacity, dtype=torch.int64)
        for name, buffer in (("keys", self.keys), *self._named_values()):
            moment = torch.zeros_like(buffer, dtype=self.keys.dtype)
            self.moments[f"first.{name}"], self.moments[f"second.{name}"] = moment, moment.clone()

    def _named_values(self) -> Iterator[tuple[str, Tensor]]:
        return ((f"values.{name}", buffer) for name, buffer in self.values.items())

    def _adam(
        self,
        buffer: Tensor,
        gradient: Tensor,
        name: str,
        moved: Bool[Tensor, " slot"],
        optimizer: SlotAdam,
        *,
        keys: bool,
    ) -> None:
        filled = len(self)
        optimizer.step_(
            buffer[:filled],
            gradient,
            first=self.moments[f"first.{name}"][:filled],
            second=self.moments[f"second.{name}"][:filled],
            steps=self.moments["steps"][:filled],
            moved=moved,
            lr=optimizer.key_lr if keys else optimizer.lr,
            decay=0.0 if keys else optimizer.decay,
        )

    # -- refusals --------------------------------------------------------------------------------

    def _refuse_in_eval(self, verb: str) -> None:
        if not self.training:
            raise MemoryWriteError(
                f"{verb}: the memory is in eval mode and may only be read.",
                hint="Call .train() before meta-training; validation and test never write.",
            )

    def check_write(self, keys: Tensor, values: Params, notes: Params) -> None:
        """Raise what `write` would raise, and change nothing."""
        self._refuse_in_eval("write")
        if keys.dim() != 2 or keys.shape[1] != self.key_dim:
            raise ShapeError(
                f"write: keys should have shape [tasks, {self.key_dim}], got {list(keys.shape)}."
            )
        self._check_finite(keys.to(self.keys.dtype), what="key", where="task")
        self._check_values(values, tasks=keys.shape[0])
        if self.values:
            expected = {name: note.shape[1:] for name, note in self.notes.items()}
            check_same_structure(expected, notes, what="notes remembered with a task")
        for name, note in notes.items():
            if note.shape[0] != keys.shape[0]:
                raise ShapeError(
                    f"write: note '{name}' should have {keys.shape[0]} tasks, got {note.shape[0]}."
                )
            self._check_finite(note, what=f"note '{name}'", where="task")

    def _check_values(self, values: Params, *, tasks: int) -> None:
        if not values:
            raise ShapeError(
                "write: no value tensors were given.", hint="Pass {name: [B, *shape]}."
            )
        if self.values:
            expected = {name: buffer.shape[1:] for name, buffer in self.values.items()}
            check_same_structure(expected, values, what="values to remember")
        for name, value in values.items():
            if value.shape[0] != tasks:
                raise ShapeError(
                    f"write: value '{name}' should have {tasks} tasks, got {value.shape[0]}."
                )
            # As stored: a large number can be infinite in a shorter format.
            kept = value.detach().to(self.value_dtype)
            self._check_finite(kept, what=f"value '{name}'", where="task")

    def check_slot_keys(self, keys: Tensor, *, what: str) -> None:
        """Raise if a tensor for the keys of all filled slots has another shape or is not finite."""
        if keys.shape != (len(self), self.key_dim):
            raise ShapeError(
                f"{what} of the filled slots: expected shape {[len(self), self.key_dim]},"
                f" got {list(keys.shape)}."
            )
        self._check_finite(keys.to(self.keys.dtype), what=what, where="slot")

    @staticmethod
    def _check_finite(tensor: Tensor, *, what: str, where: str) -> None:
        finite = is_finite({"": tensor})
        if not bool(finite.all()):
            bad = int((~finite).nonzero()[0])
            raise MemoryWriteError(
                f"refused to remember {where} {bad}: its {what} is not finite.",
                hint="A non-finite gradient is never stored; skip this task or lower the inner rate.",
            )

    # -- saving ----------------------------------------------------------------------------------

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
