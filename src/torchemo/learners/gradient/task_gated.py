"""MAML from an initialisation that a description of the task has gated: what ARML and HSML share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, final, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Batch, Params, Start
from torchemo.learners.gradient.inner import Adapted
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.parts import Gates
from torchemo.learners.learner import Traits, query_rows, scoped, within
from torchemo.memory.emo import Bound

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


@final
@dataclass(frozen=True)
class TaskGated:
    """Start at ``theta o sigmoid(A z + b)``, z the task's description, then adapt as MAML does.

    Inner gradients, and so what EMO remembers of them, are with respect to the gated tensors. The unit
    vector along z may serve EMO as the task's key (``key.source = "arml"``).

    Where a memory adds offsets to the start, they are added before the gates: a task then starts at
    ``(theta + offset) o sigmoid(A z + b)``.

    Args:
        loop: The inner loop; the tensors it adapts are gated.
        reader: Describes a task: `ARML` or `HSML`.
        aux_weight: Weight of the reader's own loss beside the *mean* query loss.
    """

    loop: InnerLoop
    reader: TaskReader
    aux_weight: float = 0.01

    def __post_init__(self) -> None:
        if not self.aux_weight >= 0:
            raise ConfigError(f"aux_weight should be 0 or more, got {self.aux_weight}.")

    @cached_property
    def gates(self) -> Gates:
        """The gates of all adapted tensors."""
        theta = self.loop.model.init(torch.Generator())
        return Gates(self.reader.dim, {n: theta[n].shape for n in self.loop.names(theta)})

    @property
    def traits(self) -> Traits:
        """Labels enter the description, as numbers and as an order."""
        second, labels = self.loop.order == 2, self.reader.reads_labels
        return Traits(second, not labels, second, labels)

    def init(self, generator: torch.Generator) -> Params:
        """Draw the network's parameters, the reader's and the gates."""
        theta = self.loop.model.init(generator)
        reader = within(TASK, self.reader.init(generator))
        return {**theta, **reader, **within(GATE, self.gates.init(generator))}

    def start(self, params: Params, support: Batch, *, base: Params) -> Start:
        """Begin at the gated initialisation."""
        code, losses = self.reader(scoped(params, TASK), support)
        gates = self.gates(scoped(params, GATE), code)
        theta = {n: p * gates[n] if n in gates else p for n, p in base.items()}
        key = F.normalize(code.detach(), dim=1)
        return Start(theta, auxiliary=self.aux_weight * losses, about={"key": key}, gates=gates)

    def adapt(
        self,
        start: Start,
        support: Batch,
        *,
        bound: Bound | None = None,
        steps: int | None = None,
        order: int | None = None,
    ) -> Adapted:
        """Take gradient steps on the gated tensors (Eq. 2; Eq. 7 with EMO)."""
        return self.loop.run(start, support, bound=bound, steps=steps, order=order)

    def outer(
        self, start: Start, adapted: Adapted, query: Batch, *, leaves: Sequence[Tensor]
    ) -> tuple[Float[Tensor, " task"], list[Tensor]]:
        """Differentiate the query loss in the gated start; the outer step carries it to the gates."""
        return query_rows(self.loop, adapted, query, leaves=leaves)
