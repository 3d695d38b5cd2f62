"""A fast path for learners that adapt their head alone (ANIL): heads of several tasks in one call.

The trunk does not move in the inner loop, so a task's features are computed once, task by task. They become
leaves: the inner loop and the outer loss of a few tasks run on them in one call, and the gradients they get
are carried back through each task's trunk. Nothing depends on the number of workers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchemo.core.task_axis import join, take
from torchemo.core.tree import carried_back, leaf
from torchemo.core.types import Batch, Episode, Params, Start, Statistics
from torchemo.core.workers import run_tasks
from torchemo.learners.learner import HeadAlone, Learner, Stepwise, steps_of
from torchemo.models.alone import alone
from torchemo.training.distributed import ALONE, Team
from torchemo.training.solve import Held, Solved, merge, solve

CHUNK = 8
"""Tasks whose trunks are kept at once: bounds the memory."""


def head_learner(learner: Learner, held: Held | None) -> Learner | None:
    """Return the learner of the head alone; None if the trunk changes during the inner loop.

    It does so with running statistics, with queries normalised by the support set, and where a recall step
    moves the trunk before the first support gradient.
    """
    headed = learner.on_features() if isinstance(learner, HeadAlone) else None
    if headed is None or held is None or held.memory.opening(held.recall) is None:
        return headed
    return headed if set(held.recall.values) <= set(learner.model.head) else None


def solve_heads(
    learner: Learner,
    headed: Learner,
    start: Start,
    episode: Episode,
    *,
    held: Held | None = None,
    workers: int = 1,
    team: Team = ALONE,
) -> Solved:
    """Solve tasks as `solve` does one by one, with the heads of several tasks in one call.

    The ranks of a team share the trunks; heads are small, and every rank solves them all.
    """
    how: dict[str, Any] = {"workers": workers, "team": team}
    chunks = [
        _solve_chunk(learner, headed, *take((start, episode, held), chunk), **how)
        for chunk in _chunks(episode)
    ]
    return merge(chunks)


def _solve_chunk(
    learner: Learner,
    headed: Learner,
    start: Start,
    episode: Episode,
    held: Held | None,
    *,
    workers: int,
    team: Team,
) -> Solved:
    # First order: inner gradients are detached, so nothing flows through the support set.
    second, tasks = learner.traits.second_order, range(len(episode.support.x))
    trunks: dict[int, _Trunk] = {}

    def forward(b: int) -> tuple[Tensor, Tensor]:
        trunks[b] = _Trunk(learner, start, episode, b, second)
        return trunks[b].outputs

    outputs = team.share(lambda own: run_tasks(forward, own, workers=workers), tasks)
    f, q = (x.detach() for x in join(outputs))
    f, q = f.requires_grad_(second), q.requires_grad_()
    on_features = Episode(Batch(f, episode.support.y), Batch(q, episode.query.y))
    inputs = [f, q] if second else [q]
    solved = solve(headed, start, on_features, held=held, inputs=inputs)
    df, dq = (solved.inputs[0] if second else None), solved.inputs[-1]

    def back(b: int) -> Params:
        return trunks[b].rows(df, dq, b)

    rows = team.share(lambda own: run_tasks(back, own, workers=workers), tasks)
    return solved._replace(theta={**solved.theta, **join(rows)}, inputs=[])


def answer_heads(
    learner: Learner,
    headed: Learner,
    start: Start,
    episode: Episode,
    *,
    held: Held | None = None,
    steps: range,
    statistics: Statistics = "transductive",
    workers: int = 1,
) -> list[Tensor]:
    """Adapt the heads of B tasks without a graph; answer the queries after the given inner steps."""

    def features(begin: Start, part: Episode, b: int) -> tuple[Tensor, Tensor]:
        return _features(learner, begin, part, b, statistics)

    def one(chunk: slice) -> list[Tensor]:
        begin, part, own = take((start, episode, held), chunk)
        tasks = range(chunk.stop - chunk.start)
        f, q = join(run_tasks(lambda b: features(begin, part, b), tasks, workers=workers))
        bound = None if own is None else own.bind()
        fitted = headed.fit(
            begin, Batch(f, part.support.y), memory=bound, steps=steps[-1], graph=False
        )
        if not isinstance(headed, Stepwise):
            return [headed.predict(fitted, q)]
        return headed.predict_path(fitted, q, steps=steps)

    return join([one(chunk) for chunk in _chunks(episode)])


class _Trunk:
    """The trunk of one task, on its graph."""

    def __init__(
        self, learner: Learner, start: Start, episode: Episode, b: int, second: bool
    ) -> None:
        own, one = take((start.theta, episode), slice(b, b + 1))
        model, head = learner.model, set(learner.model.head)
        self.leaves = {n: leaf(t) for n, t in own.items() if n not in head}
        with torch.set_grad_enabled(second):
            support = model.at(0).features({**own, **self.leaves}, one.support.x)
        query = model.at(steps_of(learner)).features({**own, **self.leaves}, one.query.x)
        self.outputs = (support, query)

    def rows(self, df: Tensor | None, dq: Tensor, b: int) -> Params:
        """Carry the gradients of the features back to the trunk's tensors."""
        support, query = self.outputs
        ends = [(query, dq[b : b + 1])]
        if df is not None:
            ends.append((support, df[b : b + 1]))
        found = carried_back(ends, list(self.leaves.values()))
        return dict(zip(self.leaves, found, strict=True))


def _features(
    learner: Learner, start: Start, episode: Episode, b: int, statistics: Statistics
) -> tuple[Tensor, Tensor]:
    own, one = take((start.theta, episode), slice(b, b + 1))
    support = learner.model.at(0, stored=True).features(own, one.support.x)
    last, step = learner.model, steps_of(learner)
    if statistics == "inductive":
        last, own = alone(last, own, one.support.x, step=step)
    else:
        last = last.at(step, stored=True)
    return support, last.features(own, one.query.x)


def _chunks(episode: Episode) -> Sequence[slice]:
    tasks = episode.support.x.shape[0]
    return [slice(b, min(b + CHUNK, tasks)) for b in range(0, tasks, CHUNK)]
