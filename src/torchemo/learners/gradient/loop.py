"""The inner loop as a learner configures it: network, loss, rule, steps, adapted tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy, mean_squared_error
from torchemo.core.types import Batch, Loss, Model, Params, Start, TaskShape
from torchemo.learners.gradient.inner import (
    RULES,
    SGD,
    Adam,
    Forward,
    Rule,
    adapt,
    descend,
    rate_at,
)
from torchemo.learners.learner import Fitted, answering
from torchemo.memory.interface import BoundMemory
from torchemo.models.alone import Answering


@final
@dataclass(frozen=True)
class InnerLoop:
    """Everything the inner loop of B tasks needs besides its start.

    Args:
        model: The network.
        loss: Per-task loss; the inner and the outer loop share it.
        rule: Step rule, with the inner rate alpha on the *mean* support loss.
        steps: S, inner steps while training.
        order: 2 = exact meta-gradient, 1 = gradients detached.
        adapts: Which tensors move: ``all``, the ``head`` (ANIL) or the ``body`` (BOIL).
        adapt_bn: Whether scale and shift of normalisation layers move too (A26).
        loss_scale: Factor of the inner loss; n_way gives the summed convention of the first published
            code, where a rate of 0.01 is 0.01 n_way on a mean loss (A11).
    """

    model: Model
    loss: Loss = cross_entropy
    rule: Rule = field(default_factory=SGD)
    steps: int = 5
    order: int = 2
    adapts: Literal["all", "head", "body"] = "all"
    adapt_bn: bool = False
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ConfigError(f"inner steps should be 0 or more, got {self.steps}.")
        if self.order not in (1, 2):
            raise ConfigError(f"order should be 1 or 2, got {self.order}.")
        if self.adapts not in ("all", "head", "body"):
            raise ConfigError(f"adapts should be all, head or body, got '{self.adapts}'.")

    def names(self, theta: Params) -> list[str]:
        """Names of the adapted tensors among those of ``theta``."""
        head = set(self.model.head)
        if self.adapts != "all" and not head <= theta.keys():
            raise ConfigError(
                f"the head {sorted(head)} is not among the model's tensors {sorted(theta)}.",
                hint="Name the head tensors as the model does.",
            )
        fixed = set(self.model.buffers) | (set() if self.adapt_bn else set(self.model.norm))
        wanted = {"all": theta.keys(), "head": head, "body": theta.keys() - head}[self.adapts]
        return [name for name in theta if name in wanted and name not in fixed]

    def run(
        self,
        start: Start,
        support: Batch,
        *,
        memory: BoundMemory | None = None,
        steps: int | None = None,
        order: int | None = None,
        minibatch: int | None = None,
    ) -> Fitted:
        """Adapt B tasks.

        Args:
            start: Where they begin.
            support: Their support sets.
            memory: A memory with their recall.
            steps: Inner steps, by default those of training.
            order: 2, 1, or 0 for evaluation: no graph, stored normalisation statistics.
            minibatch: Use this many support examples per step, taken in turn.
        """
        order = self.order if order is None else order
        start = self.opened(start, memory)
        statistics: dict[int, Params] = {}
        forward, inputs = self._forward(start, support, statistics, order)
        fitted = adapt(
            forward,
            start,
            inputs if minibatch is None else lambda s: _minibatch(inputs, s, minibatch),
            loss=lambda out, y: self.loss_scale * self.loss(out, y),
            rule=self.rule,
            steps=self.steps if steps is None else steps,
            names=self.names(start.theta),
            order=order,
            direction=None if memory is None else memory.direction,
        )
        return fitted._replace(support_x=support.x, statistics=statistics, evaluation=order == 0)

    def _forward(
        self, start: Start, support: Batch, statistics: dict[int, Params], order: int
    ) -> tuple[Forward, Batch]:
        """Return what an inner step calls, and on which inputs."""
        if self.adapts != "head":
            return self._network(statistics, stored=order == 0), support
        # The trunk does not move: one forward pass serves all steps. Nothing flows back through it
        # unless the gradients of the steps are on the graph.
        with torch.set_grad_enabled(order == 2):
            trunk = self._at(0, statistics, stored=order == 0)
            features = trunk.features(start.theta, support.x)
        return self._head, Batch(features, support.y)

    def outputs(self, fitted: Fitted, x: Tensor, *, steps: Sequence[int]) -> list[Tensor]:
        """Answer ``x`` with the parameters after each of the given numbers of inner steps."""
        if self.adapts == "head":
            # The trunk is the same at every step.
            trunk, params = self._answering(fitted, max(steps), fitted.path[0])
            features = trunk.features(params, x)
            return [self.model.classify(fitted.path[s], features) for s in steps]
        networks = (self._answering(fitted, s, fitted.path[s]) for s in steps)
        return [network(params, x) for network, params in networks]

    def _answering(self, fitted: Fitted, step: int, params: Params) -> Answering:
        """Return the network after inner step ``step`` and its parameters, as queries meet them."""
        found = answering(self.model, fitted, params, step=step)
        if found is not None:
            return found
        seen = {} if fitted.statistics is None else fitted.statistics
        return self._at(step, seen, stored=fitted.evaluation), params

    def losses(self, fitted: Fitted, query: Batch) -> Float[Tensor, " task"]:
        """Return each task's query loss after the last step."""
        last = len(fitted.path) - 1
        return self.loss(self.outputs(fitted, query.x, steps=[last])[0], query.y)

    def opened(self, start: Start, memory: BoundMemory | None) -> Start:
        """Take the memory's recall step, if there is one, before the first support gradient."""
        opening = None if memory is None else memory.opening()
        if opening is None:
            return start
        known = {name: step for name, step in opening.items() if name in start.theta}
        rates = rate_at(start.rates, 0)
        return start._replace(theta=descend(start.theta, known, lr=self.rule.lr, rates=rates))

    def _network(self, statistics: dict[int, Params], *, stored: bool) -> Forward:
        return lambda theta, x, step: self._at(step, statistics, stored=stored)(theta, x)

    def _at(self, step: int, statistics: dict[int, Params], *, stored: bool) -> Model:
        """Return the network of an inner step, noting its batch statistics if it averages them."""
        if stored or not self.model.buffers or step in statistics:
            return self.model.at(step, stored=stored)
        return self.model.at(step, sink=statistics.setdefault(step, {}))

    def _head(self, theta: Params, features: Tensor, step: int) -> Tensor:
        return self.model.classify(theta, features)


