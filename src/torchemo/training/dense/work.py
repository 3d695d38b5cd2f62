"""What an outer step works on: tasks, images of base classes, or both."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from torchemo.config.run import TrainConfig
from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch, Episode
from torchemo.data.source import BatchSource, TaskSource
from torchemo.learners.learner import Learner, ReadsClasses
from torchemo.training.phases import Phases


class Work(NamedTuple):
    """What an outer step works on.

    Attributes:
        tasks: Its tasks; None in the dense stage.
        images: Images of base classes, where the step classifies these, too.
    """

    tasks: Episode | None
    images: Batch | None = None


def work_of(
    source: TaskSource, train: TrainConfig, phases: Phases, learner: Learner, *, step: int
) -> Work:
    """Draw what an outer step works on: a function of the configuration and the step alone."""
    if step < phases.dense:
        return Work(None, _images(source, train, number=step))
    number = step - phases.dense
    start = number * train.tasks
    tasks = source.sample("train", seed=train.seed, start=start, count=train.tasks)
    wanted = learner.base_examples if isinstance(learner, ReadsClasses) else 0
    if wanted and tasks.base is not None:
        how = {"start": start, "count": train.tasks, "size": wanted}
        examples = _batches(source).batches(seed=train.seed, **how)
        tasks = replace(tasks, base=tasks.base._replace(examples=examples))
    if not dense_beside(train, phases, number=number):
        return Work(tasks)
    return Work(tasks, _images(source, train, number=step))


def dense_beside(train: TrainConfig, phases: Phases, *, number: int) -> bool:
    """Draw whether a dense step comes before episodic step ``number``.

    With share p of T episodic steps its probability is ``p^(1 + floor(20 t / T))`` at step t, as in
    TADAM's released code.
    """
    share, total = train.dense.share, phases.learner
    if not share or not total or number >= total:
        return False
    chance = share ** (1 + math.floor(20 * number / total))
    drawn = torch.rand((), generator=generator_for(train.seed, "dense beside", number))
    return float(drawn) < chance


def _images(source: TaskSource, train: TrainConfig, *, number: int) -> Batch:
    how = {"start": number, "count": 1, "size": train.dense.batch}
    return _batches(source).batches(seed=train.seed, **how)


def _batches(source: TaskSource) -> BatchSource:
    if not isinstance(source, BatchSource):
        raise ConfigError(
            "dense classification needs images of base classes, and these tasks have none.",
            hint="Use image sets without data.stream, or leave train.dense.steps and train.dense.share at 0.",
        )
    return source
