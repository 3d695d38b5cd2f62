"""Approximate search for 10^5 slots and more, by faiss (extra ``ann``)."""

from importlib import import_module
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torchemo.memory.scale.cells import Cells, exact, plain


@final
class ApproximateIndex(Cells):
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

    option = "approximate"

    def __init__(self, *, least: int = 10_000, probes: int = 32) -> None:
        super().__init__(least=least, probes=probes)

    def search(
        self, keys: Float[Tensor, "task dim"], slot_keys: Float[Tensor, "slot dim"], *, m: int
    ) -> Int[Tensor, "task m"]:
        """Return m near slots of each task by (distance, slot number); `follow` the memory first."""
        if not self.knows(slot_keys):
            return exact(keys, slot_keys, m=m)
        # Twice as many, so that rounding in single precision decides nothing near the end of the list.
        found = self._cells.search(plain(keys), 2 * m)[1]
        return torch.stack(
            [
                self.ordered(key, near[near >= 0], slot_keys, m=m)
                for key, near in zip(keys, torch.from_numpy(found), strict=True)
            ]
        )

    def _made(self, dim: int) -> Any:
        faiss = import_module("faiss")
        return faiss.IndexIVFFlat(faiss.IndexFlatL2(dim), dim, len(self.centroids))
