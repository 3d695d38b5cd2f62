"""What is kept of one visit of a task: gradients and class means, no examples."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ShapeError
from torchemo.core.types import Params


class Sight(NamedTuple):
    """What is seen of a support set before it is recognised.

    Attributes:
        shots: Support examples of each class; one number for a task without classes.
        means: Class means of the support examples in feature spaces, ``{space: [way, dim]}``.
        names: Names of the classes, where somebody gives them.
    """

    shots: tuple[int, ...]
    means: Params
    names: tuple[str, ...] | None = None

    @property
    def way(self) -> int:
        """Number of classes."""
        return len(self.shots)


class PastVisit(NamedTuple):
    """One visit of a task, as it is kept.

    Attributes:
        classes: Name of each class in label order; the name of the task if it has no classes.
        sight: Numbers of examples and class means.
        values: Support gradients of the inner steps, ``{name: [step, ..., *shape]}``
            (`torchemo.memory.values`).
        when: Date and time of the visit, or nothing.
    """

    classes: tuple[str, ...]
    sight: Sight
    values: Params
    when: str = ""

    @property
    def examples(self) -> int:
        """Number of support examples."""
        return sum(self.sight.shots)


class KnownClass(NamedTuple):
    """What all kept visits tell of a class.

    Attributes:
        name: Its name.
        visits: Slots of the visits that had it, oldest first.
        means: Its mean over all examples of these visits, ``{space: [dim]}``.
        examples: How many examples these were.
    """

    name: str
    visits: tuple[int, ...]
    means: Params
    examples: int


class Known(NamedTuple):
    """What a memory knows.

    Attributes:
        classes: All known classes by name.
        tasks: The sets of classes that came together, each once.
    """

    classes: Mapping[str, KnownClass]
    tasks: tuple[tuple[str, ...], ...]


def class_means(
    x: Float[Tensor, "n ..."], y: Tensor, *, way: int
) -> tuple[tuple[int, ...], Float[Tensor, "way dim"]]:
    """Return the number of examples and the mean of each class.

    Args:
        x: Examples.
        y: Their labels, 0 to ``way - 1``.
        way: Number of classes; each has at least one example.
    """
    counts = torch.bincount(y, minlength=way)
    if len(counts) > way or bool((counts == 0).any()):
        raise ShapeError(
            f"labels should be 0 to {way - 1}, with an example each, got {y.tolist()}."
        )
    sums = x.new_zeros(way, x[0].numel()).index_add(0, y, x.flatten(1))
    return tuple(counts.tolist()), sums / counts[:, None]


def pooled_mean(parts: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Return the mean over all examples from means of parts with their numbers of examples."""
    total = sum(n for n, _ in parts)
    return torch.stack([mean * (n / total) for n, mean in parts]).sum(0)
