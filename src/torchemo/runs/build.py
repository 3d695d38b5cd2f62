"""From options to memories: the one place where the names of their parts in a config are known."""

from pathlib import Path

import torch
from torch import Generator

from torchemo.config.run import EMOConfig, KeyConfig
from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.core.types import Model, TaskShape
from torchemo.learners import (
    BMG,
    MUSML,
    TSAMAML,
    Learner,
    MetaSGD,
    Reptile,
    TaskGated,
)
from torchemo.learners.gradient.meta_sgd import RATE
from torchemo.memory.aggregators.build import build_aggregator
from torchemo.memory.consolidation import SlotAdam
from torchemo.memory.controllers import FIFO, LRU, Clock, Controller
from torchemo.memory.emo import EMO
from torchemo.memory.familiarity import Familiarity
from torchemo.memory.keys.encoder import (
    Embedder,
    FrozenRandom,
    KeyEncoder,
    MeanKey,
    OwnConv,
    PairEmbedder,
    SharedTrunk,
    TransformerKey,
)
from torchemo.memory.keys.statistics import StatisticsKey, StatisticsNetwork
from torchemo.memory.policy import Policy, is_remembered
from torchemo.memory.recall import Retrieval
from torchemo.memory.search import INDICES, ApproximateIndex, Index
from torchemo.memory.store import EpisodicMemory
from torchemo.memory.trust import Trust


def remembered_shapes(config: EMOConfig, learner: Learner) -> dict[str, torch.Size]:
    """Return the names and shapes of the tensors that ``learner`` remembers under ``config``."""
    learner = learner.base if isinstance(learner, BMG) else learner
    network = learner.loop.model.init(Generator())
    if isinstance(learner, MUSML):
        if config.value.content == "query":
            raise ConfigError("MUSML has no query gradient in its coordinates.")
        if config.value.tensors == "norm":
            raise ConfigError(
                "MUSML remembers coordinates, not tensors of the network.",
                hint="Set value.tensors to all.",
            )
        return learner.shapes
    if config.value.content == "meta":
        own = learner.init(Generator())
        buffers = learner.loop.model.buffers
        shapes = {n: p.shape for n, p in network.items() if n in own and n not in buffers}
    else:
        shapes = {n: network[n].shape for n in learner.loop.names(network)}
        if isinstance(learner, MetaSGD) and learner.rate_memory:
            shapes |= {RATE + n: shape for n, shape in shapes.items()}
    head, norm, value = _head(learner), learner.loop.model.norm, config.value
    shapes = {
        name: shape
        for name, shape in shapes.items()
        if is_remembered(name, value.head_align, value.tensors, head=head, norm=norm)
    }
    joins_gradients = config.memory.write == "replace" and value.recall_step == "off"
    if shapes and joins_gradients and not shapes.keys() & set(learner.loop.names(network)):
        raise ConfigError(
            "what would be remembered is not adapted, so that no recall could ever join a gradient.",
            hint="Set learner.adapt_bn, or let slots consolidate (memory.write).",
        )
    if not shapes:
        raise ConfigError(
            "nothing is left to remember: what the learner adapts is left out by value.head_align"
            f" '{value.head_align}' and value.tensors '{value.tensors}'.",
            hint="Use value.content = meta, which is not limited to what is adapted, or, in a network"
            " without normalisation layers, value.tensors = all.",
        )
    return shapes


def _head(learner: Learner) -> tuple[str, ...]:
    """Return the names of the head tensors; rows of their rate gradients are classes too."""
    names = learner.loop.model.head
    return (*names, *(RATE + name for name in names))


