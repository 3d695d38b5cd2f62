"""Learners that adapt their head alone (ANIL): trunks task by task, heads of several tasks at once.

The trunk does not move in the inner loop, so a task's features are computed once. They become leaves: the
inner loop and the outer loss of a few tasks run on them in one call, and the rows they get are carried back
through each task's trunk. Nothing depends on the number of workers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast, final

import torch
from torch import Generator, Tensor

from torchemo.core.types import Batch, Episode, Model, Params, Recall, Start
from torchemo.core.workers import run_tasks
from torchemo.learners.learner import Learner
from torchemo.memory.emo import EMO
from torchemo.memory.recall import slice_recall
from torchemo.training.solve import Solved, merge, solve, start_of, tasks_of

CHUNK = 8
"""Tasks whose trunks are kept at once: bounds the memory."""

T = TypeVar("T")


@final
@dataclass(frozen=True)
class OnFeatures:
    """A network whose inputs are the features of another one: what is left of it is the head."""

    network: Model

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the head's tensors."""
        return self.network.head

    @property
    def norm(self) -> tuple[str, ...]:
        """Names of scales and shifts, which it does not use."""
        return self.network.norm

    @property
    def buffers(self) -> tuple[str, ...]:
        """Nothing is averaged."""
        return ()

    def init(self, generator: Generator) -> Params:
        """Draw the parameters of the whole network."""
        return self.network.init(generator)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Apply the head."""
        return self.classify(params, x)

    def features(self, params: Params, x: Tensor) -> Tensor:
        """Return the inputs."""
        return x

    def classify(self, params: Params, features: Tensor) -> Tensor:
        """Apply the head."""
        return self.network.classify(params, features)

    def at(self, step: int, *, stored: bool = False, sink: Params | None = None) -> "OnFeatures":
        """Return this network: a head is the same at every step."""
        return self


def separable(learner: Learner, emo: EMO | None, recall: Recall | None) -> bool:
    """Tell whether the trunk is one and the same function during the whole inner loop.

    Not so with running statistics, with queries normalised by the support set, and where a recall step
    moves the trunk before the first support gradient.
    """
    model = learner.loop.model
    plain = not model.buffers and getattr(model, "bn", None) != "per_query_with_support"
    # A learner over another one (BMG) has no loop of its own, and its target moves the trunk.
    own = is_dataclass(learner) and any(field.name == "loop" for field in fields(learner))
    if learner.loop.adapts != "head" or not plain or not own:
        return False
    if emo is None or recall is None or emo.policy.recall_step == "off":
        return True
    return set(recall.values) <= set(model.head)


def on_features(learner: Learner) -> Learner:
    """Return the learner of the head alone."""
    loop = replace(learner.loop, model=OnFeatures(learner.loop.model))
    return cast(Learner, replace(cast(Any, learner), loop=loop))


def solve_heads(
    learner: Learner,
    start: Start,
    episode: Episode,
    *,
    emo: EMO | None = None,
    recall: Recall | None = None,
    workers: int = 1,
) -> Solved:
    """As `solve.solve` for the tasks one by one, with the heads of several tasks in one call.

    Args:
        learner: A learner that is `separable`.
        start: Where the tasks begin.
        episode: The tasks.
        emo: The memory optimizer.
        recall: What it recalled for them.
        workers: Threads that share the trunks.
    """
    headed, second = on_features(learner), learner.loop.order == 2

    def one(chunk: slice) -> Solved:
        part, begin = tasks_of(episode, chunk), start_of(start, chunk)
        trunks = _each(chunk, lambda b: _Trunk(learner, begin, part, b, second), workers)
        f, q = (
            torch.cat(parts).detach() for parts in zip(*(t.outputs for t in trunks), strict=True)
        )
        f, q = f.requires_grad_(second), q.requires_grad_()
        inputs = [f, q] if second else [q]
        solved = solve(
            headed,
            begin,
            Episode(Batch(f, part.support.y), Batch(q, part.query.y)),
            emo=emo,
            recall=None if recall is None else slice_recall(recall, chunk),
            inputs=inputs,
        )
        df, dq = (solved.inputs[0] if second else None), solved.inputs[-1]
        rows = _each(chunk, lambda b: trunks[b].rows(df, dq, b), workers)
        body = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        return solved._replace(theta={**solved.theta, **body}, inputs=[])

    return merge([one(chunk) for chunk in _chunks(episode)])


def answer_heads(
    learner: Learner,
    start: Start,
    episode: Episode,
    *,
    emo: EMO | None = None,
    recall: Recall | None = None,
    shown: range,
    workers: int = 1,
) -> list[Tensor]:
    """Adapt the heads of B tasks without a graph; answer the queries after the inner steps ``shown``."""
    headed = on_features(learner)

    def one(chunk: slice) -> list[Tensor]:
        part, begin = tasks_of(episode, chunk), start_of(start, chunk)
        trunks = _each(chunk, lambda b: _features(learner, begin, part, b), workers)
        f, q = (torch.cat(parts) for parts in zip(*trunks, strict=True))
        bound = None
        if emo is not None and recall is not None:
            bound = emo.bind(slice_recall(recall, chunk))
        support = Batch(f, part.support.y)
        adapted = headed.adapt(begin, support, bound=bound, steps=shown[-1], order=0)
        return headed.loop.outputs(adapted, q, steps=shown)

    answers = [one(chunk) for chunk in _chunks(episode)]
    return [torch.cat(step) for step in zip(*answers, strict=True)]


class _Trunk:
    """The trunk of one task, on its graph."""

    def __init__(
        self, learner: Learner, start: Start, episode: Episode, b: int, second: bool
    ) -> None:
        head, own = set(learner.loop.model.head), start_of(start, slice(b, b + 1)).theta
        self.leaves = {n: t.detach().requires_grad_() for n, t in own.items() if n not in head}
        one = tasks_of(episode, slice(b, b + 1))
        model = learner.loop.model
        # First order: inner gradients are detached, so nothing flows through the support set.
        with torch.set_grad_enabled(second):
            support = model.at(0).features({**own, **self.leaves}, one.support.x)
        query = model.at(learner.loop.steps).features({**own, **self.leaves}, one.query.x)
        self.outputs = (support, query)

    def rows(self, df: Tensor | None, dq: Tensor, b: int) -> Params:
        """Carry the rows of the features back to the trunk's tensors."""
        support, query = self.outputs
        ends = [(query, dq[b : b + 1])]
        if df is not None:
            ends.append((support, df[b : b + 1]))
        found = torch.autograd.grad(
            [end for end, _ in ends],
            list(self.leaves.values()),
            [row for _, row in ends],
            allow_unused=True,
        )
        return {
            name: torch.zeros_like(leaf) if row is None else row
            for (name, leaf), row in zip(self.leaves.items(), found, strict=True)
        }


def _features(learner: Learner, start: Start, episode: Episode, b: int) -> tuple[Tensor, Tensor]:
    own, one = start_of(start, slice(b, b + 1)).theta, tasks_of(episode, slice(b, b + 1))
    model = learner.loop.model
    support = model.at(0, stored=True).features(own, one.support.x)
    return support, model.at(learner.loop.steps, stored=True).features(own, one.query.x)


def _each(chunk: slice, work: Callable[[int], T], workers: int) -> list[T]:
    return run_tasks(work, range(chunk.stop - chunk.start), workers=workers)


def _chunks(episode: Episode) -> Sequence[slice]:
    tasks = episode.support.x.shape[0]
    return [slice(b, min(b + CHUNK, tasks)) for b in range(0, tasks, CHUNK)]
