"""The work that is timed: tasks of random images and a Conv-4 learner."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, final

import torch
from torch import Tensor

from torchemo.config.registry import Part
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch, Episode, Params, TaskShape
from torchemo.learners import LEARNERS
from torchemo.learners.build import build_learner
from torchemo.learners.learner import Learner
from torchemo.models import Conv4

EPS = 1e-3
"""Added to variances, ours and everybody's."""


@final
@dataclass(frozen=True)
class Work:
    """One outer step: its tasks, network and learner.

    Attributes:
        size: Side of the images.
        channels: Their channels.
        learner: A name of `torchemo.learners.LEARNERS`.
        order: 2 = exact meta-gradient, 1 = first order.
        n_way: Classes of a task.
        n_shot: Support images per class.
        n_query: Query images per class.
        tasks: Tasks of the step.
        steps: Inner steps.
        filters: Filters of a layer.
        rate: Inner rate.
        adapt_bn: Adapt scale and shift of normalisation layers too, as peers do.
    """

    size: int = 84
    channels: int = 3
    learner: str = "maml"
    order: Literal[1, 2] = 2
    n_way: int = 5
    n_shot: int = 1
    n_query: int = 15
    tasks: int = 4
    steps: int = 5
    filters: int = 32
    rate: float = 0.05
    adapt_bn: bool = True

    @property
    def shape(self) -> TaskShape:
        """What its tasks look like."""
        x = (self.channels, self.size, self.size)
        sizes = {"n_shot": self.n_shot, "n_query": self.n_query, "base_classes": 4 * self.n_way}
        return TaskShape("classification", x, self.n_way, **sizes)

    @property
    def inner(self) -> dict[str, Any]:
        """Options of the inner loop."""
        return {
            "inner_lr": self.rate,
            "steps": self.steps,
            "order": self.order,
            "adapt_bn": self.adapt_bn,
        }

    @property
    def head_only(self) -> bool:
        """Whether the inner loop moves the head alone."""
        return self.learner == "anil"

    def but(self, **changes: Any) -> "Work":
        """Return the same work with some of it changed."""
        return replace(self, **changes)

    def episode(self, dtype: torch.dtype = torch.float32) -> Episode:
        """Make random images: the cost does not depend on what they show."""
        g = generator_for(0, "pictures")

        def batch(per_class: int) -> Batch:
            y = torch.arange(self.n_way).repeat(self.tasks, per_class)
            shape = (*y.shape, self.channels, self.size, self.size)
            return Batch(torch.rand(*shape, generator=g, dtype=dtype), y)

        return Episode(batch(self.n_shot), batch(self.n_query))

    def model(self, path: Literal["auto", "fused", "reference"] = "auto") -> Conv4:
        """Return the network."""
        return Conv4(
            self.n_way,
            in_channels=self.channels,
            image_size=self.size,
            filters=self.filters,
            eps=EPS,
            path=path,
        )

    def make_learner(self, path: Literal["auto", "fused", "reference"] = "auto") -> Learner:
        """Return our learner."""
        known = {option.name for option in fields(LEARNERS.options_of(self.learner))}
        # A learner over another one hands the inner loop on; one without an inner loop needs no options.
        own = {"base": Part("maml", self.inner)} if "base" in known else self.inner
        part = Part(self.learner, {name: value for name, value in own.items() if name in known})
        return build_learner(part, self.model(path), self.shape)

    def params(self, dtype: torch.dtype = torch.float32) -> Params:
        """Draw the network's initial parameters."""
        drawn: dict[str, Tensor] = self.model().init(generator_for(0, "parameters"))
        return {name: value.to(dtype) for name, value in drawn.items()}