def build_emo(
    config: EMOConfig,
    learner: Learner,
    tasks: TaskShape,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> EMO:
    """Make the memory optimizer that ``config`` describes, for ``learner`` on such tasks."""
    _check_learner(config, learner)
    encoder = None
    if config.key.source == "emo":
        encoder = build_encoder(config.key, learner.loop.model, tasks, seed=seed)
    head = _head(learner)
    memory = EpisodicMemory(
        config.memory.capacity,
        _own_key_dim(learner) if encoder is None else encoder.dim,
        controller=_controller(config, seed),
        value_dtype=getattr(torch, config.memory.value_dtype),
        key_dtype=dtype,
        values_dir=None if config.memory.values_dir is None else Path(config.memory.values_dir),
    )
    aggregator = build_aggregator(
        config.aggregator,
        remembered_shapes(config, learner),
        k=config.retrieval.k or config.memory.capacity,
        steps=learner.loop.steps,
        head=head,
        seed=seed,
    )
    policy = _policy(config, tasks, seed)
    emo = EMO(
        memory,
        _retrieval(config),
        aggregator,
        encoder=encoder,
        policy=policy,
        head=head,
        norm=learner.loop.model.norm,
        familiarity=_familiarity(config, memory.key_dim),
        trust=_trust(config),
    )
    return emo.to(dtype)


def _check_learner(config: EMOConfig, learner: Learner) -> None:
    """Refuse what a learner would silently make nothing of."""
    inside = learner.base if isinstance(learner, BMG) else learner
    if config.memory.scope == "group" and not isinstance(inside, TSAMAML):
        raise ConfigError(
            "a memory per group needs a learner that groups tasks (tsa-maml).",
            hint="Set memory.scope to shared.",
        )
    if isinstance(inside, MetaSGD) and inside.rate_memory and config.value.content == "meta":
        raise ConfigError(
            "outer gradients say nothing about inner rates: rate_memory needs gradients as values.",
            hint="Set learner.rate_memory to 0, or value.content to first.",
        )
    trained = config.memory.write == "replace" and config.aggregator.kind not in ("mean", "sum")
    if isinstance(inside, Reptile) and trained:
        raise ConfigError(
            f"Reptile has no outer gradient to train the aggregator '{config.aggregator.kind}' with.",
            hint="Set aggregator.kind to mean or sum.",
        )


def _own_key_dim(learner: Learner) -> int:
    """Return the size of the learner's own description of a task."""
    inside = learner.base if isinstance(learner, BMG) else learner
    if not isinstance(inside, TaskGated):
        raise ConfigError(
            "key.source 'arml' needs a learner that describes its tasks: arml or hsml.",
            hint="Use key.source = emo.",
        )
    return inside.reader.dim


def build_encoder(config: KeyConfig, model: Model, tasks: TaskShape, *, seed: int) -> KeyEncoder:
    """Make the key network."""
    generator = generator_for(seed, "key-network")
    if config.use_labels and (config.network != "transformer" or tasks.kind == "regression"):
        raise ConfigError(
            "key.use_labels is for classes, and for key.network = transformer.",
            hint="Leave it out; regression keys read the targets anyway (key.embedder = pairs).",
        )
    if not config.unit and config.network == "learned_statistics":
        raise ConfigError("keys of key.network = learned_statistics are unit vectors.")
    y_dim = tasks.n_out if tasks.kind == "regression" else None
    if config.network == "statistics":
        return StatisticsKey(tasks.x[0], y_dim, unit=config.unit)
    if config.network == "learned_statistics":
        return StatisticsNetwork(tasks.x[0], y_dim, generator=generator, dim=config.dim)
    embedder = _embedder(config, model, tasks, generator)
    if config.network == "mean":
        return MeanKey(embedder, unit=config.unit)
    return TransformerKey(
        embedder,
        generator=generator,
        dim=config.dim,
        layers=config.layers,
        heads=config.heads,
        ff=config.ff,
        use_labels=config.use_labels,
        n_way=tasks.n_out if config.use_labels else None,
        unit=config.unit,
    )


def _embedder(config: KeyConfig, model: Model, tasks: TaskShape, generator: Generator) -> Embedder:
    if config.embedder == "pairs":
        if tasks.kind != "regression":
            raise ConfigError(
                "key.embedder 'pairs' reads targets and is for regression.",
                hint="Labels are arbitrary in every task; use key.embedder = own.",
            )
        return PairEmbedder(tasks.x[0], tasks.n_out, generator=generator, dim=config.dim)
    if config.embedder == "shared":
        return SharedTrunk(model, generator=generator, dim=config.dim)
    if len(tasks.x) != 3:
        raise ConfigError(
            f"key.embedder '{config.embedder}' needs pictures, these tasks have inputs {tasks.x}.",
            hint="Use key.embedder = pairs for regression.",
        )
    kind = OwnConv if config.embedder == "own" else FrozenRandom
    return kind(tasks.x[0], tasks.x[1], generator=generator, dim=config.dim)


def _familiarity(config: EMOConfig, key_dim: int) -> Familiarity | None:
    share = config.retrieval.familiar
    return None if share is None else Familiarity(key_dim, share=share)


def _trust(config: EMOConfig) -> Trust | None:
    least = config.retrieval.trust
    return None if least is None else Trust(config.memory.capacity, least=least)


def _retrieval(config: EMOConfig) -> Retrieval:
    return Retrieval(
        config.retrieval.k,
        weights=config.retrieval.weights,
        temperature=config.retrieval.temperature,
        null_distance=config.retrieval.null_distance,
        max_age=config.memory.max_age,
        min_fill=config.memory.min_fill,
        index=_index(config),
    )


def _index(config: EMOConfig) -> Index:
    if config.retrieval.index == "approximate":
        return ApproximateIndex(probes=config.retrieval.probes)
    return INDICES[config.retrieval.index]()


def _policy(config: EMOConfig, tasks: TaskShape, seed: int) -> Policy:
    memory, value = config.memory, config.value
    return Policy(
        content=value.content,
        memory_steps=value.memory_steps,
        recall_step=value.recall_step,
        head_align=value.head_align,
        tensors=value.tensors,
        n_way=tasks.n_out if tasks.kind == "classification" else None,
        recall_dropout=value.recall_dropout,
        value_clip=value.clip,
        value_scale=_value_scale(config, tasks),
        write=memory.write,
        slots=SlotAdam(
            lr=memory.slot_lr,
            key_lr=memory.slot_key_lr,
            decay=memory.slot_decay,
            update=memory.slot_update,
        ),
        warmup=memory.warmup,
        novelty=memory.novelty,
        afterwards=memory.afterwards,
        rekey_every=memory.rekey_every,
        key_gradient=config.key.training == "outer",
        control=value.control,
        scope=memory.scope,
        seed=seed,
    )


def _controller(config: EMOConfig, seed: int) -> Controller:
    memory = config.memory
    if memory.controller == "clock":
        return Clock(insert_ref=memory.insert_ref)
    if memory.controller == "lru":
        return LRU(update_last=memory.update_last, seed=seed)
    return FIFO()


def _value_scale(config: EMOConfig, tasks: TaskShape) -> float:
    if config.value.content in ("query", "meta"):
        return 1.0
    scales = {"mean": 1, "sum": tasks.support, "n_times_mean": tasks.n_out}
    return float(scales[config.value.reduction])
