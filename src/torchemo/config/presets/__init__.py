"""Presets: ``<learner>``, ``<learner>-emo`` and ``<learner>-emo-paper``.

ARML and its family come in sizes for a CPU; ``<learner>-published`` has the published ones, for pictures
of 84 x 84. ``-emo-paper`` is the literal reading with the paper's printed rates, for comparison with it.
``-emo`` is the reading we use ourselves: the consolidating memory with keys from plain statistics of the
support set that learn to recognise their own task. On regression slots and learner learn at once. On pictures
the learner learns as without memory for the first half of the training, which is twice as long, and slots,
each the offset of a whole network, for the second; those that are not shown to help on validation tasks keep
silent, and on tasks unlike those of training all do, so that little is lost there (R7 in docs/results.md).
"""

import difflib
from dataclasses import replace

from torchemo.config.run import (
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
from torchemo.core.errors import ConfigError

_BASE: dict[str, tuple[LearnerConfig, OuterConfig, TrainConfig]] = {
    "maml": (LearnerConfig(), OuterConfig(), TrainConfig()),
    "fomaml": (LearnerConfig(name="fomaml"), OuterConfig(), TrainConfig()),
    "anil": (LearnerConfig(name="anil", inner_lr=0.1), OuterConfig(), TrainConfig(tasks=8)),
    "boil": (LearnerConfig(name="boil"), OuterConfig(), TrainConfig()),
    "meta-sgd": (LearnerConfig(name="meta-sgd", steps=3), OuterConfig(), TrainConfig()),
    "reptile": (
        # What it does not adapt it cannot learn: scales and shifts are adapted too.
        LearnerConfig(
            name="reptile", rule="adam", inner_lr=1e-3, steps=8, minibatch=10, adapt_bn=True
        ),
        OuterConfig(lr=1.0, optimizer="sgd", clip=None),
        TrainConfig(tasks=5),
    ),
    "proto-maml": (LearnerConfig(name="proto-maml"), OuterConfig(), TrainConfig()),
    "maml++": (LearnerConfig(name="maml++", inner_lr=0.01), OuterConfig(), TrainConfig(tasks=2)),
    "arml": (LearnerConfig(name="arml", task_dim=32), OuterConfig(), TrainConfig()),
    "hsml": (
        LearnerConfig(name="hsml", task_dim=32, task_width=10.0),
        OuterConfig(),
        TrainConfig(),
    ),
    "tsa-maml": (LearnerConfig(name="tsa-maml", first_stage=500), OuterConfig(), TrainConfig()),
    "musml": (LearnerConfig(name="musml"), OuterConfig(), TrainConfig()),
    "bmg": (LearnerConfig(name="bmg"), OuterConfig(), TrainConfig()),
}
"""The base learners, rates on the mean loss: MAML to MAML++ with their published settings (but Reptile's
outer rate, which fell linearly), ARML, HSML and TSA-MAML in sizes for a CPU; MUSML and BMG have no public
settings, and these are ours."""

_PUBLISHED: dict[str, tuple[LearnerConfig, dict[int, int]]] = {
    "arml": (LearnerConfig(name="arml"), {1: 50_000, 5: 40_000}),
    "hsml": (LearnerConfig(name="hsml", task_width=10.0), {1: 60_000, 5: 50_000}),
    "tsa-maml": (
        LearnerConfig(name="tsa-maml", first_stage=100_000, cluster_tasks=10_000),
        {1: 162_500, 5: 162_500},
    ),
}
"""Full sizes and outer steps for 1 and 5 shots; those of MUSML and BMG are not public. TSA-MAML as for
tieredImageNet, whose pictures have 84 x 84: 100 000 steps of MAML, 2 500 of four tasks each that are
clustered, 60 000 of its groups; its outer rate falls to zero."""

_OURS = EMOConfig(
    memory=MemoryConfig(capacity=8, write="consolidate"),
    key=KeyConfig(network="learned_statistics", training="self_recognition"),
    retrieval=RetrievalConfig(k=None),
    aggregator=AggregatorConfig(kind="sum"),
    value=ValueConfig(content="meta"),
)
"""For regression, and for MUSML, which remembers coordinates: slots learn beside the learner."""
_AFTERWARDS = replace(
    _OURS,
    memory=replace(_OURS.memory, afterwards=0.5, slot_lr=3e-4),
    retrieval=replace(_OURS.retrieval, familiar=0.9, trust=0.0),
)
"""For pictures: slots begin where the learner has learned, with a third of the outer rate."""

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
    kinds = ("", "-emo", "-emo-paper")
    sized = [f"{base}{kind}" for base in _BASE for kind in kinds]
    return [*sized, *(f"{base}-published" for base in _PUBLISHED)]


def preset(name: str, *, n_shot: int = 1, regression: bool = False) -> RunConfig:
    """Return a preset.

    Args:
        name: ``maml``, ``maml-emo``, ``maml-emo-paper``, ``anil``, ...
        n_shot: K; the paper's memory and neighbours depend on it.
        regression: For regression tasks: an MLP, smaller rates, keys of pairs.
    """
    base = name.removesuffix("-emo-paper").removesuffix("-emo").removesuffix("-published")
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(names())}."
        raise ConfigError(f"unknown preset '{name}'.", hint=hint)
    learner, outer, train = _BASE[base]
    config = replace(RunConfig(), learner=learner, outer=outer, train=train)
    if name.endswith("-published"):
        if regression:
            raise ConfigError(f"preset '{name}' is for pictures.", hint=f"Use '{base}'.")
        config = _published(config, base, n_shot)
    if name.endswith("-emo") and (regression or base == "musml"):
        config = replace(config, emo=_OURS)
    elif name.endswith("-emo"):
        # The learner has as many outer steps as without memory; and slots are judged by validation tasks.
        twice = replace(train, iterations=2 * train.iterations, validation_tasks=600)
        config = replace(config, emo=_AFTERWARDS, train=twice)
    elif name.endswith("-emo-paper"):
        config = _literal(config, base, n_shot)
    if regression:
        config = _for_regression(config)
    return replace(config, data=replace(config.data, n_shot=n_shot))


