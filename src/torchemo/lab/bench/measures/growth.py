"""Memory over many outer steps: it must not grow with their number."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchemo.config.registry import Part
from torchemo.lab.bench.measures.stores import build_memory
from torchemo.lab.bench.measures.work import Work
from torchemo.training.trainer import Trainer


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Train for ``steps`` outer steps with a memory of 20 slots; note the resident memory on the way.

    Growth is counted from a tenth of the way, when the memory is full and caches are warm.
    """
    work, steps = Work(**request["work"]), request["steps"]
    learner = work.make_learner()
    options = {"capacity": 20, "key": Part("statistics"), "aggregator": Part("gated")}
    memory = build_memory(Part("gradients", options), learner, work.shape)
    trainer = Trainer(learner, memory=memory, workers=request["workers"])
    episode = work.episode()
    seen = []
    for i in range(1, steps + 1):
        trainer.step(episode)
        if i % max(steps // 20, 1) == 0:
            seen.append({"step": i, "resident_mb": resident_mb()})
    early = next(s["resident_mb"] for s in seen if s["step"] >= steps // 10)
    return {"seen": seen, "growth": seen[-1]["resident_mb"] / early - 1}


def resident_mb() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
