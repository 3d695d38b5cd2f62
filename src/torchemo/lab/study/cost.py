"""What memory costs: parameters, bytes, and the time of a step with and without it (T6, F6)."""

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torchemo.config.run import RunConfig
from torchemo.learners.learner import steps_of
from torchemo.runs.experiment import Experiment, complete, open_experiment
from torchemo.runs.footprint import footprint
from torchemo.training.device import HERE, Place

WARM, TIMED = 8, 12
"""Steps that fill the memory a little, and repetitions of what is timed."""


def measure_cost(config: RunConfig, place: Place = HERE) -> dict[str, Any]:
    """Return how large a run is and how long its outer step and its inner steps take on one core.

    Times are the least of several: whatever else the machine does can only add to them. Slots of offsets
    are seeded at once, so that they are recalled.
    """
    config = complete(config)
    if "warmup" in config.memory.options:
        soon = min(config.memory.options["warmup"], WARM // 2)
        config = replace(config, memory=config.memory.set(warmup=soon))
    experiment = open_experiment(config, place=place)
    size = footprint(experiment.system, experiment.source.shape)
    times = [_outer(experiment, number) for number in range(WARM + TIMED)][WARM:]
    return {
        "parameters": size.parameters,
        "memory_parameters": size.memory_parameters,
        "memory_bytes": size.memory_bytes,
        "outer_step_ms": min(times),
        "inner_ms": _inner(experiment),
    }


def _outer(experiment: Experiment, number: int) -> float:
    tasks = experiment.config.train.tasks
    episode = experiment.source.sample("train", seed=0, start=number * tasks, count=tasks)
    began = time.process_time()
    experiment.trainer.step(episode)
    return 1e3 * (time.process_time() - began)


def _inner(experiment: Experiment) -> list[float]:
    """Time the adaptation to one task with 0, 1, ..., S inner steps; differences are the steps' own times.

    The first number is what happens before the first step: key and recall. One query per class is
    answered after every step, which is part of all the times.
    """
    system = experiment.system
    episode = experiment.source.sample("test", seed=0, start=0, count=1, n_query=1)
    if system.memory is not None:
        system.memory.eval()

    def adapt(steps: int) -> float:
        began = time.process_time()
        system.predict(episode, steps=steps, statistics="transductive")
        return 1e3 * (time.process_time() - began)

    counts = range(steps_of(system.learner) + 1)
    rounds = [[adapt(steps) for steps in counts] for _ in range(TIMED)]
    least = [min(times) for times in zip(*rounds, strict=True)]
    return [least[0], *(after - before for before, after in pairwise(least))]
