"""The inner loop as a learner configures it: network, loss, rule, steps, adapted tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy, mean_squared_error
from torchemo.core.tree import leaf, select, tree_map
from torchemo.core.types import Batch, Loss, Model, Params, Start, TaskShape
from torchemo.learners.curvature import check_loss, factors, roots, steady
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
from torchemo.memory.bound import BoundMemory
from torchemo.models.alone import Answering
from torchemo.models.outputs import with_outputs


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
        shared_row: All classes begin with the same row of the head, the mean of the learned ones.
        visits: In training, a support set is taken as so many visits of its task
            (`torchemo.learners.returning`).
    """

    model: Model
    loss: Loss = cross_entropy
    rule: Rule = field(default_factory=SGD)
    steps: int = 5
    order: int = 2
    adapts: Literal["all", "head", "body"] = "all"
    adapt_bn: bool = False
    loss_scale: float = 1.0
    shared_row: bool = False
    visits: int = 1

    def __post_init__(self) -> None:
        if self.visits < 1:
            raise ConfigError(f"learner.visits should be 1 or more, got {self.visits}.")
        if self.steps < 0:
            raise ConfigError(f"inner steps should be 0 or more, got {self.steps}.")
        if self.order not in (1, 2):
            raise ConfigError(f"order should be 1 or 2, got {self.order}.")
        if self.adapts not in ("all", "head", "body"):
            raise ConfigError(f"adapts should be all, head or body, got '{self.adapts}'.")

    def for_classes(self, n_way: int) -> "InnerLoop":
        """Return this loop for tasks of ``n_way`` classes."""
        return replace(self, model=with_outputs(self.model, n_way))

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
        """Return each task's query loss after the last step, on average over its visits."""
        each = [
            self.loss(self.outputs(one, query.x, steps=[len(one.path) - 1])[0], query.y)
            for one in (*fitted.earlier, fitted)
        ]
        return each[0] if len(each) == 1 else torch.stack(each).mean(0)

    def followed(self, fitted: Fitted, support: Batch, *, rates: Params | None = None) -> Params:
        """Return gradient, anchor and Gauss-Newton factors half-way along the path of B tasks.

        Half-way, because visits of a task begin at the same parameters and then part.

        Args:
            fitted: The tasks.
            support: Their support sets.
            rates: Their own rates, if they have any.

        Returns:
            ``{name: [B, 1, 2 + factors, *shape]}``, see `torchemo.memory.values`.
        """
        check_loss(self.loss)
        step = (len(fitted.path) - 1) // 2
        theta = tree_map(leaf, fitted.path[step])
        moving, slopes = select(theta, self.names(theta)), fitted.gradients[step]
        with torch.enable_grad():
            forward, inputs = self._forward(Start(theta), support, {}, 0)
            rows = roots(forward(theta, inputs.x, step), inputs.y)
            bends = factors(rows, moving, scale=self.loss_scale)
        own = rate_at(rates, step) or {}
        bends = steady(
            bends, {n: own.get(n, t.new_full((len(t),), self.rule.lr)) for n, t in moving.items()}
        )
        ends = {n: torch.stack((slopes[n], at.detach()), 1) for n, at in moving.items()}
        return {n: torch.cat((ends[n], bends[n]), 1)[:, None] for n in moving}

    def opened(self, start: Start, memory: BoundMemory | None) -> Start:
        """Share the rows of the head, and take the memory's recall step, where there are such things."""
        if self.shared_row:
            start = self._with_shared_row(start)
        opening = None if memory is None else memory.opening()
        if opening is None:
            return start
        known = {name: step for name, step in opening.items() if name in start.theta}
        rates = rate_at(start.rates, 0)
        return start._replace(theta=descend(start.theta, known, lr=self.rule.lr, rates=rates))

    def _with_shared_row(self, start: Start) -> Start:
        """Give all classes the same row of the head, and the same rates.

        Labels come in random order, so that no row can know its class; but rows that differ make stored
        gradients depend on the order of labels.
        """
        head = self.model.head
        rates = start.rates and {
            n: _even(r, axis=2) if n in head else r for n, r in start.rates.items()
        }
        theta = {n: _even(t, axis=1) if n in head else t for n, t in start.theta.items()}
        return start._replace(theta=theta, rates=rates)

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
    shared_row: bool = False
    """All classes begin with the same row of the head (Ye and Chao, ICLR 2022). Recalled gradients of tasks
    that come back then fit whatever the order of labels."""
    visits: int = 1
    """Train for tasks that come back: the support set is taken as so many visits of its task, and each one
    recalls the gradients of those before. At use a support set is one visit. data.n_shot counts the
    examples of all visits."""

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
            shared_row=self.shared_row,
            visits=self.visits,
        )

    def own(self) -> dict[str, Any]:
        """Return the options that a learner has beyond these, by name."""
        shared = {option.name for option in fields(LoopOptions)}
        return {o.name: getattr(self, o.name) for o in fields(self) if o.name not in shared}


def _even(tensor: Tensor, *, axis: int) -> Tensor:
    """Replace rows by their mean; a rate that all of them share stays."""
    if tensor.dim() <= axis or tensor.shape[axis] == 1:
        return tensor
    return tensor.mean(axis, keepdim=True).expand_as(tensor)


def _minibatch(support: Batch, step: int, size: int) -> Batch:
    """Take ``size`` examples in turn; support sets are already in random order."""
    n = support.x.shape[1]
    chosen = (torch.arange(size, device="cpu") + step * size) % n
    return Batch(support.x[:, chosen], support.y[:, chosen])
