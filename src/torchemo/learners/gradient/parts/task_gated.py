"""MAML from an initialisation that a description of the task has gated: what ARML and HSML share."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchemo.config.options import refuse_below
from torchemo.core.errors import ConfigError
from torchemo.core.types import Batch, Params, Start, TaskShape
from torchemo.learners.gradient.base import GradientLearner
from torchemo.learners.gradient.loop import LoopOptions
from torchemo.learners.gradient.parts import Gates
from torchemo.learners.learner import Traits, scoped, within

TASK, GATE = "task/", "gate/"
"""Prefixes of the reader's tensors and of the gates among the meta-parameters."""


@runtime_checkable
class TaskReader(Protocol):
    """Describe a task by its support set."""

    @property
    def dim(self) -> int:
        """Size of a description."""
        ...

    @property
    def reads_labels(self) -> bool:
        """Whether descriptions depend on which class has which number."""
        ...

    def init(self, generator: torch.Generator) -> Params:
        """Draw the weights."""
        ...

    def __call__(self, params: Params, support: Batch) -> tuple[Tensor, Tensor]:
        """Return descriptions ``[B, dim]`` and the reader's own losses ``[B]``."""
        ...


@dataclass(frozen=True)
class TaskGatedOptions(LoopOptions):
    """Options of learners that describe a task before they adapt to it."""

    task_dim: int = 128
    """d, size of an auto-encoder's code (published: 128 for images, 40 for regression)."""
    task_width: float = 8.0
    """sigma of the soft assignment (published: arml 8, hsml 10; 2 for regression)."""
    aux_weight: float | None = None
    """Weight of the reconstruction losses beside the mean query loss. None: the published 0.01; for classes
    that stands beside a sum over queries divided by K, and is 0.01 K/(N Q) here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_below(2, self, "task_dim", where="learner")

    def weight(self, tasks: TaskShape) -> float:
        """Return the weight of a reader's own losses beside the mean query loss."""
        if self.aux_weight is not None:
            return self.aux_weight
        queries = tasks.n_out * tasks.n_query
        return 0.01 if tasks.kind == "regression" else 0.01 * tasks.n_shot / queries


@dataclass(frozen=True)
class TaskGated(GradientLearner):
    """Start at ``theta o sigmoid(A z + b)``, z the task's description, then adapt as MAML does.

    Inner gradients, and so what EMO remembers of them, are with respect to the gated tensors. The unit
    vector along z may serve a memory as the task's key (``memory.key.name = "learner"``).

    Where a memory adds offsets to the start, they are added before the gates: a task then starts at
    ``(theta + offset) o sigmoid(A z + b)``.

    Args:
        loop: The inner loop; the tensors it adapts are gated.
        reader: Describes a task: `ARML` or `HSML`.
        aux_weight: Weight of the reader's own loss beside the *mean* query loss.
    """

    reader: TaskReader
    aux_weight: float = 0.01

    def __post_init__(self) -> None:
        if not self.aux_weight >= 0:
            raise ConfigError(f"aux_weight should be 0 or more, got {self.aux_weight}.")

    @property
    def key_dim(self) -> int:
        """Size of a task's description, which may serve a memory as its key."""
        return self.reader.dim

    @cached_property
    def gates(self) -> Gates:
        """The gates of all adapted tensors."""
        theta = self.loop.model.init(torch.Generator())
        return Gates(self.reader.dim, {n: theta[n].shape for n in self.loop.names(theta)})

    @property
    def traits(self) -> Traits:
        """Labels enter the description, as numbers and as an order."""
        labels = self.reader.reads_labels
        return super().traits._replace(label_equivariant=not labels, reads_labels_at_start=labels)

    def init(self, generator: torch.Generator) -> Params:
        """Draw the network's parameters, the reader's and the gates."""
        theta = self.loop.model.init(generator)
        reader = within(TASK, self.reader.init(generator))
        return {**theta, **reader, **within(GATE, self.gates.init(generator))}

    def for_classes(self, n_way: int) -> Self:
        """Refuse: the description of a task has an input for every class number.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"{self.title} describes a task by the numbers of its classes, and knows no others than those of"
            " training.",
            hint="Give as many classes as in training, or train with another learner, such as maml.",
        )

    @property
    def takes_visits(self) -> bool:
        """Return False: a task begins at a start that is made of its whole support set."""
        return False

    def start(self, params: Params, support: Batch, *, base: Params) -> Start:
        """Begin at the gated initialisation."""
        code, losses = self.reader(scoped(params, TASK), support)
        gates = self.gates(scoped(params, GATE), code)
        theta = {n: p * gates[n] if n in gates else p for n, p in base.items()}
        key = F.normalize(code.detach(), dim=1)
        return Start(theta, auxiliary=self.aux_weight * losses, about={"key": key}, gates=gates)
