"""From a run's configuration to its parts: tasks, network, learner, memory, trainer."""

from typing import NamedTuple

from torchemo.config.run import ModelConfig, RunConfig
from torchemo.core.errors import ConfigError
from torchemo.core.types import Model, TaskShape
from torchemo.data.source import TaskSource, open_source
from torchemo.learners.build import build_learner
from torchemo.memory.keys.recognition import SelfRecognition
from torchemo.models import MLP, Conv4, ResNet12
from torchemo.runs.build import build_emo
from torchemo.training.trainer import Trainer


class Experiment(NamedTuple):
    """A configuration brought to life."""

    config: RunConfig
    source: TaskSource
    trainer: Trainer


def build_model(config: ModelConfig, shape: TaskShape) -> Model:
    """Make the network that ``config`` names, for tasks of this shape."""
    pictures = len(shape.x) == 3
    if (config.name == "mlp") == pictures:
        kind = "pictures" if pictures else "points"
        raise ConfigError(
            f"model.name '{config.name}' does not fit tasks of {kind}.",
            hint="Use conv4 or resnet12 for pictures, mlp for regression.",
        )
    if config.name == "mlp":
        return MLP(shape.n_out, n_in=shape.x[0], hidden=config.hidden, initializer="kaiming")
    if config.name == "resnet12":
        return ResNet12(
            shape.n_out,
            in_channels=shape.x[0],
            image_size=shape.x[1],
            channels=config.channels,
            bn=config.bn,
        )
    return Conv4(
        shape.n_out,
        in_channels=shape.x[0],
        image_size=shape.x[1],
        filters=config.filters,
        head_pool=config.head_pool,
        downsample=config.downsample,
        bn=config.bn,
    )


def build_trainer(config: RunConfig, shape: TaskShape, *, workers: int = 1) -> Trainer:
    """Make the trainer of a run: learner, memory (capacity 0 leaves it out) and key training.

    Args:
        config: The run.
        shape: What its tasks look like.
        workers: Threads that share the tasks of a step; results do not depend on it.
    """
    learner = build_learner(config.learner, build_model(config.model, shape), shape)
    emo, recognition = None, None
    if config.emo.memory.capacity != 0:
        emo = build_emo(config.emo, learner, shape, seed=config.train.seed)
        if config.emo.key.training == "self_recognition" and emo.encoder is not None:
            recognition = SelfRecognition(
                emo.encoder,
                n_way=shape.n_out if shape.kind == "classification" else None,
                lr=config.emo.key.recognition_lr,
                older=config.emo.key.recognition_older,
                every=config.emo.key.recognition_every,
            )
    trainer = Trainer(
        learner,
        emo=emo,
        config=config.outer,
        recognition=recognition,
        seed=config.train.seed,
        horizon=config.train.iterations,
        batched={"auto": None, "yes": True, "no": False}[config.train.batched],
        workers=workers,
    )
    _refuse_early_rest(config, trainer)
    return trainer


def _refuse_early_rest(config: RunConfig, trainer: Trainer) -> None:
    """Refuse that a learner of two stages rests before it has come to the second."""
    formed = config.learner.first_stage + config.learner.cluster_tasks // config.train.tasks
    if trainer.turn is not None and config.learner.name == "tsa-maml" and trainer.turn <= formed:
        raise ConfigError(
            f"TSA-MAML forms its groups at step {formed}, and is to rest at step {trainer.turn}.",
            hint="Train longer (train.iterations), or set learner.first_stage lower.",
        )


def open_experiment(config: RunConfig, *, workers: int = 1) -> Experiment:
    """Open the tasks and build everything; bad input is refused before any work."""
    source = open_source(config.data)
    return Experiment(config, source, build_trainer(config, source.shape, workers=workers))
