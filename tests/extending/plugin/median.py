"""A metric learner of another distribution: distance to the median feature of each class."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchemo.learners.head import Head


@dataclass(frozen=True)
class MedianNet(Head):
    """Classify a query by its distance to the median support feature of each class."""

    title: ClassVar[str] = "Median network"

    def fit(self, params, z, y, *, n_way):
        """Take the median of each class."""
        tasks = range(len(z))
        rows = [[z[b, y[b] == c].median(0).values for c in range(n_way)] for b in tasks]
        return {"median": torch.stack([torch.stack(row) for row in rows])}

    def logits(self, params, classifier, z):
        """Return minus the squared distance to each median."""
        return -(z[:, :, None] - classifier["median"][:, None]).square().sum(-1)
