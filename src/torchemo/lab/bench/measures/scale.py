"""Memory at scale: recall and remember against the number of slots, and values that exceed RAM."""

import tempfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch

from torchemo.lab.bench.clock import Spread, seconds_per_call, spread, timed
from torchemo.lab.bench.measures.growth import resident_mb
from torchemo.lab.bench.measures.stores import KEY_DIM, K, full_of_vectors, unit_keys
from torchemo.memory.controllers import CONTROLLERS
from torchemo.memory.store import EpisodicMemory

QUERIES = 32


def search(request: Mapping[str, Any]) -> dict[str, Any]:
    """Time recall and remember of one task against the number of slots, by index and controller.

    The request holds ``recall`` (index, spread of the keys, numbers of slots) and ``remember`` (numbers).
    """
    recall = [
        {"index": index, "spread": keys, "slots": slots}
        | _recall_cost(slots, index, keys, request["repeats"])
        for index, keys, sizes in request["recall"]
        for slots in sizes
    ]
    remember = [
        {"controller": name, "slots": slots, "seconds": _write_cost(slots, name, request)}
        for name in CONTROLLERS
        for slots in request["remember"]
    ]
    return {"key_dim": KEY_DIM, "k": K, "recall": recall, "remember": remember}


def _recall_cost(
    slots: int, index: str, keys: Literal["clusters", "uniform"], repeats: int
) -> dict[str, Any]:
    emo = full_of_vectors(slots, size=16, index=index, spread=keys)
    queries, turn = unit_keys(QUERIES, "queries", spread=keys).unbind(), count()
    cost = seconds_per_call(
        lambda: emo.recall(queries[next(turn) % QUERIES][None]), repeats=repeats
    )
    exact = full_of_vectors(slots, size=16, spread=keys)
    hits = [
        len({*emo.recall(q[None]).slots[0].tolist()} & {*exact.recall(q[None]).slots[0].tolist()})
        for q in queries[:8]
    ]
    return {"seconds": cost, "found": sum(hits) / (8 * min(K, slots))}


def _write_cost(slots: int, controller: str, request: Mapping[str, Any]) -> Spread:
    emo = full_of_vectors(slots, size=16)
    emo.store.controller = CONTROLLERS[controller]()
    key, value = unit_keys(1, "write"), {"w": torch.ones(1, 16)}
    emo.store.write(key, value)
    return seconds_per_call(lambda: emo.store.write(key, value), repeats=request["repeats"])


def mapped(request: Mapping[str, Any]) -> dict[str, Any]:
    """Fill a store of values in mapped files, then overwrite and read it; what it takes of RAM."""
    slots, numbers = request["slots"], request["numbers"]
    with tempfile.TemporaryDirectory(prefix="torchemo-") as folder:
        store = EpisodicMemory(slots, KEY_DIM, values_dir=Path(folder))
        value = {"w": torch.randn(100, numbers)}
        keys = unit_keys(100, "write")
        before = anonymous_mb()
        batches = [timed(lambda: store.write(keys, value)).wall / 100 for _ in range(slots // 100)]
        g = torch.Generator().manual_seed(0)
        chosen = torch.randint(0, slots, (50, 1, K), generator=g)
        reads = [timed(lambda s=s: store.read(s)).wall for s in chosen]  # type: ignore[misc]
        return {
            "store_mb": slots * numbers * 4 / 2**20,
            "private_growth_mb": anonymous_mb() - before,
            "resident_mb": resident_mb(),
            "write_early": spread(batches[: max(len(batches) // 10, 1)]),
            "write_late": spread(batches[-max(len(batches) // 10, 1) :]),
            "read_20_slots": spread(reads),
        }


def anonymous_mb() -> float:
    """Return the memory of this process that is backed by no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return float("nan")