@dataclass(frozen=True)
class LoopOptions:
    """Options of every learner with an inner loop."""

    inner_lr: float = 0.05
    """alpha, on the mean support loss (A11). The paper prints 0.001."""
    steps: int = 5
    """Inner steps while training."""
    rule: Literal["sgd", "momentum", "adam"] = "sgd"
    """Inner step rule."""
    order: Literal[1, 2] = 2
    """2 keeps the exact meta-gradient; 1 detaches inner gradients."""
    adapt_bn: bool = False
    """Adapt scale and shift of normalisation layers too (A26)."""
    inner_loss: Literal["mean", "sum", "n_way"] = "mean"
    """Reduction of the inner loss over the support set; n_way: n_way times the mean, as in the first
    published code (A11). A memory stores gradients of the same loss."""

    def __post_init__(self) -> None:
        if not 0 < self.inner_lr < math.inf:
            raise ConfigError(f"learner.inner_lr should be above 0, got {self.inner_lr}.")

    def loop(
        self,
        model: Model,
        tasks: TaskShape,
        *,
        adapts: Literal["all", "head", "body"] = "all",
        order: int | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> InnerLoop:
        """Make the inner loop for such tasks.

        Args:
            model: The network.
            tasks: What the tasks look like.
            adapts: Which tensors move.
            order: Order of the meta-gradient; that of the options by default.
            betas: Decay rates of the rule ``adam``.
        """
        scales = {"mean": 1.0, "sum": float(tasks.support), "n_way": float(tasks.n_out)}
        adam = self.rule == "adam"
        return InnerLoop(
            model,
            loss=cross_entropy if tasks.kind == "classification" else mean_squared_error,
            rule=Adam(lr=self.inner_lr, betas=betas) if adam else RULES[self.rule](self.inner_lr),
            steps=self.steps,
            order=self.order if order is None else order,
            adapts=adapts,
            adapt_bn=self.adapt_bn,
            loss_scale=scales[self.inner_loss],
        )

    def own(self) -> dict[str, Any]:
        """Return the options that a learner has beyond these, by name."""
        shared = {option.name for option in fields(LoopOptions)}
        return {o.name: getattr(self, o.name) for o in fields(self) if o.name not in shared}


def _minibatch(support: Batch, step: int, size: int) -> Batch:
    """Take ``size`` examples in turn; support sets are already in random order."""
    n = support.x.shape[1]
    chosen = (torch.arange(size) + step * size) % n
    return Batch(support.x[:, chosen], support.y[:, chosen])
