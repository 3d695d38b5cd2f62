"""Recognisers: which known classes are these? The answer aligns labels, too."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias, final

import torch
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import normalize

from torchemo.core.errors import ConfigError
from torchemo.core.types import Params
from torchemo.memory.lifelong.visits import Known, KnownClass, Sight

Names: TypeAlias = tuple[str | None, ...]


class Recogniser(Protocol):
    """Says which known class each class of a task is."""

    def recognise(self, sight: Sight, known: Known) -> Names:
        """Return the known name of each class, None for a class that is new.

        Args:
            sight: What is seen of the task.
            known: What the memory knows.
        """
        ...


@final
@dataclass(frozen=True)
class ByName:
    """Trust the names that the user gives: exact, also for a subset or superset of classes."""

    def recognise(self, sight: Sight, known: Known) -> Names:
        """Return the names that are known."""
        if sight.names is None:
            raise ConfigError("to recognise classes by name, the task needs names of its classes.")
        return tuple(name if name in known.classes else None for name in sight.names)


@final
@dataclass(frozen=True)
class ByClass:
    """Match single classes by their means: a class is recognised in whatever company it comes back.

    Args:
        space: Feature space of the means.
        threshold: Cosine from which on a class counts as recognised.
    """

    space: str
    threshold: float

    def recognise(self, sight: Sight, known: Known) -> Names:
        """Return the best assignment of known classes, each used once, where it is sure enough."""
        found: list[str | None] = [None] * sight.way
        if not known.classes:
            return tuple(found)
        candidates = list(known.classes)
        cosines = _cosines(sight, list(known.classes.values()), self.space)
        # A class that is not sure enough must not take a known class from one that is.
        sure = torch.where(
            cosines >= self.threshold, cosines, torch.zeros((), device=cosines.device)
        )
        rows, columns = linear_sum_assignment(-sure.double().numpy())
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            if cosines[row, column] >= self.threshold:
                found[row] = candidates[column]
        return tuple(found)


def _cosines(sight: Sight, known: list[KnownClass], space: str) -> Float[Tensor, "way known"]:
    own = means_in(sight.means, space)
    theirs = torch.stack([one.means[space] for one in known])
    return normalize(own, dim=1) @ normalize(theirs, dim=1).T


def means_in(means: Params, space: str) -> Tensor:
    """Return class means in a feature space; refuse a space in which there are none."""
    if space not in means:
        raise ConfigError(
            f"there are no class means in the space '{space}'.",
            hint=f"There are: {', '.join(means) or 'none (a task without classes)'}.",
        )
    return means[space]
