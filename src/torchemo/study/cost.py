"""What memory costs: parameters, bytes, and the time of a step with and without it (T6, F6)."""

import statistics
import time
from itertools import pairwise
from typing import Any

from torchemo.config import RunConfig
from torchemo.experiment import Experiment, open_experiment
from torchemo.footprint import footprint
from torchemo.step import predict

WARM, TIMED = 3, 8
"""Steps that fill the memory a little, and steps that are timed."""


def measure_cost(config: RunConfig) -> dict[str, Any]:
    """Return how large a run is and how long its outer step and its inner steps take on one core."""
    experiment = open_experiment(config)
    trainer = experiment.trainer
    size = footprint(config.emo, trainer, experiment.source.shape)
    times = [_outer(experiment, number) for number in range(WARM + TIMED)][WARM:]
    return {
        "parameters": size.parameters,
        "emo_parameters": size.emo_parameters,
        "memory_bytes": size.memory_bytes,
        "outer_step_ms": statistics.median(times),
        "inner_ms": _inner(experiment),
    }


def _outer(experiment: Experiment, number: int) -> float:
    tasks = experiment.config.train.tasks
    episode = experiment.source.sample("train", seed=0, start=number * tasks, count=tasks)
    began = time.process_time()
    experiment.trainer.step(episode)
    return 1e3 * (time.process_time() - began)


def _inner(experiment: Experiment) -> list[float]:
    """Time adaptation with 0, 1, ..., S inner steps; the differences are the steps' own times.

    The first number is what happens before the first step (key and recall) with the queries' answers.
    """
    trainer = experiment.trainer
    episode = experiment.source.sample("test", seed=0, start=0, count=1)
    if trainer.emo is not None:
        trainer.emo.eval()
    totals = []
    for steps in range(trainer.learner.loop.steps + 1):
        times = []
        for _ in range(TIMED):
            began = time.process_time()
            predict(
                trainer.learner,
                trainer.params,
                episode,
                emo=trainer.emo,
                steps=steps,
                batched=trainer.batched,
            )
            times.append(1e3 * (time.process_time() - began))
        totals.append(statistics.median(times))
    # predict answers the queries after every step, so that a difference is one step and one answer.
    return [totals[0], *(after - before for before, after in pairwise(totals))]
