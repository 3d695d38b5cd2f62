"""A large memory, simulated: clustered keys, values in files, slots overwritten, tasks recalled."""

import os
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchemo.lab.bench.measures.growth import resident_mb
from torchemo.lab.bench.measures.stores import CLUSTERS, KEY_DIM, K, unit_keys
from torchemo.lab.bench.sizes import Asked
from torchemo.memory.controllers import CONTROLLERS
from torchemo.memory.recall import Retrieval
from torchemo.memory.scale.cells import exact
from torchemo.memory.scale.segments import FileRows
from torchemo.memory.search import INDICES
from torchemo.memory.store import EpisodicMemory

BATCH, QUERIES, RECALLS, WRITES = 1000, 100, 1000, 4
"""Tasks written at once while filling, queries compared with exact search, recalls, and writes after each."""
OVERWRITTEN = 20_000
"""Slots overwritten by each controller before recalls are timed, or a tenth of all."""
CONTROLLED = ("fifo", "clock")


def simulate(request: Mapping[str, Any]) -> dict[str, Any]:
    """Fill a memory, overwrite slots, recall; compare with exact search, and say what it takes."""
    wanted = Asked(**request)
    with tempfile.TemporaryDirectory(prefix="torchemo-", dir=wanted.folder) as folder:
        return _Simulation(wanted, Path(folder)).run()


class _Simulation:
    """One memory. The first number of a value is the number of its write, so that reads can be checked."""

    def __init__(self, wanted: Asked, folder: Path) -> None:
        self.wanted, self.folder = wanted, folder
        self.store = EpisodicMemory(
            wanted.slots, KEY_DIM, controller=CONTROLLERS["fifo"](), values_dir=folder
        )
        self.retrieval = Retrieval(min(K, wanted.slots), index=INDICES[wanted.index]())
        self.values = torch.randn(BATCH, wanted.value // 4)
        self.count = 0
        self.number = torch.zeros(wanted.slots)

    def run(self) -> dict[str, Any]:
        """Do it in order."""
        fill = _seconds(self._write, self.wanted.slots)
        found: dict[str, Any] = {"fill_seconds": fill, "filled_mb": resident_mb()}
        for name in CONTROLLED:
            self.store.controller = CONTROLLERS[name]()
            count = min(OVERWRITTEN, max(1, self.wanted.slots // 10))
            found[name] = {"overwrite_seconds_per_task": _seconds(self._write, count) / count}
            found[name] |= self._recalls(RECALLS // len(CONTROLLED))
        snapshot = _seconds(self._rows.snapshot)
        self._forget_cached()
        cold = [self._recall(i, "cold") for i in range(QUERIES)]
        found["resident_mb"] = resident_mb()
        return {
            "key_dim": KEY_DIM,
            "clusters": CLUSTERS,
            "k": K,
            **found,
            "cold": _percentiles(cold),
            "snapshot_seconds": snapshot,
            **self._compared(),
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "disk_mb": self._disk_mb(),
        }

    @property
    def _rows(self) -> FileRows:
        if not isinstance(self.store.contents, FileRows):
            raise TypeError("the values of a simulation are in files")
        return self.store.contents

    def _write(self, count: int) -> None:
        """Write tasks in batches, and let the index follow."""
        for first in range(0, count, BATCH):
            tasks = min(BATCH, count - first)
            keys = unit_keys(tasks, f"write {self.count}", spread="clusters")
            self._remember(keys)
            self.retrieval.learn(self.store)
            self._follow()

    def _remember(self, keys: Tensor) -> None:
        numbers = torch.arange(self.count, self.count + len(keys), dtype=torch.float32)
        values = self.values[: len(keys)]
        values[:, 0] = numbers
        self.number[self.store.write(keys, {"w": values})] = numbers
        self.count += len(keys)

    def _follow(self) -> None:
        follow = getattr(self.retrieval.index, "follow", None)
        if follow is not None:
            follow(self.store)

    def _recalls(self, count: int) -> dict[str, Any]:
        """Recall tasks, touch what they recalled, and overwrite slots after each."""
        recalls, writes = [], []
        for i in range(count):
            recalls.append(self._recall(i, "warm", touch=True))
            keys = unit_keys(WRITES, f"round {self.count}", spread="clusters")
            writes.append(_seconds(self._remember, keys) / WRITES)
        return {"recall": _percentiles(recalls), "write_of_a_task": _percentiles(writes)}

    def _recall(self, i: int, name: str, *, touch: bool = False) -> float:
        key = unit_keys(1, f"query {name} {self.count} {i}", spread="clusters")
        start = time.perf_counter()
        recall = self.retrieval(self.store, key)
        taken = time.perf_counter() - start
        if not torch.equal(recall.values["w"][..., 0], self.number[recall.slots]):
            raise RuntimeError("a slot did not hold what was written to it")
        if touch:
            self.store.touch(recall.slots, generations=recall.generations)
        return taken

    def _compared(self) -> dict[str, Any]:
        """Compare with exact search, and time search alone."""
        keys = unit_keys(QUERIES, "compared", spread="clusters")
        self._follow()
        index, filled, m = (
            self.retrieval.index,
            self.store.keys[: len(self.store)],
            self.retrieval.k,
        )
        times, hits = [], 0
        for key in keys:
            start = time.perf_counter()
            found = index.search(key[None], filled, m=m or 0)
            times.append(time.perf_counter() - start)
            hits += len({*found[0].tolist()} & {*exact(key[None], filled, m=m or 0)[0].tolist()})
        return {"search": _percentiles(times), "recall_at_20": hits / (QUERIES * (m or 1))}

    def _forget_cached(self) -> None:
        """Ask the system to forget what it has read of the values."""
        if hasattr(os, "posix_fadvise"):
            for segment in self._rows.files:
                os.posix_fadvise(segment.handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def _disk_mb(self) -> float:
        """Return the blocks of all files; two names of a file count once."""
        stats = {s.st_ino: s for p in self.folder.rglob("*") if (s := p.lstat()) and p.is_file()}
        return sum(s.st_blocks * 512 for s in stats.values()) / 2**20


def _seconds(run: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - start


def _percentiles(times: list[float]) -> dict[str, float]:
    found = torch.tensor(times, dtype=torch.float64)
    ends = {"median": 0.5, "p95": 0.95}
    return {name: float(found.quantile(share)) for name, share in ends.items()}
