"""What EMO costs on top of a second-order MAML step (Conv-4-32, 84 px, 5-way 1-shot, 4 tasks).

Runs MAML without memory and with every aggregator interleaved in one process, and writes CPU and wall
seconds, ratios and their spread to ``benchmarks/results/emo_cost.json``. Run it on an idle machine:

    python benchmarks/emo_cost.py
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from torchemo.build import TaskShape, build_emo, build_learner
from torchemo.config import (
    AggregatorConfig,
    EMOConfig,
    KeyConfig,
    LearnerConfig,
    MemoryConfig,
    RetrievalConfig,
    ValueConfig,
)
from torchemo.models import Conv4
from torchemo.step import outer_step
from torchemo.types import Batch, Episode

CAPACITY, K, TASKS = 200, 20, 4


def episode(size: int) -> Episode:
    """Make random pictures: the cost does not depend on what they show."""
    g = torch.Generator().manual_seed(0)

    def batch(per_class: int) -> Batch:
        y = torch.arange(5).repeat(TASKS, per_class)
        return Batch(torch.rand(*y.shape, 3, size, size, generator=g), y)

    return Episode(batch(1), batch(15))


def variant(kind: str, steps: str) -> EMOConfig:
    """Literal retrieval (uniform, k = 20, T = 200) around one aggregator."""
    if kind == "consolidate":
        return EMOConfig(
            memory=MemoryConfig(capacity=8, write="consolidate", warmup=1),
            key=KeyConfig(network="statistics", training="none"),
            retrieval=RetrievalConfig(k=None),
            aggregator=AggregatorConfig(kind="sum"),
            value=ValueConfig(content="meta"),
        )
    return EMOConfig(
        memory=MemoryConfig(capacity=CAPACITY),
        key=KeyConfig(network="statistics", training="none"),
        retrieval=RetrievalConfig(k=K, weights="uniform"),
        aggregator=AggregatorConfig(kind=kind),
        value=ValueConfig(memory_steps=steps),
    )


def with_key_network() -> EMOConfig:
    """Sum with the paper's key network, trained by the outer loss through softmax weights."""
    return EMOConfig(
        memory=MemoryConfig(capacity=CAPACITY),
        retrieval=RetrievalConfig(k=K),
        aggregator=AggregatorConfig(kind="sum"),
    )


def filled(config: EMOConfig, learner, tasks):
    """Build EMO with a full memory."""
    emo = build_emo(config, learner, tasks)
    theta = learner.init(torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(1)
    capacity = emo.memory.capacity
    keys = torch.nn.functional.normalize(torch.randn(capacity, emo.memory.key_dim, generator=g))
    buffers = learner.loop.model.buffers
    names = [n for n in theta if n not in buffers]
    if not emo.consolidates:
        names = learner.loop.names(theta)
    emo.memory.write(
        keys, {n: 0.01 * torch.randn(capacity, *theta[n].shape, generator=g) for n in names}
    )
    return emo


def measure(learner, params, tasks, emo) -> tuple[float, float]:
    """Time one outer step, writes included: wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    step = outer_step(learner, params, tasks, emo=emo)
    if emo is not None:
        emo.remember(step.recall, step.values)
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Measure all variants interleaved and record them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--size", type=int, default=84)
    parser.add_argument("--out", default="benchmarks/results/emo_cost.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = TaskShape("classification", (3, options.size, options.size), 5)
    learner = build_learner(LearnerConfig(), Conv4(5, image_size=options.size), shape)
    params = learner.init(torch.Generator().manual_seed(0))
    tasks = episode(options.size)
    variants = {"maml": None}
    for kind in ("mean", "sum", "gated", "gate", "coordinate"):
        variants[f"{kind}, first step"] = filled(variant(kind, "first"), learner, shape)
        variants[f"{kind}, every step"] = filled(variant(kind, "all"), learner, shape)
    variants["consolidate"] = filled(variant("consolidate", "first"), learner, shape)
    variants["sum, key network"] = filled(with_key_network(), learner, shape)
    times = {name: [] for name in variants}
    for emo in variants.values():
        measure(learner, params, tasks, emo)
    for _ in range(options.repeats):
        for name, emo in variants.items():
            times[name].append(measure(learner, params, tasks, emo))
    base_cpu = [cpu for _, cpu in times["maml"]]
    rows = {}
    for name, pairs in times.items():
        ratios = [cpu / base for (_, cpu), base in zip(pairs, base_cpu, strict=True)]
        rows[name] = {
            "wall_seconds": statistics.median(wall for wall, _ in pairs),
            "cpu_seconds": statistics.median(cpu for _, cpu in pairs),
            "cpu_ratio_to_maml": statistics.median(ratios),
            "cpu_ratio_spread": [min(ratios), max(ratios)],
        }
        print(
            f"{name:24s} {rows[name]['cpu_seconds']:.3f} s  x{rows[name]['cpu_ratio_to_maml']:.3f}"
        )
    result = {
        "what": "second-order MAML outer step with and without EMO, one thread, interleaved",
        "image_size": options.size,
        "capacity": CAPACITY,
        "k": K,
        "tasks": TASKS,
        "repeats": options.repeats,
        "environment": {"torch": torch.__version__, "machine": platform.processor()},
        "rows": rows,
    }
    path = Path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
