"""Evaluation on fixed tasks: the memory is read, never written (Algorithm 2)."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.losses import accuracy
from torchemo.core.types import Episode, Params
from torchemo.learners.learner import Learner
from torchemo.memory.emo import EMO
from torchemo.training.step import look_up, predict


class Scores(NamedTuple):
    """Per-task results on fixed tasks.

    Attributes:
        loss: Query loss after 0, 1, ..., S inner steps, or after the last.
        accuracy: Share of right answers after each step, or None for regression.
        domain: Where the tasks come from, -1 if unknown.
        episode: Which episodes they are.
    """

    loss: Float[Tensor, "task step"]
    accuracy: Float[Tensor, "task step"] | None
    domain: Int[Tensor, " task"]
    episode: Int[Tensor, " task"]


def evaluate(
    learner: Learner,
    params: Params,
    episodes: Iterable[Episode],
    *,
    emo: EMO | None = None,
    steps: int | None = None,
    every_step: bool = True,
    batched: bool | None = None,
    workers: int = 1,
) -> Scores:
    """Adapt to every task and score its queries after every inner step.

    Args:
        learner: The learner.
        params: Its meta-parameters.
        episodes: Batches of tasks.
        emo: The memory optimizer; it is put into eval mode for the time being.
        steps: Inner steps, by default those of training.
        every_step: Score after every inner step; else after the last alone, in one column.
        batched: Run each batch of tasks in one call; None: see `torchemo.training.step.runs_together`.
        workers: Threads that share the tasks of a batch otherwise.
    """
    training = emo.training if emo is not None else False
    if emo is not None:
        emo.eval()
    try:
        parts = []
        for episode in episodes:
            answers = predict(
                learner,
                params,
                episode,
                emo=emo,
                steps=steps,
                every_step=every_step,
                batched=batched,
                workers=workers,
            )
            parts.append(_score(learner, episode, answers))
    finally:
        if emo is not None:
            emo.train(training)
    accuracies = [part.accuracy for part in parts if part.accuracy is not None]
    return Scores(
        loss=torch.cat([part.loss for part in parts]),
        accuracy=torch.cat(accuracies) if accuracies else None,
        domain=torch.cat([part.domain for part in parts]),
        episode=torch.cat([part.episode for part in parts]),
    )


def evaluate_trust(
    learner: Learner,
    params: Params,
    episodes: Sequence[Episode],
    *,
    emo: EMO,
    batched: bool | None = None,
    workers: int = 1,
) -> Scores:
    """Judge the slots of a memory by tasks of other classes than those of training (`torchemo.memory.trust`).

    Args:
        learner: The learner.
        params: Its meta-parameters.
        episodes: Batches of validation tasks.
        emo: The memory optimizer; its judgement of its slots is the one thing that changes.
        batched: Run each batch of tasks in one call; None: see `torchemo.training.step.runs_together`.
        workers: Threads that share the tasks of a batch otherwise.

    Returns:
        Scores after the last step, of every task with or without its recall, as it will be evaluated.
    """
    if emo.trust is None:
        raise ConfigError("this EMO trusts all of its slots.", hint="Pass trust=Trust(...).")
    emo.trust.doubted.zero_()
    given, alone = (
        evaluate(
            learner,
            params,
            episodes,
            emo=memory,
            every_step=False,
            batched=batched,
            workers=workers,
        )
        for memory in (emo, None)
    )
    training = emo.training
    emo.eval()
    try:
        recalls = [look_up(learner, params, episode, emo=emo) for episode in episodes]
    finally:
        emo.train(training)
    if not recalls[0].m:  # nothing is remembered yet
        return given
    slots = torch.cat([recall.slots for recall in recalls])
    weights = torch.cat([recall.weights for recall in recalls])
    emo.trust.judge(slots, weights, _points(given) - _points(alone))
    active = emo.trust(slots, weights)[:, None]
    right = given.accuracy
    if right is not None and alone.accuracy is not None:
        right = torch.where(active, right, alone.accuracy)
    return given._replace(loss=torch.where(active, given.loss, alone.loss), accuracy=right)


def _points(scores: Scores) -> Float[Tensor, " task"]:
    """Higher is better: the share of right answers, or minus the squared error."""
    return -scores.loss[:, -1] if scores.accuracy is None else scores.accuracy[:, -1]


def batches(
    sample: Callable[[int, int], Episode], *, tasks: int, size: int = 4
) -> Iterable[Episode]:
    """Cut episodes 0 .. ``tasks`` - 1 of a sampler ``(start, count) -> Episode`` into batches."""
    return (sample(start, min(size, tasks - start)) for start in range(0, tasks, size))


def _score(learner: Learner, episode: Episode, answers: list[Tensor]) -> Scores:
    y = episode.query.y
    tasks = y.shape[0]
    right = None
    if not y.is_floating_point():
        right = torch.stack([accuracy(out, y) for out in answers], 1)
    unknown = torch.full((tasks,), -1)
    return Scores(
        loss=torch.stack([learner.loop.loss(out, y) for out in answers], 1),
        accuracy=right,
        domain=unknown if episode.domain is None else episode.domain,
        episode=unknown if episode.index is None else episode.index,
    )
