"""What ARML and its family cost beside MAML (Conv-4-32, 84 px, 5-way 1-shot, 4 tasks).

Takes whole training steps, Adam included, of every learner in its published size, interleaved in one process,
and writes CPU and wall seconds, ratios and parameters to ``benchmarks/results/family_cost.json``:

    python benchmarks/family_cost.py
"""

import argparse
import json
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from emo_cost import TASKS, episode

from torchemo.build import TaskShape
from torchemo.experiment import build_trainer
from torchemo.presets import preset
from torchemo.train import Trainer
from torchemo.types import Episode

LEARNERS = ("maml", "arml-published", "hsml-published", "tsa-maml", "musml", "bmg")


def trainer(name: str, size: int, workers: int) -> Trainer:
    """Make a learner for pictures of 84 x 84; TSA-MAML begins with its groups."""
    config = preset(name)
    if name == "tsa-maml":
        groups = replace(config.learner, first_stage=0, cluster_tasks=2 * TASKS)
        config = replace(config, learner=groups)
    return build_trainer(config, TaskShape("classification", (3, size, size), 5), workers=workers)


def measure(made: Trainer, tasks: Episode) -> tuple[float, float]:
    """Time one training step: wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    made.step(tasks)
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Measure all learners interleaved and record them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--size", type=int, default=84)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", default="benchmarks/results/family_cost.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tasks = episode(options.size)
    made = {name: trainer(name, options.size, options.workers) for name in LEARNERS}
    for one in made.values():
        for _ in range(2):
            measure(one, tasks)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for _ in range(options.repeats):
        for name, one in made.items():
            times[name].append(measure(one, tasks))
    rows = {name: summary(times[name], times["maml"], made[name]) for name in made}
    for name, row in rows.items():
        print(f"{name:16s} {row['cpu_seconds']:.3f} s  x{row['cpu_ratio_to_maml']:.2f}")
    result = {
        "what": "training steps of learners beside MAML's, single-threaded operations, interleaved",
        "image_size": options.size,
        "tasks": TASKS,
        "workers": options.workers,
        "repeats": options.repeats,
        "environment": {"torch": torch.__version__, "machine": platform.processor()},
        "rows": rows,
    }
    path = Path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def summary(
    own: list[tuple[float, float]], maml: list[tuple[float, float]], made: Trainer
) -> dict[str, float]:
    """Return medians, and medians of the ratios within each round."""
    wall, cpu = zip(*own, strict=True)
    base_wall, base_cpu = zip(*maml, strict=True)
    ratio = [a / b for a, b in zip(cpu, base_cpu, strict=True)]
    return {
        "wall_seconds": statistics.median(wall),
        "cpu_seconds": statistics.median(cpu),
        "cpu_ratio_to_maml": statistics.median(ratio),
        "cpu_ratio_least": min(ratio),
        "cpu_ratio_most": max(ratio),
        "wall_ratio_to_maml": statistics.median(
            a / b for a, b in zip(wall, base_wall, strict=True)
        ),
        "parameters": float(sum(p.numel() for p in made.learned.values())),
    }


if __name__ == "__main__":
    main()
