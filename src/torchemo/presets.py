"""Presets: ``<learner>``, ``<learner>-emo`` and ``<learner>-emo-paper``.

``-emo-paper`` is the literal reading with the paper's printed rates, for comparison with it. ``-emo`` is
the reading we use ourselves: the consolidating memory with keys that recognise their own task.
"""

import difflib
from dataclasses import replace

from torchemo.config import (
    AggregatorConfig,
    EMOConfig,
    KeyConfig,
    LearnerConfig,
    MemoryConfig,
    OuterConfig,
    RetrievalConfig,
    RunConfig,
    TrainConfig,
    ValueConfig,
)
from torchemo.errors import ConfigError

_BASE: dict[str, tuple[LearnerConfig, OuterConfig, TrainConfig]] = {
    "maml": (LearnerConfig(), OuterConfig(), TrainConfig()),
    "fomaml": (LearnerConfig(name="fomaml"), OuterConfig(), TrainConfig()),
    "anil": (LearnerConfig(name="anil", inner_lr=0.1), OuterConfig(), TrainConfig(tasks=8)),
    "boil": (LearnerConfig(name="boil"), OuterConfig(), TrainConfig()),
    "meta-sgd": (LearnerConfig(name="meta-sgd", steps=3), OuterConfig(), TrainConfig()),
    "reptile": (
        LearnerConfig(name="reptile", rule="adam", inner_lr=1e-3, steps=8, minibatch=10),
        OuterConfig(lr=1.0, optimizer="sgd", clip=None),
        TrainConfig(tasks=5),
    ),
    "proto-maml": (LearnerConfig(name="proto-maml"), OuterConfig(), TrainConfig()),
    "maml++": (LearnerConfig(name="maml++", inner_lr=0.01), OuterConfig(), TrainConfig(tasks=2)),
}
"""The base learners with their published settings, rates on the mean loss."""

_OURS = EMOConfig(
    memory=MemoryConfig(capacity=8, write="consolidate"),
    key=KeyConfig(layers=2, training="self_recognition"),
    retrieval=RetrievalConfig(k=None),
    aggregator=AggregatorConfig(kind="sum"),
    value=ValueConfig(content="meta"),
)

_PAPER = EMOConfig(
    memory=MemoryConfig(capacity=100),
    key=KeyConfig(embedder="shared", unit=False),
    retrieval=RetrievalConfig(k=20, weights="uniform"),
    aggregator=AggregatorConfig(kind="mean", max_neighbors=9),
    value=ValueConfig(reduction="sum", memory_steps="all"),
)

_TRANSFORMER = AggregatorConfig(kind="coordinate", max_neighbors=9)
_PAPER_CHOICES: dict[str, tuple[AggregatorConfig, MemoryConfig]] = {
    "anil": (_TRANSFORMER, MemoryConfig(controller="lru")),
    "meta-sgd": (_TRANSFORMER, MemoryConfig(controller="clock")),
}
"""Aggregator and controller the paper picks where they are not Mean and LRU."""


def names() -> list[str]:
    """List the presets."""
    return [f"{base}{kind}" for base in _BASE for kind in ("", "-emo", "-emo-paper")]


def preset(name: str, *, n_shot: int = 1, regression: bool = False) -> RunConfig:
    """Return a preset.

    Args:
        name: ``maml``, ``maml-emo``, ``maml-emo-paper``, ``anil``, ...
        n_shot: K; the paper's memory and neighbours depend on it.
        regression: For regression tasks: an MLP, smaller rates, keys of pairs.
    """
    base = name.removesuffix("-emo-paper").removesuffix("-emo")
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(names())}."
        raise ConfigError(f"unknown preset '{name}'.", hint=hint)
    learner, outer, train = _BASE[base]
    config = replace(RunConfig(), learner=learner, outer=outer, train=train)
    if name.endswith("-emo"):
        config = replace(config, emo=_OURS)
    elif name.endswith("-emo-paper"):
        config = _literal(config, base, n_shot)
    if regression:
        config = _for_regression(config)
    return replace(config, data=replace(config.data, n_shot=n_shot))


def _literal(config: RunConfig, base: str, n_shot: int) -> RunConfig:
    aggregator, memory = _PAPER_CHOICES.get(base, (_PAPER.aggregator, _PAPER.memory))
    few = n_shot < 5
    emo = replace(
        _PAPER,
        memory=replace(memory, capacity=100 if few else 200),
        retrieval=replace(_PAPER.retrieval, k=20 if few else 15),
        aggregator=aggregator,
    )
    learner = replace(config.learner, inner_lr=0.001)
    if base == "meta-sgd":
        learner = replace(learner, rate_memory=0.001)
    outer = config.outer if base == "reptile" else replace(config.outer, lr=0.01, clip=None)
    return replace(config, emo=emo, learner=learner, outer=outer)


def _for_regression(config: RunConfig) -> RunConfig:
    emo = replace(config.emo, key=replace(config.emo.key, embedder="pairs"))
    rate = config.learner.inner_lr if config.learner.rule == "adam" else 0.003
    learner = replace(config.learner, inner_lr=rate, rate_init=(0.001, 0.005))
    return replace(
        config,
        emo=emo,
        learner=learner,
        model=replace(config.model, name="mlp"),
        data=replace(config.data, source=("regression:hsml4",), n_query=10),
        train=replace(config.train, tasks=16),
    )
