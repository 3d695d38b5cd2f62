"""Interleaved timing: variants take turns, so that whatever slows the machine slows all of them."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

Action: TypeAlias = Callable[[], object]
Spread: TypeAlias = dict[str, float]


class Variant(NamedTuple):
    """Something to be timed.

    Attributes:
        run: Does the work once.
        threads: Threads inside torch's operations while it runs.
    """

    run: Action
    threads: int = 1


class Sample(NamedTuple):
    """Seconds of one run, on the clock and of all cores together."""

    wall: float
    cpu: float


def interleave(
    variants: Mapping[str, Variant], *, repeats: int, warmup: int = 1
) -> dict[str, list[Sample]]:
    """Time every variant once per round."""
    times: dict[str, list[Sample]] = {name: [] for name in variants}
    for round_ in range(warmup + repeats):
        for name, variant in variants.items():
            torch.set_num_threads(variant.threads)
            sample = timed(variant.run)
            if round_ >= warmup:
                times[name].append(sample)
    torch.set_num_threads(1)
    return times


def timed(run: Action) -> Sample:
    """Run once."""
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return Sample(time.perf_counter() - wall, time.process_time() - cpu)


def seconds_per_call(run: Action, *, repeats: int, least: float = 0.02) -> Spread:
    """Time something short: each sample repeats it until ``least`` seconds have passed."""
    once = timed(run).wall
    calls = max(1, int(least / max(once, 1e-7)))

    def many() -> None:
        for _ in range(calls):
            run()

    return spread([timed(many).wall / calls for _ in range(repeats)])


def spread(values: Sequence[float]) -> Spread:
    """Return median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def fastest(times: Mapping[str, Sequence[Sample]], names: Sequence[str]) -> str:
    """Name the variant with the smallest median of seconds on the clock."""
    return min(names, key=lambda name: statistics.median(s.wall for s in times[name]))


def rows(times: Mapping[str, Sequence[Sample]], *, base: str) -> dict[str, dict[str, Any]]:
    """Summarise: seconds, and how many times faster than ``base`` within the same rounds."""
    found = {}
    for name, samples in times.items():
        pairs = list(zip(times[base], samples, strict=True))
        found[name] = {
            "wall": spread([s.wall for s in samples]),
            "cpu": spread([s.cpu for s in samples]),
            "speed": spread([b.wall / s.wall for b, s in pairs]),
            "speed_cpu": spread([b.cpu / max(s.cpu, 1e-9) for b, s in pairs]),
        }
    return found
