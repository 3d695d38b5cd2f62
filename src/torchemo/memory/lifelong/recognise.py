"""Recognisers: which known classes are these? The answer aligns labels, too."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias, final

from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Params
from torchemo.memory.lifelong.visits import Known, Sight

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


def means_in(means: Params, space: str) -> Tensor:
    """Return class means in a feature space; refuse a space in which there are none."""
    if space not in means:
        raise ConfigError(
            f"there are no class means in the space '{space}'.",
            hint=f"There are: {', '.join(means) or 'none (a task without classes)'}.",
        )
    return means[space]
