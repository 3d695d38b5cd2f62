"""Search among compressed keys for 10^7 slots and more, by faiss (extra ``ann``).

A key takes 24 bytes: 16 of product quantisation (Jegou et al., 2011, IVFADC) and its number. Compressed
distances only choose candidates; their order is that of exact distances, and ties are broken by slot.
"""

from importlib import import_module
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.memory.scale.cells import PER_CELL, Cells, exact, plain
from torchemo.memory.store import EpisodicMemory

BITS = 8
MOST_PARTS = 16
SAMPLE = 1 << 16
"""Keys from which the code books are learned."""


@final
class CompressedIndex(Cells):
    """Approximate Euclidean search in which a key takes 24 bytes (IVF-PQ), with exact re-ranking.

    Below ``least`` slots the search is exact. What is learned is learned anew whenever the memory has become
    four times as large, and saved. Candidates whose compressed distance ties with the last one are left out,
    so that the order of writing decides nothing. If too few are left, all slots are searched.

    Args:
        least: Slots below which search is exact.
        probes: Cells to look at; more find more and take longer.
        candidates: Keys to compare exactly, at least twice the number of neighbours.
    """

    option = "ivfpq"
    learned: ClassVar[tuple[str, ...]] = ("centroids", "learned_at", "codebooks")

    codebooks: Tensor

    def __init__(self, *, least: int = 10_000, probes: int = 32, candidates: int = 500) -> None:
        super().__init__(least=least, probes=probes)
        if candidates < 1 or least < 1 << BITS:
            raise ConfigError(
                f"candidates should be 1 or more and least {1 << BITS} or more, the size of a code book;"
                f" got {candidates} and {least}."
            )
        self.candidates = candidates
        self.register_buffer("codebooks", torch.zeros(0))

    def search(
        self, keys: Float[Tensor, "task dim"], slot_keys: Float[Tensor, "slot dim"], *, m: int
    ) -> Int[Tensor, "task m"]:
        """Return m near slots of each task by (distance, slot number); `follow` the memory first."""
        if not self.knows(slot_keys):
            return exact(keys, slot_keys, m=m)
        count = max(self.candidates, 2 * m)
        squared, found = self._cells.search(plain(keys), count)
        rows = []
        for key, far, near in zip(keys, squared, found, strict=True):
            # A full list may have cut through a tie, and then depends on the order of the cells.
            kept = near[far < far[-1]] if near[-1] >= 0 else near[near >= 0]
            rows.append(self.ordered(key, torch.from_numpy(kept), slot_keys, m=m))
        return torch.stack(rows)

    def learn(self, memory: EpisodicMemory) -> None:
        """Place the cells, and learn the code books of what is left of a key within its cell."""
        before = self.learned_at
        super().learn(memory)
        if self.learned_at is before:
            return
        keys = memory.keys[: len(memory)]
        every = -(-len(keys) // max(SAMPLE, PER_CELL << BITS))
        cells = self._made(keys.shape[1])
        cells.quantizer.add(plain(self.centroids))
        cells.train(plain(keys[::every]))
        books = import_module("faiss").vector_to_array(cells.pq.centroids)
        self.codebooks = torch.from_numpy(books.copy())

    def _made(self, dim: int) -> Any:
        faiss = import_module("faiss")
        # As many equal parts as there can be, up to 16.
        parts = max(n for n in range(1, MOST_PARTS + 1) if dim % n == 0)
        quantizer = faiss.IndexFlatL2(dim)
        cells = faiss.IndexIVFPQ(quantizer, dim, len(self.centroids), parts, BITS)
        if self.codebooks.numel() == cells.pq.centroids.size():
            faiss.copy_array_to_vector(plain(self.codebooks), cells.pq.centroids)
        return cells

    def _sorted(self, keys: Tensor) -> Any:
        cells = super()._sorted(keys)
        cells.precompute_table()
        return cells
