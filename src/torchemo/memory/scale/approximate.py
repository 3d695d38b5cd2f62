"""Approximate search for 10^5 slots and more, by faiss (extra ``ann``)."""

from collections.abc import Mapping
from importlib import import_module, util
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from torchemo.core.errors import ConfigError
from torchemo.memory.search import ExactIndex
from torchemo.memory.store import EpisodicMemory


@final
class ApproximateIndex(nn.Module):
    """Approximate Euclidean search by faiss: keys in Voronoi cells, the nearest few cells looked at.

    Up to ``least`` slots the search is exact. Above, k-means over the keys gives ``2 sqrt(T)`` cells; they
    are learned anew whenever the memory has become four times as large, saved with the state, and a function
    of the keys at that moment, so that a restored index finds what the old one found. What the cells offer
    is ordered by exact distance, equal ones by slot number. A write moves one key: its cost does not
    depend on the number of slots.

    Args:
        least: Slots below which search is exact.
        probes: Cells to look at; more find more and take longer.
    """

    centroids: Tensor
    learned_at: Tensor

    def __init__(self, *, least: int = 10_000, probes: int = 32) -> None:
        super().__init__()
        if util.find_spec("faiss") is None:
            raise ConfigError(
                "memory.index = approximate needs the package faiss.",
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

    def search(
        self, keys: Float[Tensor, "task dim"], slot_keys: Float[Tensor, "slot dim"], *, m: int
    ) -> Int[Tensor, "task m"]:
        """Return m near slots of each task by (distance, slot number); `follow` the memory first."""
        if self._cells is None or self._cells.ntotal != len(slot_keys):
            return ExactIndex().search(keys, slot_keys, m=m)
        # Twice as many, so that rounding in single precision decides nothing near the end of the list.
        found = self._cells.search(_plain(keys), 2 * m)[1]
        rows = []
        for key, near in zip(keys, torch.from_numpy(found), strict=True):
            near = near[near >= 0].sort().values
            if len(near) < m:  # the cells looked at hold too few
                rows.append(ExactIndex().search(key[None], slot_keys, m=m)[0])
                continue
            squared = (slot_keys[near] - key).square().sum(-1)
            rows.append(near[squared.sort(stable=True).indices[:m]])
        return torch.stack(rows)

    def learn(self, memory: EpisodicMemory) -> None:
        """Place the cells, at ``least`` slots and whenever the memory is four times as large."""
        filled = len(memory)
        if filled < self.least or filled < 4 * int(self.learned_at):
            return
        cells = int(2 * filled**0.5)
        kmeans = import_module("faiss").Kmeans(
            memory.key_dim, cells, niter=5, seed=0, max_points_per_centroid=64
        )
        kmeans.train(_plain(memory.keys[:filled]))
        self.centroids = torch.from_numpy(kmeans.centroids.copy())
        self.learned_at = torch.tensor(filled)
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
            slots = torch.tensor(old)
            self._cells.update_vectors(slots.numpy(), _plain(memory.keys[slots]))
        if self._cells.ntotal < len(memory):
            self._cells.add(_plain(memory.keys[self._cells.ntotal : len(memory)]))

    def _sorted(self, keys: Tensor) -> Any:
        faiss, dim = import_module("faiss"), keys.shape[1]
        cells = faiss.IndexIVFFlat(faiss.IndexFlatL2(dim), dim, len(self.centroids))
        cells.quantizer.add(_plain(self.centroids))
        cells.is_trained = True
        cells.nprobe = self.probes
        cells.add(_plain(keys))
        cells.make_direct_map(True)
        return cells

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Take the saved cells, however many they are."""
        for name in ("centroids", "learned_at"):
            if f"{prefix}{name}" in state_dict:
                setattr(self, name, state_dict[f"{prefix}{name}"].detach().clone())
        self._cells = None
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _plain(keys: Tensor) -> Any:
    """Return keys as faiss reads them: contiguous, single precision, in this process."""
    return keys.detach().float().contiguous().numpy()
