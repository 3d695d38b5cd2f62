"""A trained system for tasks with another number of classes, or with unequal numbers of examples."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from torchemo.core.errors import ConfigError
from torchemo.learners.learner import AnyWay, Balancing, Learner
from torchemo.memory.interface import TaskMemory
from torchemo.training.system import System

Memory = TypeVar("Memory", bound=TaskMemory)


def for_classes(system: System, n_way: int) -> System:
    """Return a system for tasks of ``n_way`` classes, which are not as many as in training.

    Labels are random in training, so the rows of a learned head are exchangeable: new ones start at the mean
    of the trained ones, and these as `AnyWay.keeps_rows` says. Every tensor without class rows, and
    everything that the memory holds, stays as it is.

    Raises:
        ConfigError: The learner or a part of the memory knows the classes of training alone.
    """
    learner = system.learner
    if not isinstance(learner, AnyWay):
        raise ConfigError(
            f"{learner.title} takes as many classes as in training, got {n_way}.",
            hint="Train with another learner, such as --preset maml or proto-maml.",
        )
    if n_way < 2:
        raise ConfigError(f"a task needs two classes or more, got {n_way}.")
    return replace(
        system,
        learner=learner.for_classes(n_way),
        params=learner.params_for(system.params, n_way),
        memory=None
        if system.memory is None
        else read_by(system.memory, n_way, keep=learner.keeps_rows),
    )


def for_training(learner: Learner, n_way: int) -> Learner:
    """Return a learner for training tasks of ``n_way`` classes.

    Raises:
        ConfigError: Its parameters depend on the number of classes.
    """
    head = set(learner.model.head)
    own = learner.init(torch.Generator()) if isinstance(learner, AnyWay) else head
    if not isinstance(learner, AnyWay) or head & set(own):
        raise ConfigError(
            f"data.train_way is {n_way}, and {learner.title} learns a head for the classes of its tasks.",
            hint="Leave data.train_way out, or use a learner such as protonet.",
        )
    return learner.for_classes(n_way)


def for_shots(learner: Learner, shots: Sequence[int]) -> Learner:
    """Return a learner for classes with these numbers of examples; equal ones change nothing.

    Else the support loss weighs classes alike, as if all had equally many examples. Learners without a
    support loss stay as they are.
    """
    if len(set(shots)) == 1 or not isinstance(learner, Balancing):
        return learner
    return learner.balanced()


def read_by(memory: Memory, n_way: int, *, keep: bool = False) -> Memory:
    """Return a memory as tasks of ``n_way`` classes read it; slots and parts are shared, nothing is written.

    Recalled head rows are treated as the learner's are: all take their mean, or with ``keep`` new ones alone.
    In gradients of a softmax loss the rows add up to zero, so that a mean moves no row. Head alignment
    matches as many classes as it can, and the others take the mean.

    Raises:
        ConfigError: A part of the memory knows the classes of training alone.
    """
    for what, part in (("keys", memory.encoder), ("aggregator", memory.aggregator)):
        if part is not None and not getattr(part, "any_way", True):
            raise ConfigError(
                f"these tasks have {n_way} classes, and the memory's {what} ({type(part).__name__}) only know"
                " those of training.",
                hint="Give as many classes as in training, or train without this part.",
            )
    read = copy.copy(memory)
    read.classes, read.keeps_rows = n_way, keep
    return read
