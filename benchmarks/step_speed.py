"""Speed of one second-order MAML step on Conv-4, ours and everybody else's.

Work: 5-way 1-shot, 15 queries per class, 4 tasks, 5 inner steps, 32 filters, batch statistics of the task
at hand, all tensors adapted, gradient of the mean query loss in the initial parameters. Variants are
interleaved in one process; a round's ratio compares what ran within seconds. CPU seconds of the process
count (a busy machine stretches wall time only), wall seconds are recorded beside them. With several
workers ours runs tasks in threads, peers get threads inside operations, and wall seconds count. Run it on
an idle machine:

    python benchmarks/step_speed.py
    python benchmarks/step_speed.py --workers 2
"""

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import higher
import torch
import torchopt
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from torchemo import fused
from torchemo.inner import SGD
from torchemo.learners import MAML, InnerLoop
from torchemo.models import Conv4
from torchemo.rng import generator_for
from torchemo.step import outer_step
from torchemo.types import Batch, Episode

TASKS, WAY, STEPS, FILTERS, RATE, EPS = 4, 5, 5, 32, 0.05, 1e-3
Step = Callable[[], list[torch.Tensor]]


def make_episode(size: int, dtype: torch.dtype) -> Episode:
    """Make random pictures: the cost does not depend on what they show."""
    g = generator_for(0, "pictures")

    def batch(per_class: int) -> Batch:
        y = torch.arange(WAY).repeat(TASKS, per_class)
        return Batch(torch.rand(*y.shape, 3, size, size, generator=g, dtype=dtype), y)

    return Episode(batch(1), batch(15))


