"""Every option of torchemo as frozen dataclasses: defaults, legal values, and which reading they are.

Nothing here imports torch, so that commands can parse their options quickly. The numbers A1 to A34 are
the open points of the paper; ``docs/paper.md`` lists all of them.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final

from torchemo.core.errors import ConfigError

AggregatorKind: TypeAlias = Literal["mean", "sum", "gated", "gate", "coordinate"]


@final
@dataclass(frozen=True)
class MemoryConfig:
    """The store and what it forgets (Eq. 6)."""

    capacity: int = 100
    """T, slots; 0 switches the memory off. The paper: 100 (1-shot), 200 (5-shot)."""
    controller: Literal["fifo", "lru", "clock"] = "lru"
    """What a full memory forgets. The paper: lru for MAML and ANIL, clock for Meta-SGD."""
    insert_ref: bool = True
    """CLOCK: reference bit of a freshly written slot."""
    update_last: float = 0.0
    """LRU: probability of overwriting the most recently used slot instead."""
    value_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """How values are kept."""
    values_dir: str | None = None
    """Keep values in memory-mapped files in this folder, so that the store may exceed RAM; None: in RAM."""
    max_age: int | None = None
    """Slots written more batches ago than this are not recalled (A23)."""
    min_fill: int = 1
    """Recall nothing before this many slots are filled (A24)."""
    rekey_every: int | None = None
    """Recompute stored keys every this many batches; stores the support sets (A23)."""
    scope: Literal["shared", "group"] = "shared"
    """group: a task recalls only what its own group remembers (tsa-maml)."""
    write: Literal["replace", "consolidate"] = "replace"
    """replace: the paper. consolidate: slots accumulate outer gradient rows and offset the start (ours); no
    gradients are then joined, and the aggregator, value.clip, memory_steps and recall_step have no say."""
    slot_lr: float = 1e-3
    """consolidate: Adam rate of the slots."""
    slot_key_lr: float = 3e-3
    """consolidate: Adam rate of the slot keys."""
    slot_decay: float = 0.0
    """consolidate: decoupled decay of the slots towards zero."""
    slot_update: Literal["dense", "lazy"] = "dense"
    """consolidate: step all slots at every batch, or only those recalled in it."""
    warmup: int = 100
    """consolidate: batches before the slots are seeded from past keys; afterwards says so itself."""
    novelty: float | None = None
    """consolidate: distance beyond which a task claims a slot of its own."""
    afterwards: float | None = None
    """consolidate: share of the outer steps, such as 0.5, after which slots are seeded and learn alone. Until
    then the learner learns, as in a training of that length, and then it rests: where the memory keeps
    silent, the learner answers as it was at that step. None: both learn at once, from ``warmup`` on."""


@final
@dataclass(frozen=True)
class KeyConfig:
    """The task key (Eq. 4)."""

    source: Literal["emo", "arml"] = "emo"
    """emo: a key network. arml: the learner's own description of a task, [q ; t] of ARML or [g ; r] of HSML,
    detached, as a unit vector; the other options of the key are then not used."""
    network: Literal["transformer", "mean", "statistics", "learned_statistics"] = "transformer"
    """transformer: the paper. mean: mean embedding. statistics: plain input statistics, without weights.
    learned_statistics: a small network on more of them (ours)."""
    embedder: Literal["own", "shared", "frozen_random", "pairs"] = "own"
    """Who embeds an example (A1): an own Conv-4, the learner's trunk, a frozen one; pairs for regression."""
    dim: int = 64
    """Dimension of a key."""
    layers: int = 6
    """Layers of the key Transformer."""
    heads: int = 4
    """Attention heads of the key Transformer (the paper does not say)."""
    ff: int = 128
    """Width of its feed-forward layers (the paper does not say)."""
    use_labels: bool = False
    """Add a label embedding to every example (A2)."""
    unit: bool = True
    """Keys are unit vectors; needed by softmax weights."""
    training: Literal["none", "outer", "self_recognition"] = "outer"
    """How keys learn (A3): not at all, by the outer loss through softmax weights, or by recognising their
    own task among others."""
    recognition_lr: float = 1e-3
    """self_recognition: Adam rate of the key network."""
    recognition_older: int = 48
    """self_recognition: older support sets used as negatives."""
    recognition_every: int | None = None
    """self_recognition: after memory.warmup batches, train the keys at every such outer step. None: at all of
    them where this is cheap (learned_statistics), at every sixteenth where pictures are encoded; keys then
    learn more slowly."""


