"""Values of all slots behind one seam: a packed row per slot, in RAM here, in files in `segments`.

A value of Conv-4 has 18 tensors. Kept apart, 20 recalled slots are 360 reads from 18 places; packed, they
are 20 reads.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from jaxtyping import Int
from torch import Tensor

from torchemo.core.types import Params


@final
@dataclass(frozen=True)
class Layout:
    """Where the tensors of a value lie in its row.

    Attributes:
        shapes: Names and shapes of the tensors, in order.

    Example:
        >>> layout = Layout({"w": torch.Size((2,)), "b": torch.Size(())})
        >>> rows = layout.pack({"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])})
        >>> rows.tolist()
        [[1.0, 2.0, 3.0]]
        >>> layout.unpack(rows)["b"].tolist()
        [3.0]
    """

    shapes: Mapping[str, torch.Size]

    @classmethod
    def of(cls, values: Params) -> "Layout":
        """Return the layout of values ``{name: [slot or task, *shape]}``."""
        return cls({name: value.shape[1:] for name, value in values.items()})

    @property
    def numbers(self) -> int:
        """How many numbers a row holds."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def pack(self, values: Params) -> Tensor:
        """Lay values end to end, ``[task, number]``, in the order of the layout."""
        parts = [(values[name].detach(), math.prod(shape)) for name, shape in self.shapes.items()]
        return torch.cat([part.reshape(len(part), count) for part, count in parts], 1)

    def unpack(self, rows: Tensor) -> Params:
        """Return the tensors of rows ``[..., number]`` as views."""
        found, at = {}, 0
        for name, shape in self.shapes.items():
            part = rows[..., at : (at := at + math.prod(shape))]
            found[name] = part.view(*rows.shape[:-1], *shape)
        return found


class ValueStore(Protocol):
    """The values of T slots.

    A write has two halves: `stage` may fail, for want of room, and changes nothing; `write` then gives
    staged rows to slots.
    """

    layout: Layout

    def read(self, slots: Int[Tensor, " m"]) -> Tensor:
        """Return the rows of slots, ``[m, number]``."""
        ...

    def gather(self, slots: Int[Tensor, " m"]) -> Params:
        """Return the values of slots, ``{name: [m, *shape]}``."""
        ...

    def stage(self, values: Params) -> Any:
        """Bring the values of B tasks to where they are kept."""
        ...

    def write(self, slots: Sequence[int], staged: Any, tasks: Sequence[int]) -> None:
        """Give slots, all different, what was staged of these tasks."""
        ...

    def tensors(self) -> Params:
        """Return the values of all slots ``{name: [T, *shape]}``: the store's own, or copies from files."""
        ...

    def changing(self, filled: int) -> AbstractContextManager[Params]:
        """Give the values of the first slots to change in place; on leaving they are kept."""
        ...

    def moved(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow the network to another device, if they are in its memory."""
        ...


@final
class PackedRows:
    """Values in RAM, or in the memory of a device: one tensor ``[T, number]``.

    Args:
        rows: The tensor.
        layout: What a row holds.
    """

    def __init__(self, rows: Tensor, layout: Layout) -> None:
        self.rows = rows
        self.layout = layout

    @classmethod
    def of(cls, values: Params) -> "PackedRows":
        """Pack the values of all slots ``{name: [T, *shape]}``."""
        layout = Layout.of(values)
        return cls(layout.pack(values), layout)

    def read(self, slots: Int[Tensor, " m"]) -> Tensor:
        """Gather the rows of slots."""
        return self.rows.index_select(0, slots.to(self.rows.device))

    def gather(self, slots: Int[Tensor, " m"]) -> Params:
        """Gather the values of slots, each tensor by itself: a packed copy would be copied again."""
        slots = slots.to(self.rows.device)
        return {name: value.index_select(0, slots) for name, value in self.tensors().items()}

    def stage(self, values: Params) -> Tensor:
        """Pack the values of B tasks."""
        return self.layout.pack(values).to(self.rows)

    def write(self, slots: Sequence[int], staged: Tensor, tasks: Sequence[int]) -> None:
        """Copy staged rows into slots."""
        for slot, task in zip(slots, tasks, strict=True):
            self.rows[slot] = staged[task]

    def tensors(self) -> Params:
        """Return views of all rows, which change with them."""
        return self.layout.unpack(self.rows)

    @contextmanager
    def changing(self, filled: int) -> Iterator[Params]:
        """Give views of the first rows."""
        yield self.layout.unpack(self.rows[:filled])

    def moved(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow the network to another device; the dtype stays."""
        self.rows = self.rows.to(fn(self.rows[:0]).device)
