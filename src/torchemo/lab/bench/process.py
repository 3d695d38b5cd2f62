"""Measurements in fresh processes: nobody inherits another's heap, threads or allocator setting."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torchemo.core.errors import ResourceError

MEASUREMENTS = {
    "step": "torchemo.lab.bench.measures.step:measure",
    "peak": "torchemo.lab.bench.measures.step:peak",
    "sizes": "torchemo.lab.bench.measures.step:against_size",
    "learners": "torchemo.lab.bench.measures.step:learners",
    "family": "torchemo.lab.bench.measures.family:measure",
    "training": "torchemo.lab.bench.measures.training:measure",
    "place": "torchemo.lab.bench.measures.training:measure_place",
    "growth": "torchemo.lab.bench.measures.growth:measure",
    "shares": "torchemo.lab.bench.measures.memory:shares",
    "verbs": "torchemo.lab.bench.measures.memory:verbs",
    "search": "torchemo.lab.bench.measures.scale:search",
    "mapped": "torchemo.lab.bench.measures.scale:mapped",
    "simulation": "torchemo.lab.bench.measures.simulation:simulate",
    "data": "torchemo.lab.bench.measures.data:measure",
    "sampling": "torchemo.lab.bench.measures.packed:sampling",
    "packing": "torchemo.lab.bench.measures.packed:packing",
    "mapped_images": "torchemo.lab.bench.measures.packed:mapped",
    "limit": "torchemo.lab.bench.measures.limit:measure",
    "resnet12": "torchemo.lab.bench.measures.limit:resnet12",
}
"""What a fresh process can measure: functions of one request that return what JSON can hold."""


def in_fresh_process(name: str, request: Mapping[str, Any], *, keep: bool = True) -> dict[str, Any]:
    """Run one measurement in a process of its own."""
    done = subprocess.run(  # noqa: S603 -- this very interpreter on this very package
        [sys.executable, "-m", "torchemo.lab.bench", name, "keep" if keep else "default"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": str(os.cpu_count() or 1)},
    )
    if done.returncode:
        raise ResourceError(
            f"measurement '{name}' failed: {done.stderr.strip()[-2000:] or done.returncode}"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_here(name: str, request: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Run one measurement in this process, after setting the allocator."""
    import torch

    from torchemo.models.fused import keep_memory

    torch.set_num_threads(1)
    kept = keep_memory() if keep else False
    module, _, function = MEASUREMENTS[name].partition(":")
    found: dict[str, Any] = getattr(import_module(module), function)(request)
    return {"allocator": "kept" if kept else "default", **found}
