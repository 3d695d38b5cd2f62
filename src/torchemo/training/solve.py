"""Some tasks of an outer step: fitted from leaves of their own, with one gradient per task."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.task_axis import join
from torchemo.core.tree import detach, leaf
from torchemo.core.types import Episode, Params, Recall, Start
from torchemo.learners.learner import Fitted, Learner, Stepwise, buffers_of, outer_rows
from torchemo.memory.bound import BoundMemory
from torchemo.memory.interface import TaskMemory


class Solved(NamedTuple):
    """What fitting some tasks gives back to the outer loop; every tensor has their task axis.

    Attributes:
        losses: Outer losses.
        support_losses: Support losses before each inner step.
        theta: Per-task gradients in the tasks' starts.
        rates: Per-task gradients in their rates.
        weights: Per-task gradients in their recall weights.
        inner: Gradient in the memory's parameters that inner steps use, summed over these tasks.
        values: What to remember of the tasks, unless it is their outer gradients.
        statistics: Normalisation statistics seen at inner steps.
        inputs: Per-task gradients in the support and query inputs, where they were asked for.
    """

    losses: Float[Tensor, " task"]
    support_losses: Float[Tensor, "task step"]
    theta: Params
    rates: Params
    weights: Float[Tensor, "task m"] | None
    inner: list[Tensor]
    values: Params
    statistics: dict[int, Params]
    inputs: list[Tensor]

    def shared_fields(self) -> tuple[str, ...]:
        """Name the fields without a task axis."""
        return ("inner",)


class Held(NamedTuple):
    """A memory and what it recalled for B tasks."""

    memory: TaskMemory
    recall: Recall

    def shared_fields(self) -> tuple[str, ...]:
        """Name the fields without a task axis."""
        return ("memory",)

    def bind(self) -> BoundMemory | None:
        """Hold the recall for an inner loop; None if the memory does not join inner steps."""
        return self.memory.bind(self.recall)


class _Leaves(NamedTuple):
    """Fresh leaves of some tasks, in the order in which they are differentiated."""

    theta: Params
    fixed: frozenset[str]
    rates: Params | None
    weights: Tensor | None
    inputs: Sequence[Tensor]
    inner: list[Tensor]

    @property
    def names(self) -> list[str]:
        return [name for name in self.theta if name not in self.fixed]

    def all(self) -> list[Tensor]:
        own = [self.theta[name] for name in self.names]
        weights = [] if self.weights is None else [self.weights]
        return [*own, *(self.rates or {}).values(), *weights, *self.inputs, *self.inner]


def solve(
    learner: Learner,
    start: Start,
    episode: Episode,
    *,
    held: Held | None = None,
    inputs: Sequence[Tensor] = (),
) -> Solved:
    """Fit some tasks from fresh leaves and differentiate their outer losses in these.

    Args:
        learner: The learner.
        start: Where the tasks begin.
        episode: The tasks.
        held: The memory with what it recalled for them.
        inputs: Leaves among the episode's inputs whose gradients are wanted too.
    """
    leaves, bound = _fresh(learner, start, held, inputs)
    fresh = Start(leaves.theta, leaves.rates)
    fitted = learner.fit(fresh, episode.support, memory=bound)
    values = _values(learner, held, fitted, episode)
    losses, rows = outer_rows(
        learner, fresh, fitted, episode.query, leaves=leaves.all(), base=episode.base
    )
    return _solved(leaves, losses, rows, fitted)._replace(values=values)


def merge(parts: Sequence[Solved]) -> Solved:
    """Join tasks in order; what they share is summed in that order."""
    inner = [torch.stack(g).sum(0) for g in zip(*(p.inner for p in parts), strict=True)]
    return join(parts)._replace(inner=inner)


def _fresh(
    learner: Learner, start: Start, held: Held | None, inputs: Sequence[Tensor]
) -> tuple[_Leaves, BoundMemory | None]:
    fixed = frozenset(buffers_of(learner))
    theta = {n: t.detach() if n in fixed else leaf(t) for n, t in start.theta.items()}
    rates = None if start.rates is None else {n: leaf(r) for n, r in start.rates.items()}
    bound, weights = None if held is None else held.bind(), None
    inner: list[Tensor] = []
    if held is not None and bound is not None:
        inner = list(held.memory.inner_parameters().values())
        if held.recall.weights.requires_grad:
            weights = leaf(held.recall.weights)
            bound = bound._replace(recall=held.recall._replace(weights=weights))
    return _Leaves(theta, fixed, rates, weights, inputs, inner), bound


def _values(learner: Learner, held: Held | None, fitted: Fitted, episode: Episode) -> Params:
    """Pick what to remember, unless it is the outer gradients, which are not known yet."""
    if held is None or held.memory.wants == "outer":
        return {}
    query = None
    if held.memory.wants == "query" and isinstance(learner, Stepwise):
        query = learner.query_gradient(fitted, episode.query)
    extra = fitted.extra_values
    return held.memory.value(fitted.gradients, path=fitted.path, query=query, extra=extra)


def _solved(leaves: _Leaves, losses: Tensor, rows: list[Tensor], fitted: Fitted) -> Solved:
    names, rates = leaves.names, leaves.rates or {}
    n, r = len(names), len(names) + len(rates)
    w = r + (leaves.weights is not None)
    end = w + len(leaves.inputs)
    seen = fitted.statistics or {}
    none = losses.new_zeros(len(losses), 0)
    return Solved(
        losses=losses,
        support_losses=none if fitted.support_losses is None else fitted.support_losses,
        theta=dict(zip(names, rows[:n], strict=True)),
        rates=dict(zip(rates, rows[n:r], strict=True)),
        weights=None if leaves.weights is None else rows[r],
        inner=rows[end:],
        values={},
        statistics={step: detach(statistics) for step, statistics in seen.items()},
        inputs=rows[w:end],
    )
