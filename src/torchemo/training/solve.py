"""Some tasks of an outer step: adapted from leaves of their own, with one row of gradient each."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.tree import cat, detach, select, tree_map
from torchemo.core.types import Batch, Episode, Params, Recall, Start
from torchemo.learners.gradient.inner import task_gradients
from torchemo.learners.learner import Learner
from torchemo.memory.emo import EMO


class Solved(NamedTuple):
    """What adapting some tasks gives back to the outer loop; every tensor has their task axis.

    Attributes:
        losses: Outer losses.
        support_losses: Support losses before each inner step.
        theta: Rows of the outer gradient in the tasks' starts.
        rates: Rows in their rates.
        weights: Rows in their recall weights.
        aggregator: Gradient in the aggregator's parameters, summed over these tasks.
        values: What to remember of the tasks, unless it is their rows.
        statistics: Normalisation statistics seen at inner steps.
        inputs: Rows in the support and query inputs, where they were asked for.
    """

    losses: Float[Tensor, " task"]
    support_losses: Float[Tensor, "task step"]
    theta: Params
    rates: Params
    weights: Float[Tensor, "task m"] | None
    aggregator: list[Tensor]
    values: Params
    statistics: dict[int, Params]
    inputs: list[Tensor]


def solve(
    learner: Learner,
    start: Start,
    episode: Episode,
    *,
    emo: EMO | None = None,
    recall: Recall | None = None,
    inputs: Sequence[Tensor] = (),
) -> Solved:
    """Adapt some tasks from fresh leaves and differentiate their outer losses in these.

    Args:
        learner: The learner.
        start: Where the tasks begin.
        episode: The tasks.
        emo: The memory optimizer.
        recall: What it recalled for them.
        inputs: Leaves among the episode's inputs whose rows are wanted too.
    """
    fixed = set(learner.loop.model.buffers)
    theta = {n: t.detach() if n in fixed else _leaf(t) for n, t in start.theta.items()}
    rates = None if start.rates is None else {n: _leaf(r) for n, r in start.rates.items()}
    bound, weights = None, None
    shared: list[Tensor] = []
    if emo is not None and recall is not None:
        if recall.weights.requires_grad and not emo.consolidates:
            weights = _leaf(recall.weights)
            recall = recall._replace(weights=weights)
        bound = emo.bind(recall)
        shared = [p for p in emo.aggregator.parameters() if p.requires_grad]
    fresh = Start(theta, rates)
    adapted = learner.adapt(fresh, episode.support, bound=bound)
    query = None
    if emo is not None and emo.policy.content == "query":
        query = _query_gradient(learner, adapted.theta, episode.query)
    names = [n for n in theta if n not in fixed]
    rate_leaves = list((rates or {}).values())
    wanted = [theta[n] for n in names] + rate_leaves + ([] if weights is None else [weights])
    wanted += inputs
    losses, rows = learner.outer(fresh, adapted, episode.query, leaves=wanted + shared)
    values: Params = {}
    if emo is not None and emo.policy.content != "meta":
        values = emo.value(adapted.gradients, query=query, extra=adapted.extra_values)
    n, r, end = len(names), len(rate_leaves), len(wanted)
    return Solved(
        losses=losses,
        support_losses=adapted.losses,
        theta=dict(zip(names, rows[:n], strict=True)),
        rates=dict(zip(rates or {}, rows[n : n + r], strict=True)),
        weights=None if weights is None else rows[n + r],
        aggregator=rows[end:],
        values=values,
        statistics={step: detach(seen) for step, seen in (adapted.statistics or {}).items()},
        inputs=rows[end - len(inputs) : end],
    )


def start_of(start: Start, group: slice) -> Start:
    """Take where some of the tasks begin."""
    rates = None if start.rates is None else tree_map(lambda r: r[group], start.rates)
    return Start(tree_map(lambda t: t[group], start.theta), rates)


def tasks_of(episode: Episode, group: slice) -> Episode:
    """Take some of the tasks."""
    return Episode(
        Batch(episode.support.x[group], episode.support.y[group]),
        Batch(episode.query.x[group], episode.query.y[group]),
    )


def merge(parts: Sequence[Solved]) -> Solved:
    """Join tasks in order; what they share is summed in that order."""
    aggregator = [torch.stack(g).sum(0) for g in zip(*(p.aggregator for p in parts), strict=True)]
    weights = [p.weights for p in parts if p.weights is not None]
    return Solved(
        losses=torch.cat([p.losses for p in parts]),
        support_losses=torch.cat([p.support_losses for p in parts]),
        theta=cat([p.theta for p in parts]),
        rates=cat([p.rates for p in parts]),
        weights=torch.cat(weights) if weights else None,
        aggregator=aggregator,
        values=cat([p.values for p in parts]),
        statistics={s: cat([p.statistics[s] for p in parts]) for s in parts[0].statistics},
        inputs=[torch.cat(rows) for rows in zip(*(p.inputs for p in parts), strict=True)],
    )


def _query_gradient(learner: Learner, theta: Params, query: Batch) -> Params:
    """Differentiate the query loss at theta_S in theta_S itself."""
    end = tree_map(_leaf, theta)
    loop = learner.loop
    with torch.enable_grad():
        losses = loop.loss(loop.model.at(loop.steps)(end, query.x), query.y)
        return task_gradients(losses, select(end, loop.names(end)))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()
