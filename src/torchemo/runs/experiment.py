"""From a run's configuration to its parts: tasks, network, learner, memory, trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torchemo.config.run import RunConfig
from torchemo.core.errors import ConfigError
from torchemo.core.types import Params, TaskShape
from torchemo.data.index import SPLITS
from torchemo.data.listing import Progress
from torchemo.data.source import TaskSource, open_source
from torchemo.learners import LEARNERS
from torchemo.learners.build import build_learner
from torchemo.learners.learner import Learner, Staged, host
from torchemo.memory import MEMORIES
from torchemo.memory.interface import TaskMemory
from torchemo.memory.keys import KEYS
from torchemo.memory.keys.recognition import SelfRecognition
from torchemo.models import MODELS, build_model, frozen_network
from torchemo.training.phases import Phases
from torchemo.training.system import System, restored
from torchemo.training.trainer import Trainer

PARTS = {"learner": LEARNERS, "model": MODELS, "memory": MEMORIES}
"""Sections of a configuration that name a part."""


class Experiment(NamedTuple):
    """A configuration brought to life."""

    config: RunConfig
    source: TaskSource
    trainer: Trainer

    @property
    def system(self) -> System:
        """What answers at the present step."""
        return self.trainer.system


def complete(config: RunConfig) -> RunConfig:
    """Return a configuration with every option of its parts, checked."""
    whole: dict[str, Any] = {
        name: registry.complete(getattr(config, name)) for name, registry in PARTS.items()
    }
    return replace(config, **whole)


def reduced(config: RunConfig) -> RunConfig:
    """Return a configuration with those options of its parts alone that differ from their defaults."""
    kept: dict[str, Any] = {
        name: registry.reduced(getattr(config, name)) for name, registry in PARTS.items()
    }
    return replace(config, **kept)


def build_system(
    config: RunConfig, shape: TaskShape, groups: Mapping[str, Params], *, workers: int = 1
) -> System:
    """Make what answers from a saved state: learner and memory, and nothing that trains them."""
    learner = build_learner(config.learner, build_model(config.model, shape), shape)
    memory = build_memory(config, learner, shape)
    return restored(learner, memory, groups, batched=_batched(config), workers=workers)


def _batched(config: RunConfig) -> bool | None:
    return {"auto": None, "yes": True, "no": False}[config.train.batched]


def build_trainer(config: RunConfig, shape: TaskShape, *, workers: int = 1) -> Trainer:
    """Make the trainer of a run: learner, memory and key training.

    Args:
        config: The run.
        shape: What its tasks look like.
        workers: Threads that share the tasks of a step; results do not depend on it.

    Example:
        >>> from torchemo.config.presets import preset
        >>> build_trainer(preset("maml-emo"), TaskShape("classification", x=(3, 32, 32), n_out=5))
        Trainer(MAML + EMO, 0 outer steps)
    """
    learner = build_learner(config.learner, build_model(config.model, shape), shape)
    memory = build_memory(config, learner, shape)
    phases = Phases(config.train.steps, None if memory is None else config.memory_steps)
    _refuse_early_freeze(config, learner, phases)
    return Trainer(
        learner,
        memory=memory,
        config=config.outer,
        recognition=None if memory is None else _recognition(config, memory, shape),
        seed=config.train.seed,
        phases=phases,
        batched=_batched(config),
        workers=workers,
    )


def build_memory(config: RunConfig, learner: Learner, shape: TaskShape) -> TaskMemory | None:
    """Make the memory of a run; None if it has none, or one without slots."""
    kind, options = MEMORIES.resolve(config.memory)
    if getattr(options, "capacity", 1) == 0:
        return None
    made: TaskMemory | None = kind.build(
        options, host(learner), shape, seed=config.train.seed, train_steps=config.train.steps
    )
    return made


def _recognition(config: RunConfig, memory: TaskMemory, shape: TaskShape) -> SelfRecognition | None:
    _, options = MEMORIES.resolve(config.memory)
    _, key = KEYS.resolve(options.key, where="memory.key")
    if memory.encoder is None or getattr(key, "training", "none") != "self_recognition":
        return None
    return SelfRecognition(memory.encoder, n_way=shape.n_way, older=key.recognition_older)


def _refuse_early_freeze(config: RunConfig, learner: Learner, phases: Phases) -> None:
    """Refuse to freeze a learner of two stages before it has come to the second."""
    if phases.turn is None or not isinstance(learner, Staged):
        return
    formed = learner.staged_until(config.train.tasks)
    if phases.turn <= formed:
        raise ConfigError(
            f"{learner.title} forms its groups at step {formed}, but it is frozen at step {phases.turn},"
            " where the memory starts training alone.",
            hint=f"Set train.steps above {formed}, or lower learner.first_stage.",
        )


def open_tasks(
    config: RunConfig, *, needed: Sequence[str] = SPLITS, progress: Progress | None = None
) -> TaskSource:
    """Open the tasks of a run; those of a pretrained network are made of its features."""
    network = frozen_network(config.model)
    return open_source(config.data, needed=needed, network=network, progress=progress)


def open_experiment(
    config: RunConfig, *, workers: int = 1, progress: Progress | None = None
) -> Experiment:
    """Open the tasks and build everything; bad input is refused before any work."""
    source = open_tasks(config, progress=progress)
    return Experiment(config, source, build_trainer(config, source.shape, workers=workers))