def at_once(config: RunConfig) -> RunConfig:
    """Return a run with the memory of our reading for pictures as it was before R7; others are left alone.

    Slots of scales and shifts learn beside the learner, which a fifth of the training tasks adapt alone. It
    shows its worth sooner, and gains less in the end.
    """
    emo = config.emo
    if emo.memory.afterwards is None:
        return config
    emo = replace(
        emo,
        memory=replace(emo.memory, afterwards=None, slot_lr=1e-3),
        retrieval=replace(emo.retrieval, trust=None),
        value=replace(emo.value, tensors="norm", recall_dropout=0.2),
    )
    return replace(config, emo=emo)


def _published(config: RunConfig, base: str, n_shot: int) -> RunConfig:
    learner, steps = _PUBLISHED[base]
    iterations = steps[5 if n_shot >= 5 else 1]
    falls = "cosine" if base == "tsa-maml" else config.outer.schedule
    return replace(
        config,
        learner=learner,
        outer=replace(config.outer, schedule=falls),
        train=replace(config.train, iterations=iterations, validate_every=2500),
        data=replace(config.data, image_size=84),
    )


def _literal(config: RunConfig, base: str, n_shot: int) -> RunConfig:
    aggregator, memory = _PAPER_CHOICES.get(base, (_PAPER.aggregator, _PAPER.memory))
    few = n_shot < 5
    emo = replace(
        _PAPER,
        memory=replace(memory, capacity=100 if few else 200),
        retrieval=replace(_PAPER.retrieval, k=20 if few else 15),
        aggregator=aggregator,
    )
    if base == "musml":  # its networks are made per task: there is no trunk to share
        emo = replace(emo, key=replace(emo.key, embedder="own"))
    learner = replace(config.learner, inner_lr=0.001)
    if base == "meta-sgd":
        learner = replace(learner, rate_memory=0.001)
    outer = config.outer if base == "reptile" else replace(config.outer, lr=0.01, clip=None)
    return replace(config, emo=emo, learner=learner, outer=outer)


def _for_regression(config: RunConfig) -> RunConfig:
    emo = replace(config.emo, key=replace(config.emo.key, embedder="pairs"))
    if emo.memory.write == "consolidate":  # an MLP's slots are small, and more of them help
        emo = replace(emo, memory=replace(emo.memory, capacity=16))
    rate = config.learner.inner_lr if config.learner.rule == "adam" else 0.003
    if config.learner.name == "musml":  # a coordinate moves a whole network: 0.003 diverges
        rate = 0.0005
    learner = replace(config.learner, inner_lr=rate, rate_init=(0.001, 0.005))
    outer = config.outer
    if learner.name == "meta-sgd":
        # With the outer rate Adam would move rates of 0.003 by a third of themselves per step.
        outer = replace(outer, rates_lr=1e-4)
    if learner.name in ("arml", "hsml"):
        learner = replace(learner, task_dim=40, task_width=2.0, vertices=6)
    return replace(
        config,
        emo=emo,
        learner=learner,
        outer=outer,
        model=replace(config.model, name="mlp"),
        data=replace(config.data, source=("regression:hsml4",), n_query=10),
        train=replace(config.train, tasks=16),
    )
