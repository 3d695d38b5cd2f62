"""A learner with an inner loop of another distribution: MAML whose rate halves at every inner step."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchemo.core.types import Start
from torchemo.learners.gradient.base import GradientLearner
from torchemo.learners.gradient.loop import LoopOptions


@dataclass(frozen=True)
class HalfRateOptions(LoopOptions):
    """Options of HalfRate."""

    factor: float = 0.5
    """What the rate is multiplied by after every inner step."""


@dataclass(frozen=True)
class HalfRate(GradientLearner):
    """Adapt as MAML does, with a rate that falls."""

    title: ClassVar[str] = "Half-rate MAML"
    Options: ClassVar[type[LoopOptions]] = HalfRateOptions

    factor: float = 0.5

    @classmethod
    def build(cls, options, model, tasks):
        """Make the learner from its options."""
        return cls(options.loop(model, tasks), options.factor)

    def start(self, params, support, *, base):
        """Begin at ``theta`` with rates that fall."""
        falling = torch.tensor([self.loop.rule.lr * self.factor**s for s in range(self.steps + 1)])
        rates = {}
        for name in self.adapted(base):
            shape = (1, -1, *(1,) * (base[name].dim() - 1))
            rates[name] = falling.view(shape).expand(len(support.x), *(-1,) * base[name].dim())
        return Start(base, rates)
