"""Recall in shares: no class is taken for a known one, each counts by how probable it is.

One image seldom tells which of many known classes it shows. To choose the best costs more where it is wrong
than it gains where it is right. So class c at hand has a part in every known class k,

    p_ck = exp(t r_ck) / (e + sum_j exp(t r_cj)),

with log-likelihood ratios r (`torchemo.memory.lifelong.ratio`), a trust t in them, and the weight e of a
class that is new. The recalled gradient is then the expected one: what is unsure counts little.
"""

from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Params
from torchemo.memory.lifelong.ratio import SameClass
from torchemo.memory.lifelong.recognise import Names, means_in
from torchemo.memory.lifelong.visits import Known, Sight

COMPARED = "compared"
"""Name of the space of scaled examples, whose class means are compared."""
TRUST, NEW = (0.15, 0.25, 0.4), (1.0, 5.0)
"""What is tried on validation classes."""
NAMED = 0.5
"""A class goes by the name of a known one if it is more probable than all else together."""
LEAST_SHARE = 0.01
"""Visits of which no class has a larger share are not recalled."""


@runtime_checkable
class Sharing(Protocol):
    """A recogniser that is not sure, and says how much."""

    def shares(self, sight: Sight, known: Known) -> Float[Tensor, "way known"]:
        """Return the probability that each class of a task is each known class; the rest is "new"."""
        ...

    def seen(self, spaces: Params) -> Params:
        """Return examples in further spaces, in which class means are to be kept, too."""
        ...


@final
@dataclass(frozen=True)
class ByRatio:
    """Give every known class its share, by likelihood ratios of class means.

    Args:
        same: What tells classes apart.
        space: Feature space of the examples that are compared.
        trust: t, the factor of the ratios. Features are not quite normal, so ratios claim too much.
        new: e, the weight of a class that is new, when each known class has weight 1 at ratio 0.
    """

    same: SameClass
    space: str
    trust: float = 0.25
    new: float = 1.0

    def __post_init__(self) -> None:
        if self.trust <= 0 or self.new <= 0:
            raise ConfigError(
                f"trust and new should be above 0, got {self.trust} and {self.new}.",
                hint="A large weight of new classes recalls next to nothing.",
            )

    def shares(self, sight: Sight, known: Known) -> Float[Tensor, "way known"]:
        """Return the probability that each class of a task is each known class."""
        if not known.classes:
            return means_in(sight.means, COMPARED).new_zeros(sight.way, 0)
        classes = list(known.classes.values())
        own = self.same.along(means_in(sight.means, COMPARED))
        theirs = self.same.along(torch.stack([means_in(c.means, COMPARED) for c in classes]))
        shots = torch.tensor(sight.shots, device=own.device)
        examples = torch.tensor([c.examples for c in classes], device=own.device)
        return in_shares(self.same.ratios(own, shots, theirs, examples), self.trust, self.new)

    def seen(self, spaces: Params) -> Params:
        """Return examples as they are compared."""
        return {COMPARED: self.same.scaled(means_in(spaces, self.space))}

    def recognise(self, sight: Sight, known: Known) -> Names:
        """Return the known name of each class where one is more probable than all else together."""
        return names_of(self.shares(sight, known), tuple(known.classes))


def in_shares(
    ratios: Float[Tensor, "... known"], trust: float, new: float
) -> Float[Tensor, "... known"]:
    """Return p of the module's formula; a ratio of minus infinity has no share."""
    nothing = torch.full_like(ratios[..., :1], new).log()
    return torch.cat([trust * ratios, nothing], -1).softmax(-1)[..., :-1]


def names_of(shares: Float[Tensor, "way known"], known: tuple[str, ...]) -> Names:
    """Name classes after known ones of which they have more than half; each name is used once."""
    chosen = sure(shares[None])[0].tolist() if known else [-1] * len(shares)
    return tuple(None if column < 0 else known[column] for column in chosen)


def sure(shares: Float[Tensor, "task way known"]) -> Tensor:
    """Return the known class of each class of B tasks, -1 where none is sure, or two classes claim it."""
    best, column = shares.max(2)
    column = torch.where(best > NAMED, column, -1)
    claimed = (column[:, :, None] == column[:, None]).sum(2)
    return torch.where(claimed == 1, column, -1)