@final
@dataclass(frozen=True)
class RetrievalConfig:
    """Nearest neighbours and their weights."""

    k: int | None = 20
    """Neighbours. The paper: 20 (1-shot), 15 (5-shot). None recalls all slots."""
    weights: Literal["uniform", "softmax"] = "softmax"
    """uniform: the paper, and the key network then never learns (A3)."""
    temperature: float = 0.1
    """Initial temperature of softmax weights; learned."""
    null_distance: float | None = None
    """Distance of an extra empty slot in the softmax: tasks unlike everything remembered recall less."""
    familiar: float | None = None
    """Share of tasks like those of training, such as 0.95, that count as familiar: whoever's key lies further
    out among those of training is evaluated without recall (ours). None evaluates all with it."""
    trust: float | None = None
    """Gain on validation tasks, such as 0, that a slot must exceed to be recalled in evaluation: those that
    learned their training classes by heart then keep silent (ours). None trusts all."""
    index: Literal["exact", "random", "approximate"] = "exact"
    """random: a control that recalls arbitrary slots. approximate: for 10^5 slots and more; exact below 10^4.
    Needs the extra ``ann``."""
    probes: int = 32
    """approximate: cells of keys to look at; more find more and take longer."""


@final
@dataclass(frozen=True)
class AggregatorConfig:
    """How recalled and own gradients become a direction (Eq. 8 to 10)."""

    kind: AggregatorKind = "gated"
    """mean, sum: Eq. 8, 9. gate, coordinate: two realisations of Eq. 10 (A9). gated: one gate per tensor."""
    rescale: Literal["none", "own"] = "none"
    """mean: own multiplies the result by m + 1, so that the own gradient keeps its rate (A8)."""
    pad: bool = False
    """mean: divide by k + 1 also while fewer slots are filled, so that the own rate is constant (A8)."""
    init: Literal["own", "mean", "sum"] = "own"
    """gate, coordinate: the rule they equal before training."""
    per_step: bool = False
    """gated: a gate per inner step."""
    learn_own: bool = False
    """gated: learn the own gradient's factor too."""
    layers: int = 6
    """gate: layers of the Transformer."""
    max_neighbors: int | None = None
    """gate, coordinate: use only the nearest ones; 9 gives the paper's length 11 (A10)."""


@final
@dataclass(frozen=True)
class ValueConfig:
    """What is remembered and how it is used (A6, A7, A12, A25)."""

    content: Literal["first", "last", "mean", "per_step", "query", "meta"] = "first"
    """Support gradient at the first, last, mean or every step, query gradient, or outer gradient row."""
    reduction: Literal["mean", "sum", "n_times_mean"] = "mean"
    """Support gradients stored as the mean or sum over examples, or n_way times the mean (A12)."""
    clip: float | None = None
    """Clip a recalled tensor to this multiple of the own gradient's norm (A25)."""
    head_align: Literal["none", "drop", "hungarian"] = "none"
    """Label order of head gradients: as stored, left out, or matched by prototypes (A7)."""
    tensors: Literal["all", "norm"] = "all"
    """norm: remember scale and shift of normalisation layers only, too few to learn classes by heart."""
    memory_steps: Literal["all", "first"] | float = "first"
    """Inner steps that use the recall; a number in (0, 1) is a decay per step (A6). The paper: all."""
    recall_step: Literal["off", "eval_only", "always"] = "off"
    """A step along the recall alone before the first support gradient (A4)."""
    recall_dropout: float = 0.0
    """Probability that a meta-training task is adapted without its recall."""
    control: Literal["none", "random_values"] = "none"
    """random_values: a control that stores random directions of the same norm."""


