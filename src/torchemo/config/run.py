"""What decides a run: its parts by name, and the options of data, outer loop and training.

Parts (learner, model, memory) have their options beside them; a configuration holds those that are set.
Nothing here imports torch, so that commands parse their options quickly. The numbers A1 to A34 are the open
points of the paper; ``docs/paper.md`` lists all of them.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final

from torchemo.config.options import refuse_below
from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError

Schedule: TypeAlias = Literal["constant", "cosine", "steps"]


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters step."""

    lr: float = 1e-3
    """beta, the outer rate (A11). The paper prints 0.01. 0 leaves the learner as it is drawn; keys and slots
    of offsets have rates of their own."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Adam for all learners but Reptile, which steps by plain SGD with rate eps."""
    momentum: float = 0.0
    """sgd: share of the last step that the next one keeps."""
    nesterov: bool = False
    """sgd: look ahead along the momentum."""
    weight_decay: float = 0.0
    """Share of every learned number that pulls it to zero: added to the gradient by sgd, apart from it by
    adam (AdamW). Slots and keys of a memory do not decay."""
    clip: float | None = 10.0
    """Largest norm of the gradient of each group: the learner, and memory with keys."""
    schedule: Schedule = "constant"
    """cosine: all outer rates (learner, slots, keys) fall to zero along half a cosine over the run. If the
    memory trains after the learner, each has a cosine of its own. steps: they drop at ``milestones``."""
    milestones: tuple[float, ...] = (1 / 3, 2 / 3, 5 / 6)
    """steps: shares of the training after which the rates drop."""
    factors: tuple[float, ...] = (0.06, 0.012, 0.0024)
    """steps: what the first rates are multiplied by after each milestone; MetaOptNet's by default."""

    @property
    def drops(self) -> tuple[tuple[float, float], ...]:
        """Milestones with their factors."""
        return tuple(zip(self.milestones, self.factors, strict=True))

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ConfigError(f"the outer rate should be 0 or more, got {self.lr}.")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip should be None or above 0, got {self.clip}.")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum should be a share in [0, 1), got {self.momentum}.")
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov looks ahead along a momentum, and momentum is 0.")
        if not self.weight_decay >= 0:
            raise ConfigError(f"weight_decay should be 0 or more, got {self.weight_decay}.")
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(
                f"momentum is for optimizer = sgd, got {self.momentum} with adam.",
                hint="Set optimizer = sgd, or leave momentum at 0.",
            )
        ordered = sorted(self.milestones) == list(self.milestones)
        if not ordered or len(self.milestones) != len(self.factors):
            raise ConfigError(
                f"milestones should rise and have a factor each, got {list(self.milestones)} and"
                f" {list(self.factors)}."
            )


@final
@dataclass(frozen=True)
class OuterConfig(OptimizerConfig):
    """The outer loop's own choices."""

    rates_lr: float | None = None
    """meta-sgd, maml++: outer rate of the learned inner rates; None takes lr. Adam moves a rate by about
    this much per step, so rates near 0.003 need less than 0.003."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rates_lr is not None and not self.rates_lr > 0:
            raise ConfigError(f"rates_lr should be None or above 0, got {self.rates_lr}.")


@final
@dataclass(frozen=True)
class DenseConfig(OptimizerConfig):
    """Classification of all base classes at once, with an optimizer of its own."""

    steps: int | Literal["all"] = 0
    """Outer steps of it before the episodes; all: the run has no episodes, and train.steps of these."""
    share: float = 0.0
    """How likely a step of it comes before each of the first episodes. The share is multiplied by itself
    after every twentieth of the training: 0.9 falls to 0.12 (TADAM)."""
    batch: int = 64
    """Images of a step."""
    classifier: Literal["cosine", "linear"] = "cosine"
    """What reads the features: scaled cosines to a vector per class, or a linear layer."""
    scale: float = 10.0
    """cosine: where the learned scale begins."""
    smoothing: float = 0.0
    """Share of the target that all wrong classes have together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps != "all" and self.steps < 0:
            raise ConfigError(f"train.dense.steps should be 0 or more, or all, got {self.steps}.")
        if self.batch < 2 or not self.scale > 0:
            raise ConfigError(
                "train.dense.batch should be 2 or more and train.dense.scale above 0, got"
                f" {self.batch} and {self.scale}."
            )
        for name in ("share", "smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"train.dense.{name} should be in [0, 1), got {getattr(self, name)}."
                )


@final
@dataclass(frozen=True)
class StreamSpec:
    """Tasks that come back, each time with new examples (`torchemo.data.streams`)."""

    pool: int = 0
    """Tasks of a split that come back, R; 0 draws every task anew, as usual."""
    law: Literal["uniform", "rounds", "zipf", "bursts", "drift"] = "uniform"
    """Which of them comes next. uniform: any. rounds: one after the other, then all again. zipf: number r in
    proportion to 1 / r. bursts: one of ``active`` random ones, which are drawn anew every ``span`` visits.
    drift: one of ``active`` neighbours, the first of which leaves every ``span`` visits while the next one
    joins."""
    active: int = 5
    """bursts, drift: tasks that are visited at a time."""
    span: int = 50
    """bursts: visits between two draws. drift: visits between two changes."""
    once: float = 0.0
    """Share of the visits that belong to a task that never comes back."""
    labels: Literal["kept", "shuffled"] = "kept"
    """Whether a task that comes back has the same label order."""
    exchanged: int = 0
    """Classes of a task that others replace at every later visit."""

    def __post_init__(self) -> None:
        refuse_below(0, self, "pool", where="data.stream")
        refuse_below(1, self, "active", "span", where="data.stream")
        refuse_below(0, self, "exchanged", where="data.stream")
        if not 0 <= self.once <= 1:
            raise ConfigError(f"data.stream.once should be a share in [0, 1], got {self.once}.")


