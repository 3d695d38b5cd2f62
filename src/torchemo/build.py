"""From options to parts: the one place where names in a config become learners and memories."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import torch
from torch import Generator

from torchemo.aggregators.build import build_aggregator
from torchemo.config import EMOConfig, KeyConfig, LearnerConfig
from torchemo.consolidation import SlotAdam
from torchemo.controllers import FIFO, LRU, Clock, Controller
from torchemo.emo import EMO
from torchemo.encoders import (
    Embedder,
    FrozenRandom,
    KeyEncoder,
    MeanKey,
    OwnConv,
    PairEmbedder,
    SharedTrunk,
    TransformerKey,
)
from torchemo.errors import ConfigError
from torchemo.inner import RULES
from torchemo.key_statistics import StatisticsKey, StatisticsNetwork
from torchemo.learners import (
    MAML,
    InnerLoop,
    Learner,
    MAMLPlusPlus,
    MetaSGD,
    ProtoMAML,
    Reptile,
    anil,
    boil,
    fomaml,
)
from torchemo.learners.meta_sgd import RATE
from torchemo.losses import cross_entropy, mean_squared_error
from torchemo.memory import EpisodicMemory
from torchemo.policy import Policy
from torchemo.retrieval import Retrieval
from torchemo.rng import generator_for
from torchemo.search import INDICES, ApproximateIndex, Index
from torchemo.types import Model


@final
@dataclass(frozen=True)
class TaskShape:
    """What the tasks look like, as far as parts must know.

    Args:
        kind: Classification (cross-entropy) or regression (squared error).
        x: Shape of one input.
        n_out: Classes of a task, or dimension of a regression target.
        n_shot: Support examples per class, or in all for regression.
    """

    kind: Literal["classification", "regression"]
    x: tuple[int, ...]
    n_out: int
    n_shot: int = 1

    @property
    def support(self) -> int:
        """Number of support examples of a task, N K."""
        return self.n_shot * (self.n_out if self.kind == "classification" else 1)


def build_learner(config: LearnerConfig, model: Model, tasks: TaskShape) -> Learner:
    """Make the learner that ``config`` names."""
    classification = tasks.kind == "classification"
    loop = InnerLoop(
        model,
        loss=cross_entropy if classification else mean_squared_error,
        rule=RULES[config.rule](lr=config.inner_lr),
        steps=config.steps,
        order=config.order,
        adapt_bn=config.adapt_bn,
        loss_scale=float(tasks.n_out) if config.inner_loss_scale == "n_way" else 1.0,
    )
    if config.name == "proto-maml" and not classification:
        raise ConfigError("Proto-MAML needs classes; these tasks are regression.")
    made: dict[str, Learner] = {
        "maml": MAML(loop),
        "fomaml": fomaml(loop),
        "anil": anil(loop),
        "boil": boil(loop),
        "meta-sgd": MetaSGD(
            loop,
            shape=config.rate_shape,
            rate_init=config.rate_init,
            rate_memory=config.rate_memory,
        ),
        "reptile": Reptile(loop, minibatch=config.minibatch),
        "proto-maml": ProtoMAML(loop, n_way=tasks.n_out if classification else None),
        "maml++": MAMLPlusPlus(
            loop,
            multi_step_loss=config.multi_step_loss,
            learned_rates=config.learned_rates,
            first_order_epochs=config.first_order_epochs,
        ),
    }
    return made[config.name]


def remembered_shapes(config: EMOConfig, learner: Learner) -> dict[str, torch.Size]:
    """Return the names and shapes of the tensors that ``learner`` remembers under ``config``."""
    network = learner.loop.model.init(Generator())
    if config.value.content == "meta":
        own = learner.init(Generator())
        buffers = learner.loop.model.buffers
        shapes = {n: p.shape for n, p in network.items() if n in own and n not in buffers}
    else:
        shapes = {n: network[n].shape for n in learner.loop.names(network)}
        if isinstance(learner, MetaSGD) and learner.rate_memory:
            shapes |= {RATE + n: shape for n, shape in shapes.items()}
    if config.value.head_align == "drop":
        head = learner.loop.model.head
        shapes = {n: s for n, s in shapes.items() if n.removeprefix(RATE) not in head}
    if not shapes:
        raise ConfigError(
            "nothing is left to remember: the learner adapts its head alone and head_align drops it.",
            hint="Use head_align = hungarian or none, or value.content = meta.",
        )
    return shapes


def build_emo(
    config: EMOConfig,
    learner: Learner,
    tasks: TaskShape,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> EMO:
    """Make the memory optimizer that ``config`` describes, for ``learner`` on such tasks."""
    encoder = build_encoder(config.key, learner.loop.model, tasks, seed=seed)
    # Rows of a head tensor's rate gradient are classes too.
    heads = (*learner.loop.model.head, *(RATE + name for name in learner.loop.model.head))
    memory = EpisodicMemory(
        config.memory.capacity,
        encoder.dim,
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
        head=heads,
        seed=seed,
    )
    policy = _policy(config, tasks, seed)
    emo = EMO(memory, _retrieval(config), aggregator, encoder=encoder, policy=policy, head=heads)
    return emo.to(dtype)


def build_encoder(config: KeyConfig, model: Model, tasks: TaskShape, *, seed: int) -> KeyEncoder:
    """Make the key network."""
    generator = generator_for(seed, "key-network")
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
        rekey_every=memory.rekey_every,
        key_gradient=config.key.training == "outer",
        control=value.control,
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