@final
@dataclass(frozen=True)
class EMOConfig:
    """Episodic memory optimization; capacity 0 is the base learner."""

    memory: MemoryConfig = field(default_factory=MemoryConfig)
    key: KeyConfig = field(default_factory=KeyConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    aggregator: AggregatorConfig = field(default_factory=AggregatorConfig)
    value: ValueConfig = field(default_factory=ValueConfig)

    def __post_init__(self) -> None:
        if self.retrieval.weights == "softmax" and not self.key.unit:
            raise ConfigError(
                "softmax weights need unit keys, got key.unit = false.",
                hint="Set key.unit to true or retrieval.weights to uniform.",
            )
        if self.memory.write == "consolidate" and self.value.content != "meta":
            raise ConfigError(
                f"memory.write = consolidate needs value.content = meta, got '{self.value.content}'."
            )
        if self.memory.write == "consolidate" and self.retrieval.weights != "softmax":
            raise ConfigError("memory.write = consolidate needs retrieval.weights = softmax.")
        if self.retrieval.trust is not None and self.memory.write != "consolidate":
            raise ConfigError(
                "retrieval.trust judges slots that last, and memory.write = replace has none.",
                hint="Set memory.write to consolidate, or leave retrieval.trust unset.",
            )
        wide = self.retrieval.k is None or self.memory.max_age is not None
        if self.retrieval.index == "approximate" and (wide or self.memory.write == "consolidate"):
            raise ConfigError(
                "retrieval.index = approximate needs a number k, no memory.max_age, and"
                " memory.write = replace.",
                hint="Use retrieval.index = exact.",
            )


@final
@dataclass(frozen=True)
class LearnerConfig:
    """The base learner and its inner loop."""

    name: Literal[
        "maml",
        "fomaml",
        "anil",
        "boil",
        "meta-sgd",
        "reptile",
        "proto-maml",
        "maml++",
        "arml",
        "hsml",
        "tsa-maml",
        "musml",
        "bmg",
    ] = "maml"
    """Which learner."""
    inner_lr: float = 0.05
    """alpha, on the mean support loss (A11). The paper prints 0.001."""
    steps: int = 5
    """Inner steps while training."""
    rule: Literal["sgd", "momentum", "adam"] = "sgd"
    """Inner step rule."""
    order: Literal[1, 2] = 2
    """2 keeps the exact meta-gradient; 1 detaches inner gradients."""
    adapt_bn: bool = False
    """Adapt scale and shift of normalisation layers too (A26)."""
    inner_loss_scale: Literal["mean", "n_way"] = "mean"
    """n_way: the summed convention of the first published code (A11)."""
    rate_shape: Literal["per_element", "per_tensor", "scalar"] = "per_element"
    """meta-sgd: one rate per element, per tensor, or for all."""
    rate_init: tuple[float, float] = (0.005, 0.1)
    """meta-sgd: rates are drawn uniformly from this interval."""
    rate_memory: float = 0.0
    """meta-sgd: rate of EMO's memory of rate gradients (A18); 0 switches it off, 0.001 is its preset."""
    multi_step_loss: bool = True
    """maml++: outer loss over all inner steps."""
    learned_rates: bool = True
    """maml++: a rate per tensor and step."""
    first_order_epochs: int = 0
    """maml++: epochs of first order before second order begins."""
    minibatch: int | None = None
    """reptile: support examples per inner step."""
    task_dim: int = 128
    """arml, hsml: d, size of an auto-encoder's code (published: 128 for pictures, 40 for regression)."""
    task_width: float = 8.0
    """arml, hsml: sigma of the soft assignment (published: arml 8, hsml 10; 2 for regression)."""
    aux_weight: float | None = None
    """arml, hsml: weight of the reconstruction losses beside the mean query loss. None: the published
    0.01; for classes that stands beside a sum over queries divided by K, and is 0.01 K/(N Q) here."""
    vertices: int = 4
    """arml: G, vertices of the meta-knowledge graph."""
    task_init: Literal["glorot", "tf"] = "glorot"
    """arml: how graph and projections begin; tf is the published code's wide draw."""
    tree: tuple[int, ...] = (4, 2)
    """hsml: clusters of each layer of the tree, from the leaves up, without the root."""
    tree_gate: Literal["linear", "distance"] = "linear"
    """hsml: how a node chooses among those above it."""
    autoencoder: Literal["rnn", "mean"] = "rnn"
    """hsml: how the support examples become a code."""
    groups: int = 5
    """tsa-maml: M, groups of tasks."""
    first_stage: int = 600
    """tsa-maml: outer steps of MAML before solutions are collected and clustered."""
    cluster_tasks: int = 256
    """tsa-maml: how many solutions are clustered (published: 10 000)."""
    cluster_on: Literal["body", "all"] = "body"
    """tsa-maml: which tensors of a solution are compared."""
    subspaces: int = 4
    """musml: K_s, subspaces (our choice)."""
    subspace_dim: int = 2
    """musml: m, columns of a subspace (our choice)."""
    temperature: tuple[float, float] = (1.0, 0.1)
    """musml: gamma of the choice of a subspace, at the beginning and at the end (our choice)."""
    anneal: int = 1000
    """musml: outer steps from one gamma to the other (our choice)."""
    base: Literal[
        "maml", "fomaml", "anil", "boil", "meta-sgd", "proto-maml", "maml++", "arml", "hsml"
    ] = "maml"
    """bmg: the learner underneath."""
    target_steps: int = 5
    """bmg: L, steps from the adapted parameters to the target (our choice)."""
    target_rate: float | None = None
    """bmg: zeta, rate of the target's query step; unset takes inner_lr (our choice)."""
    match: Literal["kl", "l2"] = "kl"
    """bmg: distance to the target: of predictions, or of parameters."""


@final
@dataclass(frozen=True)
class OuterConfig:
    """The outer loop's own choices."""

    lr: float = 1e-3
    """beta, the outer rate (A11). The paper prints 0.01."""
    rates_lr: float | None = None
    """meta-sgd, maml++: outer rate of the learned inner rates; None takes lr. Adam moves a rate by about
    this much per step, so rates near 0.003 need less than 0.003."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Adam for all learners but Reptile, which steps by plain SGD with rate eps."""
    clip: float | None = 10.0
    """Largest norm of the gradient of each group: the learner, and memory with keys."""
    schedule: Literal["constant", "cosine"] = "constant"
    """cosine: all outer rates (learner, slots, keys) fall to zero over the run along half a cosine; over the
    part of each where slots learn after the learner (memory.afterwards)."""
    recognition_after: float = 0.2
    """Self-recognition goes on at this share of its pace once consolidated slots are seeded."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"the outer rate should be above 0, got {self.lr}.")
        if self.rates_lr is not None and not self.rates_lr > 0:
            raise ConfigError(f"rates_lr should be None or above 0, got {self.rates_lr}.")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip should be None or above 0, got {self.clip}.")


@final
@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    name: Literal["conv4", "resnet12", "mlp"] = "conv4"
    """conv4 and resnet12 for pictures, mlp for regression."""
    filters: int = 32
    """conv4: filters per layer."""
    head_pool: Literal["flatten", "mean"] = "flatten"
    """conv4: what the head sees of the last map."""
    downsample: Literal["pool", "stride"] = "pool"
    """conv4: max-pooling, or stride 2 (the original Omniglot network)."""
    bn: Literal[
        "transductive",
        "per_query_with_support",
        "running",
        "per_step_running",
        "group",
        "layer",
        "none",
    ] = "transductive"
    """Whose statistics normalise a picture; transductive is the field's habit for MAML."""
    channels: Literal["wide", "narrow"] = "narrow"
    """resnet12: 64-160-320-640 or 64-128-256-512."""
    hidden: tuple[int, ...] = (40, 40)
    """mlp: hidden widths."""


@final
@dataclass(frozen=True)
class DataConfig:
    """Where tasks come from and what they look like."""

    source: tuple[str, ...] = ("procedural",)
    """``procedural`` (synthetic pictures), ``regression:GROUP`` (sinusoid, hsml4, arml6), or paths of image
    sets; several paths are several domains, and a task never mixes domains."""
    image_size: int = 32
    """Side of the pictures."""
    channels: int = 3
    """1 for grey pictures, 3 for colour."""
    n_way: int = 5
    """Classes of a task, N."""
    n_shot: int = 1
    """Support examples per class, K; support points of a regression task."""
    n_query: int = 15
    """Query examples per class while training; query points of a regression task."""
    rotations: bool = False
    """Turn every class of a task by its own multiple of 90 degrees (Omniglot)."""
    splits: str | None = None
    """A splits.json with class-disjoint splits; otherwise those of the source, or 64 : 16 : 20."""
    scheme: str | None = None
    """Which splits to take where the file holds several for a source, such as fc100."""
    classes_per_family: int = 60
    """procedural: classes of each of the four families."""


@final
@dataclass(frozen=True)
class TrainConfig:
    """How long, and what is looked at on the way."""

    iterations: int = 1000
    """Outer steps."""
    tasks: int = 4
    """Tasks per outer step (the meta-batch)."""
    validate_every: int = 250
    """Outer steps between validations and checkpoints."""
    validation_tasks: int = 100
    """Tasks of a validation, the same every time."""
    patience: int | None = None
    """Stop after this many validations without a better one, and not before slots that learn after the
    learner have had as many; None never stops early."""
    seed: int = 0
    """Seed of the initialisation and of the training tasks."""
    batched: Literal["auto", "yes", "no"] = "auto"
    """Run the tasks of a step in one call, or one by one in worker threads. auto: in one call on a GPU and
    for small networks on vectors. Results are equal up to rounding."""

    def __post_init__(self) -> None:
        for name in ("iterations", "tasks", "validate_every", "validation_tasks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} should be 1 or more, got {getattr(self, name)}.")


@final
@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run."""

    learner: LearnerConfig = field(default_factory=LearnerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    emo: EMOConfig = field(default_factory=lambda: EMOConfig(memory=MemoryConfig(capacity=0)))
    outer: OuterConfig = field(default_factory=OuterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
