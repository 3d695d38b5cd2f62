"""From options to learners: the one place where their names in a config are known."""

import math
from collections.abc import Callable
from dataclasses import replace

from torchemo.config.run import LearnerConfig
from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy, mean_squared_error
from torchemo.core.types import Model, TaskShape
from torchemo.learners import (
    ARML,
    BMG,
    HSML,
    MAML,
    MUSML,
    TSAMAML,
    InnerLoop,
    Learner,
    MAMLPlusPlus,
    MetaSGD,
    ProtoMAML,
    Reptile,
    TaskGated,
    anil,
    boil,
    fomaml,
)
from torchemo.learners.gradient.inner import RULES, Adam, Rule
from torchemo.learners.gradient.parts import Embedding, ImageEmbedding, PointEmbedding


def build_learner(config: LearnerConfig, model: Model, tasks: TaskShape) -> Learner:
    """Make the learner that ``config`` names."""
    classification = tasks.kind == "classification"
    loop = InnerLoop(
        model,
        loss=cross_entropy if classification else mean_squared_error,
        rule=_rule(config),
        steps=config.steps,
        order=config.order,
        adapt_bn=config.adapt_bn,
        loss_scale=float(tasks.n_out) if config.inner_loss_scale == "n_way" else 1.0,
    )
    if config.name == "bmg":
        base = build_learner(replace(config, name=config.base), model, tasks)
        return BMG(base, config.target_steps, config.target_rate, config.match)
    return _MAKERS[config.name](config, loop, tasks)


def _rule(config: LearnerConfig) -> Rule:
    if config.name == "reptile" and config.rule == "adam":
        return Adam(lr=config.inner_lr, betas=(0.0, 0.999))  # as published
    return RULES[config.rule](lr=config.inner_lr)


def _meta_sgd(config: LearnerConfig, loop: InnerLoop, tasks: TaskShape) -> Learner:
    return MetaSGD(
        loop, shape=config.rate_shape, rate_init=config.rate_init, rate_memory=config.rate_memory
    )


def _proto_maml(config: LearnerConfig, loop: InnerLoop, tasks: TaskShape) -> Learner:
    if tasks.kind != "classification":
        raise ConfigError("Proto-MAML needs classes; these tasks are regression.")
    return ProtoMAML(loop, n_way=tasks.n_out)


def _maml_plus_plus(config: LearnerConfig, loop: InnerLoop, tasks: TaskShape) -> Learner:
    return MAMLPlusPlus(
        loop,
        multi_step_loss=config.multi_step_loss,
        learned_rates=config.learned_rates,
        first_order_epochs=config.first_order_epochs,
    )


def _arml(config: LearnerConfig, loop: InnerLoop, tasks: TaskShape) -> Learner:
    reader = ARML(
        _embedding(tasks, config.task_dim),
        tasks.n_way,
        vertices=config.vertices,
        width=config.task_width,
        draw=config.task_init,
    )
    return TaskGated(loop, reader, _aux_weight(config, tasks))


def _hsml(config: LearnerConfig, loop: InnerLoop, tasks: TaskShape) -> Learner:
    half = len(tasks.x) == 3  # as published: 64 for pictures beside a code of 128, 40 for points
    reader = HSML(
        _embedding(tasks, config.task_dim // 2 if half else config.task_dim),
        tasks.n_way,
        code=config.task_dim,
        tree=config.tree,
        width=config.task_width,
        gate=config.tree_gate,
        autoencoder=config.autoencoder,
    )
    return TaskGated(loop, reader, _aux_weight(config, tasks))


def _tsa_maml(config: LearnerConfig, loop: InnerLoop, tasks: TaskShape) -> Learner:
    return TSAMAML(
        loop,
        groups=config.groups,
        first_stage=config.first_stage,
        cluster_tasks=config.cluster_tasks,
        cluster_on=config.cluster_on,
    )


def _musml(config: LearnerConfig, loop: InnerLoop, tasks: TaskShape) -> Learner:
    return MUSML(
        loop,
        subspaces=config.subspaces,
        dim=config.subspace_dim,
        temperature=config.temperature,
        anneal=config.anneal,
        n_way=tasks.n_out if tasks.kind == "classification" else None,
    )


_MAKERS: dict[str, Callable[[LearnerConfig, InnerLoop, TaskShape], Learner]] = {
    "maml": lambda config, loop, tasks: MAML(loop),
    "fomaml": lambda config, loop, tasks: fomaml(loop),
    "anil": lambda config, loop, tasks: anil(loop),
    "boil": lambda config, loop, tasks: boil(loop),
    "meta-sgd": _meta_sgd,
    "reptile": lambda config, loop, tasks: Reptile(loop, minibatch=config.minibatch),
    "proto-maml": _proto_maml,
    "maml++": _maml_plus_plus,
    "arml": _arml,
    "hsml": _hsml,
    "tsa-maml": _tsa_maml,
    "musml": _musml,
}


def _aux_weight(config: LearnerConfig, tasks: TaskShape) -> float:
    """Return the weight of a reader's own losses beside the mean query loss."""
    if config.aux_weight is not None:
        return config.aux_weight
    queries = tasks.n_out * tasks.n_query
    return 0.01 if tasks.kind == "regression" else 0.01 * tasks.n_shot / queries


def _embedding(tasks: TaskShape, dim: int) -> Embedding:
    """Make what embeds a support example for a reader of tasks."""
    if len(tasks.x) == 3:
        return ImageEmbedding(*tasks.x, dim=dim)
    targets = None if tasks.kind == "classification" else tasks.n_out
    return PointEmbedding(math.prod(tasks.x), targets, dim=dim)
