"""What decides a run: its parts by name, and the options of data, outer loop and training.

Parts (learner, model, memory) have their options beside them; a configuration holds those that are set.
Nothing here imports torch, so that commands parse their options quickly. The numbers A1 to A34 are the open
points of the paper; ``docs/paper.md`` lists all of them.
"""

from dataclasses import dataclass, field
from typing import Literal, final

from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError


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
    """cosine: all outer rates (learner, slots, keys) fall to zero along half a cosine over the run. If the
    memory trains after the learner, each has a cosine of its own."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"the outer rate should be above 0, got {self.lr}.")
        if self.rates_lr is not None and not self.rates_lr > 0:
            raise ConfigError(f"rates_lr should be None or above 0, got {self.rates_lr}.")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip should be None or above 0, got {self.clip}.")


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
        for name, least in (("pool", 0), ("active", 1), ("span", 1), ("exchanged", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"data.stream.{name} should be {least} or more, got {getattr(self, name)}."
                )
        if not 0 <= self.once <= 1:
            raise ConfigError(f"data.stream.once should be a share in [0, 1], got {self.once}.")


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
    """A splits.json with class-disjoint splits; otherwise those of the source, or 64 : 16 : 20."""
    scheme: str | None = None
    """Which splits to take where the file holds several for a source, such as fc100."""
    classes_per_family: int = 60
    """procedural: classes of each of the four families."""
    stream: StreamSpec = field(default_factory=StreamSpec)
    """Tasks that come back."""


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
    patience: int | None = None
    """Stop after this many validations without a better one. A memory that trains after the learner gets as
    many of its own. None never stops early."""
    seed: int = 0
    """Seed of the initialisation and of the training tasks."""
    batched: Literal["auto", "yes", "no"] = "auto"
    """Run the tasks of a step in one call, or one by one in worker threads. auto: in one call on a GPU and
    for small networks on vectors. Results are equal up to rounding."""

    def __post_init__(self) -> None:
        for name in ("steps", "tasks", "validate_every", "validation_tasks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} should be 1 or more, got {getattr(self, name)}.")


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
    def outer_steps(self) -> int:
        """Outer steps of the whole run."""
        return self.train.steps + (self.memory_steps or 0)
