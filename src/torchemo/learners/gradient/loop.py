"""The inner loop as a learner configures it: network, loss, rule, steps, adapted tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy
from torchemo.core.types import Batch, Loss, Model, Params, Start
from torchemo.learners.gradient.inner import SGD, Adapted, Forward, Rule, adapt, descend, rate_at
from torchemo.memory.emo import Bound
from torchemo.models.norm import predict_with_support


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
        bound: Bound | None = None,
        steps: int | None = None,
        order: int | None = None,
        minibatch: int | None = None,
    ) -> Adapted:
        """Adapt B tasks.

        Args:
            start: Where they begin.
            support: Their support sets.
            bound: EMO with their recall.
            steps: Inner steps, by default those of training.
            order: 2, 1, or 0 for evaluation: no graph, stored normalisation statistics.
            minibatch: Use this many support examples per step, taken in turn.
        """
        steps = self.steps if steps is None else steps
        order = self.order if order is None else order
        start = self.opened(start, bound)
        statistics: dict[int, Params] = {}
        forward: Forward = self._network(statistics, stored=order == 0)
        inputs = support
        if self.adapts == "head":
            # The trunk does not move: one forward pass serves all steps. Nothing flows back through it
            # unless the gradients of the steps are on the graph.
            with torch.set_grad_enabled(order == 2):
                features = self._at(0, statistics, stored=order == 0).features(
                    start.theta, support.x
                )
            forward, inputs = self._head, Batch(features, support.y)
        adapted = adapt(
            forward,
            start,
            inputs if minibatch is None else lambda s: _minibatch(inputs, s, minibatch),
            loss=lambda out, y: self.loss_scale * self.loss(out, y),
            rule=self.rule,
            steps=steps,
            names=self.names(start.theta),
            order=order,
            direction=None if bound is None else bound.direction,
        )
        return adapted._replace(support_x=support.x, statistics=statistics, evaluation=order == 0)

    def outputs(self, adapted: Adapted, x: Tensor, *, steps: Sequence[int]) -> list[Tensor]:
        """Answer ``x`` with the parameters after each of the given numbers of inner steps."""
        if (
            getattr(self.model, "bn", None) == "per_query_with_support"
            and adapted.support_x is not None
        ):
            return [
                predict_with_support(self.model, adapted.path[s], adapted.support_x, x)
                for s in steps
            ]
        stored, seen = adapted.evaluation, adapted.statistics
        seen = {} if seen is None else seen
        if self.adapts == "head":
            trunk = self._at(max(steps), seen, stored=stored)
            features = trunk.features(adapted.path[0], x)
            return [self.model.classify(adapted.path[s], features) for s in steps]
        network = self._network(seen, stored=stored)
        return [network(adapted.path[s], x, s) for s in steps]

    def losses(self, adapted: Adapted, query: Batch) -> Float[Tensor, " task"]:
        """Return each task's query loss after the last step."""
        last = len(adapted.path) - 1
        return self.loss(self.outputs(adapted, query.x, steps=[last])[0], query.y)

    def opened(self, start: Start, bound: Bound | None) -> Start:
        """Take EMO's recall step, if there is one, before the first support gradient."""
        opening = None if bound is None else bound.opening()
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


def _minibatch(support: Batch, step: int, size: int) -> Batch:
    """Take ``size`` examples in turn; support sets are already in random order."""
    n = support.x.shape[1]
    chosen = (torch.arange(size) + step * size) % n
    return Batch(support.x[:, chosen], support.y[:, chosen])
