"""MAML++: How to train your MAML (Antoniou, Edwards, Storkey, ICLR 2019), each piece a switch."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.types import Batch, Params, Start
from torchemo.learners.gradient.base import GradientLearner
from torchemo.learners.gradient.loop import LoopOptions
from torchemo.learners.gradient.meta_sgd import RATE
from torchemo.learners.learner import Fitted


def step_weights(steps: int, epoch: int, *, epochs: int = 15) -> list[float]:
    """Weights w_s of the multi-step loss, annealed towards the last step; they sum to 1.

    ``w_s = max(1/S - e/(S E), 0.03/S)`` before the last step and
    ``w_{S-1} = min(1/S + e (S-1)/(S E), 1 - (S-1) 0.03/S)`` at it.

    Example:
        >>> step_weights(2, 0)
        [0.5, 0.5]
    """
    early = max(1 / steps - epoch / (steps * epochs), 0.03 / steps)
    last = min(1 / steps + epoch * (steps - 1) / (steps * epochs), 1 - (steps - 1) * 0.03 / steps)
    return [early] * (steps - 1) + [last]


@final
@dataclass(frozen=True)
class MAMLPlusPlusOptions(LoopOptions):
    """Options of MAML++."""

    multi_step_loss: bool = True
    """Outer loss over all inner steps."""
    learned_rates: bool = True
    """A rate per tensor and step."""
    first_order_epochs: int = 0
    """Epochs of first order before second order begins."""


@final
@dataclass(frozen=True)
class MAMLPlusPlus(GradientLearner):
    """MAML with a multi-step loss, learned rates per tensor and step, and annealed order.

    Per-step normalisation statistics are an option of the network (``bn = "per_step_running"``).

    Args:
        loop: The inner loop; its rule's rate starts the learned ones.
        multi_step_loss: Outer loss = sum_s w_s L_Q(theta_{s+1}), see `step_weights`.
        learned_rates: One rate per tensor and inner step (a table of S + 1 columns; evaluation with more
            steps reuses the last), otherwise the rule's constant.
        first_order_epochs: Epochs that detach the inner gradients (derivative-order annealing).
        epoch: The current epoch; `scheduled` sets it.
        iterations_per_epoch: Outer iterations of an epoch.
    """

    title: ClassVar[str] = "MAML++"
    Options: ClassVar[type[LoopOptions]] = MAMLPlusPlusOptions

    multi_step_loss: bool = True
    learned_rates: bool = True
    first_order_epochs: int = 0
    epoch: int = 0
    iterations_per_epoch: int = 500

    @property
    def order(self) -> int:
        """First while the order is annealed."""
        return 1 if self.epoch < self.first_order_epochs else self.loop.order

    def init(self, generator: torch.Generator) -> Params:
        """Draw the network's parameters; all rates start at the rule's."""
        theta = self.loop.model.init(generator)
        if not self.learned_rates:
            return theta
        rate = torch.full((self.loop.steps + 1,), self.loop.rule.lr, device=generator.device)
        return {**theta, **{RATE + name: rate.clone() for name in self.loop.names(theta)}}

    def start(self, params: Params, support: Batch, *, base: Params) -> Start:
        """Begin at ``theta`` with the learned rates of every step."""
        if not self.learned_rates:
            return Start(base)
        tasks = support.x.shape[0]
        rates = {}
        for name in self.loop.names(base):
            table = params[RATE + name]
            rates[name] = table.view(1, -1, *(1,) * (base[name].dim() - 1)).expand(
                tasks, -1, *(1,) * (base[name].dim() - 1)
            )
        return Start(base, rates)

    def loss(self, fitted: Fitted, query: Batch) -> Float[Tensor, " task"]:
        """Return the weighted query losses after every step, or the last one alone."""
        if not self.multi_step_loss or self.loop.steps < 2:
            return self.loop.losses(fitted, query)
        after = self.loop.outputs(fitted, query.x, steps=range(1, self.loop.steps + 1))
        weights = step_weights(self.loop.steps, self.epoch)
        each = [w * self.loop.loss(out, query.y) for w, out in zip(weights, after, strict=True)]
        return torch.stack(each).sum(0)

    def scheduled(self, iteration: int) -> "MAMLPlusPlus":
        """Move to the epoch of ``iteration``."""
        return replace(self, epoch=iteration // self.iterations_per_epoch)
