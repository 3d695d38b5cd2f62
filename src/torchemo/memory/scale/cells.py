"""Keys in Voronoi cells: what the indices that faiss (extra ``ann``) searches have in common."""

from abc import abstractmethod
from collections.abc import Mapping
from importlib import import_module, util
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from torchemo.core.errors import ConfigError
from torchemo.memory.store import EpisodicMemory

PER_CELL = 64
"""Keys from which a cell is learned."""
AT_ONCE = 1 << 16
"""Keys that exact search looks at in one go."""


class Cells(nn.Module):
    """Cells that are learned from the keys of a memory, and follow its writes.

    Up to ``least`` slots the search is exact. Above, k-means over the keys gives ``2 sqrt(T)`` cells; they
    are learned anew whenever the memory has become four times as large, saved with the state, and a function
    of the keys at that moment, so that a restored index finds what the old one found. A write moves one key:
    its cost does not depend on the number of slots.

    Args:
        least: Slots below which search is exact.
        probes: Cells to look at; more find more and take longer.
    """

    option: ClassVar[str]
    """How it is called as memory.index."""
    learned: ClassVar[tuple[str, ...]] = ("centroids", "learned_at")
    """Buffers that are learned, of any size when they are restored."""

    centroids: Tensor
    learned_at: Tensor

    def __init__(self, *, least: int, probes: int) -> None:
        super().__init__()
        if util.find_spec("faiss") is None:
            raise ConfigError(
                f"memory.index = {self.option} needs the package faiss.",
                hint="pip install torchemo[ann], or set memory.index to exact.",
            )
        if least < 1 or probes < 1:
            raise ConfigError(f"least and probes should be 1 or more, got {least} and {probes}.")
        self.least = least
        self.probes = probes
        self.register_buffer("centroids", torch.zeros(0, 1))
        self.register_buffer("learned_at", torch.tensor(0))
        self._cells: Any = None
        self._mark = 0

    @abstractmethod
    def _made(self, dim: int) -> Any:
        """Make an empty index of faiss with what was learned, but for its centroids."""

    def knows(self, slot_keys: Float[Tensor, "slot dim"]) -> bool:
        """Return whether all keys are in cells."""
        return self._cells is not None and self._cells.ntotal == len(slot_keys)

    def ordered(
        self,
        key: Float[Tensor, " dim"],
        near: Int[Tensor, " candidate"],
        slot_keys: Float[Tensor, "slot dim"],
        *,
        m: int,
    ) -> Int[Tensor, " m"]:
        """Return the first m candidates by (exact distance, slot number); of too few, those of all slots."""
        if len(near) < m:
            return exact(key[None], slot_keys, m=m)[0]
        near = near.sort().values
        squared = (slot_keys[near] - key).square().sum(-1)
        return near[squared.sort(stable=True).indices[:m]]

    def learn(self, memory: EpisodicMemory) -> None:
        """Place the cells, at ``least`` slots and whenever the memory is four times as large."""
        filled = len(memory)
        if filled < self.least or filled < 4 * int(self.learned_at):
            return
        cells = int(2 * filled**0.5)
        kmeans = import_module("faiss").Kmeans(
            memory.key_dim, cells, niter=5, seed=0, max_points_per_centroid=PER_CELL
        )
        kmeans.train(plain(memory.keys[:filled]))
        self.centroids = torch.from_numpy(kmeans.centroids.copy())
        self.learned_at = torch.tensor(filled, device="cpu")
        self._cells = None

    def follow(self, memory: EpisodicMemory) -> None:
        """Move the keys that were overwritten; after anything else, sort all keys into cells again."""
        if not len(self.centroids):
            return
        filled = len(memory)
        changed = memory.journal.since(self._mark, memory.keys)
        if self._cells is None or changed is None or self._cells.ntotal > filled:
            self._cells = self._sorted(memory.keys[:filled])
        else:
            self._move(memory, sorted(set(changed)))
        self._mark = memory.journal.mark(memory.keys)

    def _move(self, memory: EpisodicMemory, changed: list[int]) -> None:
        old = [slot for slot in changed if slot < self._cells.ntotal]
        if old:
            slots = torch.tensor(old, device="cpu")
            self._cells.update_vectors(slots.numpy(), plain(memory.keys[slots]))
        if self._cells.ntotal < len(memory):
            self._cells.add(plain(memory.keys[self._cells.ntotal : len(memory)]))

    def _sorted(self, keys: Tensor) -> Any:
        cells = self._made(keys.shape[1])
        cells.quantizer.add(plain(self.centroids))
        cells.is_trained = True
        cells.nprobe = self.probes
        cells.add(plain(keys))
        cells.make_direct_map(True)
        return cells

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Take what was saved, however large it is."""
        for name in self.learned:
            if f"{prefix}{name}" in state_dict:
                setattr(self, name, state_dict[f"{prefix}{name}"].detach().clone())
        self._cells = None
        super()._load_from_state_dict(state_dict, prefix, *rest)


def exact(keys: Tensor, slot_keys: Tensor, *, m: int) -> Int[Tensor, "task m"]:
    """Search all slots as `ExactIndex` does, some at a time: differences of 10^7 keys may exceed RAM."""
    squared = keys.new_zeros(len(keys), 0)
    slots = torch.zeros(len(keys), 0, dtype=torch.int64, device=keys.device)
    for first in range(0, len(slot_keys), AT_ONCE):
        part = slot_keys[first : first + AT_ONCE]
        numbers = torch.arange(first, first + len(part), device=keys.device).expand(len(keys), -1)
        # The best so far come first, so that a stable sort leaves equal distances in the order of slots.
        squared = torch.cat([squared, (keys[:, None] - part[None]).square().sum(-1)], 1)
        squared, order = (t[:, :m] for t in squared.sort(dim=1, stable=True))
        slots = torch.cat([slots, numbers], 1).gather(1, order)
    return slots


def plain(keys: Tensor) -> Any:
    """Return keys as faiss reads them: contiguous, single precision, in this process."""
    return keys.detach().float().contiguous().numpy()
