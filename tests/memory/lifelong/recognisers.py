"""Recognisers that studies run for many users at once; here one task at a time, to be compared with."""

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import normalize

from torchemo.memory.lifelong.recognise import Names
from torchemo.memory.lifelong.visits import Known, KnownClass, Sight


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


@dataclass(frozen=True)
class ByTask:
    """Match whole tasks: the set of known classes that fits best, under optimal assignment.

    Args:
        space: Feature space of the means.
        threshold: Mean cosine from which on a task counts as recognised.
    """

    space: str
    threshold: float

    def recognise(self, sight: Sight, known: Known) -> Names:
        """Return the classes of the best task in the order of the labels, if it is sure enough."""
        alike = [classes for classes in known.tasks if len(classes) == sight.way]
        nothing: Names = (None,) * sight.way
        if not alike:
            return nothing
        place = {name: i for i, name in enumerate(known.classes)}
        cosines = _cosines(sight, list(known.classes.values()), self.space).double().numpy()
        best, order = self.threshold, nothing
        for classes in alike:
            some = cosines[:, [place[name] for name in classes]]
            rows, columns = linear_sum_assignment(-some)
            score = float(some[rows, columns].mean())
            if score >= best:
                best, order = score, tuple(classes[c] for c in columns)
        return order


@dataclass(frozen=True)
class ByMean:
    """Compare the mean of all examples, whatever their class: the order-free key.

    Args:
        space: Feature space of the means.
        threshold: Cosine from which on a task counts as recognised.
    """

    space: str
    threshold: float

    def recognise(self, sight: Sight, known: Known) -> Names:
        """Return the classes of the nearest task, aligned by their means."""
        alike = [classes for classes in known.tasks if len(classes) == sight.way]
        if not alike:
            return (None,) * sight.way
        centres = torch.stack(
            [torch.stack([known.classes[n].means[self.space] for n in c]).mean(0) for c in alike]
        )
        own = sight.means[self.space].mean(0)
        cosines = normalize(centres, dim=1) @ normalize(own, dim=0)
        best = int(cosines.argmax())
        if cosines[best] < self.threshold:
            return (None,) * sight.way
        aligned = ByTask(self.space, -1.0)
        return aligned.recognise(sight, known._replace(tasks=(alike[best],)))


def _cosines(sight: Sight, known: list[KnownClass], space: str) -> Tensor:
    theirs = torch.stack([one.means[space] for one in known])
    return normalize(sight.means[space], dim=1) @ normalize(theirs, dim=1).T