@final
@dataclass(frozen=True)
class AugmentSpec:
    """What is done to images of training tasks (`torchemo.data.augment`)."""

    crop: int = 0
    """Pad by as many black pixels, and cut out a random window of the first size: 8 for 84 px, 4 for 32."""
    flip: bool = False
    """Mirror every second image."""
    jitter: float = 0.0
    """Change brightness, contrast and saturation by up to this share; 0.4 in MetaOptNet's recipe."""
    erase: float = 0.0
    """How likely a rectangle of an image is filled with its mean colour."""

    def __post_init__(self) -> None:
        refuse_below(0, self, "crop", where="data.augment")
        for name in ("jitter", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"data.augment.{name} should be a share in [0, 1], got {getattr(self, name)}."
                )


@final
@dataclass(frozen=True)
class DataConfig:
    """Where tasks come from and what they look like."""

    source: tuple[str, ...] = ("procedural",)
    """``procedural`` (synthetic images), ``regression:GROUP`` (sinusoid, hsml4, arml6), or paths of image
    sets; several paths are several domains, and a task never mixes domains."""
    image_size: int = 32
    """Side of the images."""
    channels: int = 3
    """1 for grey images, 3 for colour."""
    n_way: int = 5
    """Classes of a task, N."""
    n_shot: int = 1
    """Support examples per class, K; support points of a regression task."""
    n_query: int = 15
    """Query examples per class while training; query points of a regression task."""
    rotations: bool = False
    """Turn every class of a task by its own multiple of 90 degrees (Omniglot)."""
    splits: str | None = None
    """A splits.json with class-disjoint splits, or proportions to draw them (64:16:20); otherwise those of
    the source, or 64 : 16 : 20."""
    scheme: str | None = None
    """Which splits to take where the file holds several for a source, such as fc100."""
    classes_per_family: int = 60
    """procedural: classes of each of the four families."""
    stream: StreamSpec = field(default_factory=StreamSpec)
    """Tasks that come back."""
    augment: AugmentSpec = field(default_factory=AugmentSpec)
    """Changes of training images."""
    train_way: int | None = None
    """Classes of a training task; as many as of a test task by default. For learners without a head of the
    network, such as ProtoNet."""
    train_shot: int | None = None
    """Support examples per class of a training task; as many as of a test task by default."""
    version: Literal[1, 2] = 1
    """Rules for images on disk. 2, which train writes into new runs: drawn splits depend on class names
    alone, and an image in two splits is refused. 1, earlier runs and recorded studies: the name of the set
    enters the draw, and images in two splits are not looked for."""
    drop_duplicates: bool = False
    """Keep one of images with the same pixels (that of test, else of val) instead of refusing them."""


@final
@dataclass(frozen=True)
class TrainConfig:
    """How long, and what is looked at on the way."""

    steps: int = 1000
    """Outer steps in which the learner trains; a memory may train for further ones (memory.steps)."""
    tasks: int = 4
    """Tasks per outer step (the meta-batch)."""
    validate_every: int = 250
    """Outer steps between validations and checkpoints."""
    validation_tasks: int = 100
    """Tasks of a validation, the same every time."""
    validate_start: bool = False
    """Validate before the first step too: where training only does harm, the start is the best checkpoint."""
    patience: int | None = None
    """Stop after this many validations without a better one. A memory that trains after the learner gets as
    many of its own. None never stops early."""
    seed: int = 0
    """Seed of the initialisation and of the training tasks."""
    batched: Literal["auto", "yes", "no"] = "auto"
    """Run the tasks of a step in one call, or one by one in worker threads. auto: in one call on a GPU and
    for small networks on vectors. Results are equal up to rounding."""
    start_from: str | None = None
    """Folder of a run whose network training begins with, at its best checkpoint; None draws a new one."""
    dense: DenseConfig = field(default_factory=DenseConfig)
    """Classification of all base classes."""

    def __post_init__(self) -> None:
        counts = ("steps", "tasks", "validate_every", "validation_tasks")
        refuse_below(1, self, *counts, where="train")


@final
@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run."""

    learner: Part = field(default_factory=lambda: Part("maml"))
    model: Part = field(default_factory=lambda: Part("conv4"))
    memory: Part = field(default_factory=lambda: Part("none"))
    outer: OuterConfig = field(default_factory=OuterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def memory_steps(self) -> int | None:
        """Outer steps in which the memory trains after the learner; None if both train together."""
        steps = self.memory.options.get("steps")
        if self.memory.options.get("capacity") == 0:  # without slots there is no memory to train
            return None
        if steps == "same":
            return self.train.steps
        return steps if isinstance(steps, int) else None

    @property
    def dense_steps(self) -> int:
        """Outer steps of dense classification before the episodes."""
        steps = self.train.dense.steps
        return self.train.steps if steps == "all" else steps

    @property
    def episode_steps(self) -> int:
        """Outer steps in which the learner trains on episodes."""
        return 0 if self.train.dense.steps == "all" else self.train.steps

    @property
    def outer_steps(self) -> int:
        """Outer steps of the whole run."""
        return self.dense_steps + self.episode_steps + (self.memory_steps or 0)
