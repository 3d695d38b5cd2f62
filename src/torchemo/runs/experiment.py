"""From a run's configuration to its parts: tasks, network, learner, memory, trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torchemo.config.run import RunConfig
from torchemo.config.toml import dumps
from torchemo.core.errors import ConfigError
from torchemo.core.types import Model, Params, TaskShape
from torchemo.data.index import SPLITS
from torchemo.data.listing import Progress
from torchemo.data.seen_classes import refuse_seen_classes
from torchemo.data.source import TaskSource, open_source
from torchemo.learners import LEARNERS
from torchemo.learners.build import build_learner
from torchemo.learners.hosting import host
from torchemo.learners.learner import Learner, Staged
from torchemo.memory import MEMORIES
from torchemo.memory.interface import TaskMemory
from torchemo.memory.keys import KEYS
from torchemo.memory.keys.recognition import SelfRecognition
from torchemo.models import MODELS, build_model, frozen_network, in_precision
from torchemo.runs.environment import environment, kinds
from torchemo.training.classes import for_training
from torchemo.training.device import HERE, Place, to_device
from torchemo.training.distributed import refuse_idle
from torchemo.training.phases import Phases
from torchemo.training.predict import groups_of
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
    config: RunConfig,
    shape: TaskShape,
    groups: Mapping[str, Params],
    *,
    place: Place = HERE,
) -> System:
    """Make what answers from a saved state: learner and memory, and nothing that trains them."""
    learner = build_learner(config.learner, _model(config, shape, place), shape)
    memory = build_memory(config, learner, shape)
    how: dict[str, Any] = {"workers": place.workers, "device": place.device, "team": place.team}
    how["batched"] = _batched(config)
    return restored(learner, memory, groups, **how)


def _model(config: RunConfig, shape: TaskShape, place: Place) -> Model:
    return in_precision(build_model(config.model, shape), place.precision)


def _batched(config: RunConfig) -> bool | None:
    return {"auto": None, "yes": True, "no": False}[config.train.batched]


def build_trainer(config: RunConfig, shape: TaskShape, *, place: Place = HERE) -> Trainer:
    """Make the trainer of a run: learner, memory and key training.

    Args:
        config: The run.
        shape: What its tasks look like.
        place: Where everything is computed, how precisely, and by how many threads.

    Example:
        >>> from torchemo.config.presets import preset
        >>> build_trainer(preset("maml-emo"), TaskShape("classification", x=(3, 32, 32), n_out=5))
        Trainer(MAML + EMO, 0 outer steps)
    """
    learner = build_learner(config.learner, _model(config, shape, place), shape)
    memory = build_memory(config, learner, shape)
    # Moved before an optimizer is made of its tensors.
    memory = None if memory is None else memory.to(place.device)
    alone = None if memory is None else config.memory_steps
    phases = Phases(config.episode_steps, alone, config.dense_steps)
    _refuse_early_freeze(config, learner, phases)
    return Trainer(
        learner,
        memory=memory,
        config=config.outer,
        recognition=None if memory is None else _recognition(config, memory, shape),
        seed=config.train.seed,
        phases=phases,
        batched=_batched(config),
        workers=place.workers,
        dense=config.train.dense,
        base_classes=shape.base_classes,
        train_way=_train_way(config, learner),
        device=place.device,
        team=place.team,
    )


def _train_way(config: RunConfig, learner: Learner) -> int | None:
    """Return the classes of a training task where these are not those of a test task."""
    way = config.data.train_way
    if way is None:
        return None
    for_training(learner, way)
    if config.memory.name != "none":
        raise ConfigError(
            f"data.train_way is {way}, and a memory remembers tasks of one size.",
            hint="Leave data.train_way out, or set memory.name = none.",
        )
    return way


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
    config: RunConfig,
    *,
    needed: Sequence[str] = SPLITS,
    strict: bool = False,
    progress: Progress | None = None,
    allow_leak: bool = False,
) -> TaskSource:
    """Open the tasks of a run; those of a pretrained network are made of its features.

    Test classes that the network was trained on are refused, unless the call or the run allows them.
    """
    network = frozen_network(config.model)
    source = open_source(
        config.data, needed=needed, strict=strict, network=network, progress=progress
    )
    allowed = allow_leak or config.model.options.get("allow_leak")
    if network is not None and "test" in needed and not allowed:
        refuse_seen_classes(
            source, network=network.name, trained_on=network.trained_on, split="test"
        )
    return source


def open_experiment(
    config: RunConfig,
    *,
    strict: bool = False,
    place: Place = HERE,
    progress: Progress | None = None,
) -> Experiment:
    """Open the tasks and build everything; bad input is refused before any work."""
    source = open_tasks(config, strict=strict, progress=progress)
    trainer = build_trainer(config, source.shape, place=place)
    return Experiment(config, source, trainer)


# -- several processes ---------------------------------------------------------------------------------


def refuse_idle_ranks(experiment: Experiment, place: Place) -> None:
    """Refuse more processes than a step has tasks that can be solved apart."""
    if place.team.size == 1:
        return
    trainer, train = experiment.trainer, experiment.config.train
    tasks = experiment.source.sample("train", seed=train.seed, start=0, count=train.tasks)
    groups = groups_of(trainer.params, to_device(tasks, place.device), trainer.batched)
    refuse_idle(place.team, len(groups))


def agree_on(experiment: Experiment, place: Place) -> None:
    """Refuse processes that would not train the same: other options, data or versions."""
    if place.team.size == 1:
        return
    place.team.agree("options", dumps(experiment.config))
    place.team.agree("data", experiment.source.fingerprint)
    for part, value in kinds(environment(place)).items():
        place.team.agree(part, value)