def make_module(size: int, params: dict[str, torch.Tensor]) -> nn.Module:
    """Build the network as a user of the peers would, with our initial parameters."""
    blocks: list[nn.Module] = []
    for i in range(4):
        blocks += [
            nn.Conv2d(3 if i == 0 else FILTERS, FILTERS, 3, padding=1),
            nn.BatchNorm2d(FILTERS, eps=EPS, track_running_stats=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    net = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(FILTERS * (size // 16) ** 2, WAY))
    net.to(next(iter(params.values())).dtype)
    with torch.no_grad():
        for own, value in zip(net.parameters(), params.values(), strict=True):
            own.copy_(value)
    return net


def step_of_plain_loop(net: nn.Module, episode: Episode, *, channels_last: bool = False) -> Step:
    """Unroll with functional_call and autograd.grad, one task after another."""
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def step() -> list[torch.Tensor]:
        total = [torch.zeros_like(p) for p in net.parameters()]
        for b in range(TASKS):
            theta = {n: p.detach().requires_grad_() for n, p in net.named_parameters()}
            x = episode.support.x[b].contiguous(memory_format=layout)
            current = dict(theta)
            for _ in range(STEPS):
                loss = cross_entropy(functional_call(net, current, x), episode.support.y[b])
                found = torch.autograd.grad(loss, list(current.values()), create_graph=True)
                current = {
                    n: p - RATE * g for (n, p), g in zip(current.items(), found, strict=True)
                }
            query = episode.query.x[b].contiguous(memory_format=layout)
            loss = cross_entropy(functional_call(net, current, query), episode.query.y[b])
            rows = torch.autograd.grad(loss, list(theta.values()))
            total = [t + r / TASKS for t, r in zip(total, rows, strict=True)]
        return total

    return step


def step_of_higher(net: nn.Module, episode: Episode) -> Step:
    """Unroll with higher's functional module and differentiable SGD."""
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)

    def step() -> list[torch.Tensor]:
        net.zero_grad()
        for b in range(TASKS):
            with higher.innerloop_ctx(net, optimizer, copy_initial_weights=False) as (fast, inner):
                for _ in range(STEPS):
                    inner.step(cross_entropy(fast(episode.support.x[b]), episode.support.y[b]))
                loss = cross_entropy(fast(episode.query.x[b]), episode.query.y[b])
                (loss / TASKS).backward()
        return [p.grad for p in net.parameters()]

    return step


def step_of_torchopt(net: nn.Module, episode: Episode) -> Step:
    """Unroll with TorchOpt's MetaSGD and its recipe of saved states."""
    inner, outer = torchopt.MetaSGD(net, lr=RATE), list(net.parameters())

    def step() -> list[torch.Tensor]:
        start, optimizer_start = (
            torchopt.extract_state_dict(net),
            torchopt.extract_state_dict(inner),
        )
        for p in outer:
            p.grad = None
        for b in range(TASKS):
            for _ in range(STEPS):
                inner.step(cross_entropy(net(episode.support.x[b]), episode.support.y[b]))
            (cross_entropy(net(episode.query.x[b]), episode.query.y[b]) / TASKS).backward()
            torchopt.recover_state_dict(net, start)
            torchopt.recover_state_dict(inner, optimizer_start)
        return [p.grad for p in outer]

    return step


def step_of_ours(
    path: str, params: dict[str, torch.Tensor], episode: Episode, *, size: int, workers: int
) -> Step:
    """Take `outer_step`; with workers, one task each."""
    model = Conv4(WAY, image_size=size, filters=FILTERS, eps=EPS, path=path)
    learner = MAML(InnerLoop(model, rule=SGD(RATE), steps=STEPS, adapt_bn=True))
    if workers == 1:
        return lambda: list(outer_step(learner, params, episode).gradients.values())
    pool = ThreadPoolExecutor(workers)
    parts = [
        Episode(
            *(
                Batch(batch.x[b : b + 1], batch.y[b : b + 1])
                for batch in (episode.support, episode.query)
            )
        )
        for b in range(TASKS)
    ]

    def step() -> list[torch.Tensor]:
        rows = list(pool.map(lambda part: outer_step(learner, params, part).gradients, parts))
        return [torch.stack([row[name] for row in rows]).mean(0) for name in params]

    return step


def make_variants(size: int, workers: int, dtype: torch.dtype = torch.float32) -> dict[str, Step]:
    """All variants from the same initial parameters on the same tasks."""
    episode = make_episode(size, dtype)
    drawn = Conv4(WAY, image_size=size, filters=FILTERS).init(generator_for(0, "parameters"))
    params = {name: value.to(dtype) for name, value in drawn.items()}
    ours = {
        f"torchemo, {path}": step_of_ours(path, params, episode, size=size, workers=workers)
        for path in ("fused", "reference")
    }
    return {
        **ours,
        "plain loop": step_of_plain_loop(make_module(size, params), episode),
        "plain loop, channels last": step_of_plain_loop(
            make_module(size, params), episode, channels_last=True
        ),
        "higher": step_of_higher(make_module(size, params), episode),
        "TorchOpt": step_of_torchopt(make_module(size, params), episode),
    }


def agreement(workers: int) -> dict[str, float]:
    """Compare everybody's gradient with the plain loop's: the same work must give the same numbers.

    In float64 on small pictures: in float32 near ties of pooling and ReLU fall differently for everybody.
    """
    variants = make_variants(28, workers, torch.float64)
    flat = {
        name: torch.cat([g.detach().flatten() for g in step()]) for name, step in variants.items()
    }
    base = flat["plain loop"]
    found = {name: float((g - base).norm() / base.norm()) for name, g in flat.items()}
    assert max(found.values()) < 1e-8, found
    return found


def measure(
    variants: dict[str, Step], *, workers: int, repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """CPU and wall seconds of every variant, round by round."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, step in variants.items():
            torch.set_num_threads(1 if name.startswith("torchemo") else workers)
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return times


def summarise(
    times: dict[str, list[tuple[float, float]]], *, column: int
) -> dict[str, dict[str, float]]:
    """Medians, and the median and range over the rounds of (best peer) / (variant)."""
    peers = [name for name in times if not name.startswith("torchemo")]
    best = min(peers, key=lambda name: statistics.median(t[column] for t in times[name]))
    rows = {}
    for name, pairs in times.items():
        ratios = [b[column] / t[column] for b, t in zip(times[best], pairs, strict=True)]
        rows[name] = {
            "cpu_seconds": statistics.median(cpu for cpu, _ in pairs),
            "wall_seconds": statistics.median(wall for _, wall in pairs),
            "speed_to_best_peer": statistics.median(ratios),
            "speed_range": [min(ratios), max(ratios)],
        }
    return {"best_peer": best, "rows": rows}


def main() -> None:
    """Measure at every size and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[84, 28])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--keep-memory", action="store_true", help="see torchemo.fused.keep_memory")
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    kept = fused.keep_memory() if options.keep_memory else False
    # With several threads CPU seconds also count waiting inside operations.
    column = 0 if options.workers == 1 else 1
    results, same = {}, agreement(options.workers)
    for size in options.sizes:
        torch.set_num_threads(1)
        variants = make_variants(size, options.workers)
        for step in variants.values():
            step()
        found = summarise(
            measure(variants, workers=options.workers, repeats=options.repeats), column=column
        )
        for name, row in found["rows"].items():
            print(
                f"{size} px  {name:26s} {row['cpu_seconds']:7.3f} s cpu {row['wall_seconds']:7.3f} s"
                f"  x{row['speed_to_best_peer']:.2f}"
            )
        results[str(size)] = found
    record = {
        "what": "second-order MAML step, Conv-4, 5-way 1-shot, 15 queries per class, 4 tasks, 5 inner steps",
        "compared": "CPU seconds" if column == 0 else "wall seconds",
        "workers": options.workers,
        "repeats": options.repeats,
        "keep_memory": kept,
        "fused_available": fused.status().available,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "environment": {"torch": torch.__version__, "machine": platform.machine()},
        "gradient_difference_float64": same,
        "sizes": results,
    }
    path = Path(options.out or f"benchmarks/results/step_speed_{options.workers}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
