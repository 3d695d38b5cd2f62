"""Evaluation on fixed tasks: the memory is read, never written (Algorithm 2).

Example:
    >>> from torchemo.core.losses import task_loss
    >>> from torchemo.core.rng import generator_for
    >>> from torchemo.core.types import Batch
    >>> from torchemo.learners.gradient.loop import InnerLoop
    >>> from torchemo.learners.gradient.maml import MAML
    >>> from torchemo.models import MLP
    >>> x = torch.rand(2, 10, 1)  # two regression tasks of ten points
    >>> episode = Episode(Batch(x, x.sin()), Batch(x, x.sin()))
    >>> learner = MAML(InnerLoop(MLP(), loss=task_loss, steps=3))
    >>> evaluate(learner, learner.init(generator_for(0)), [episode]).loss.shape
    torch.Size([2, 4])
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.losses import accuracy, task_loss
from torchemo.core.task_axis import join
from torchemo.core.types import Episode, Params, Recall, Statistics
from torchemo.learners.learner import Learner
from torchemo.memory.interface import TaskMemory
from torchemo.training.distributed import ALONE, Team
from torchemo.training.predict import Prediction, predict


class Scores(NamedTuple):
    """Per-task results on fixed tasks, on the host.

    Attributes:
        loss: Query loss after 0, 1, ..., S inner steps, or after the last.
        accuracy: Share of right answers after each step, or None for regression.
        domain: Where the tasks come from, -1 if unknown.
        episode: Which episodes they are.
        recalled: Whether each task used its recall; None without a memory.
    """

    loss: Float[Tensor, "task step"]
    accuracy: Float[Tensor, "task step"] | None
    domain: Int[Tensor, " task"]
    episode: Int[Tensor, " task"]
    recalled: Bool[Tensor, " task"] | None = None


def evaluate(
    learner: Learner,
    params: Params,
    episodes: Iterable[Episode],
    *,
    memory: TaskMemory | None = None,
    steps: int | None = None,
    every_step: bool = True,
    statistics: Statistics = "transductive",
    batched: bool | None = None,
    workers: int = 1,
    team: Team = ALONE,
) -> Scores:
    """Adapt to every task and score its queries after every inner step.

    Args:
        learner: The learner.
        params: Its meta-parameters.
        episodes: Batches of tasks.
        memory: The memory; it is put into eval mode for the time being.
        steps: Inner steps, by default those of training.
        every_step: Score after every inner step; else after the last alone, in one column.
        statistics: Answer each query by itself, or together; see `torchemo.training.predict.predict`.
        batched: Run each batch of tasks in one call; None: see `torchemo.training.predict.runs_together`.
        workers: Threads that share the tasks of a batch otherwise.
        team: Processes that share the batches; all of them return all scores.
    """
    how: dict[str, Any] = {"steps": steps, "every_step": every_step, "statistics": statistics}
    how |= {"batched": batched, "workers": workers, "team": team}
    return join([scores for scores, _ in _scored(learner, params, episodes, memory, **how)])


def _scored(
    learner: Learner,
    params: Params,
    episodes: Iterable[Episode],
    memory: TaskMemory | None,
    *,
    team: Team = ALONE,
    **how: Any,
) -> list[tuple[Scores, Recall | None]]:
    """Score batches of tasks, and keep which slots were recalled for them."""

    def score(episode: Episode) -> tuple[Scores, Recall | None]:
        given = predict(learner, params, episode, memory=memory, **how)
        recall = given.recall
        # Values are large, and are not asked for again.
        kept = recall if recall is None else recall._replace(values={}, slot_keys=None)
        return _score(episode, given), kept

    def every(own: Sequence[int]) -> list[list[tuple[Scores, Recall | None]]]:
        """Score every n-th batch; batches are drawn one by one, as all of them may not fit in memory."""
        return [
            [score(episode) for i, episode in enumerate(episodes) if i % team.size == rank]
            for rank in own
        ]

    with _reading(memory):
        dealt = team.share(every, range(team.size))
    batches_in_all = sum(len(found) for found in dealt)
    return [dealt[i % team.size][i // team.size] for i in range(batches_in_all)]


@contextmanager
def _reading(memory: TaskMemory | None) -> Iterator[None]:
    """Put a memory into eval mode for the time being."""
    training = memory is not None and memory.training
    if memory is not None:
        memory.eval()
    try:
        yield
    finally:
        if memory is not None:
            memory.train(training)


def judge_slots(
    learner: Learner,
    params: Params,
    episodes: Sequence[Episode],
    *,
    memory: TaskMemory,
    batched: bool | None = None,
    workers: int = 1,
    team: Team = ALONE,
) -> Scores:
    """Judge the slots of a memory by tasks of new classes (`torchemo.memory.selective.SkipUnhelpful`).

    Args:
        learner: The learner.
        params: Its meta-parameters.
        episodes: Batches of validation tasks.
        memory: The memory; which of its slots failed is the one thing that changes.
        batched: Run each batch of tasks in one call; None: see `torchemo.training.predict.runs_together`.
        workers: Threads that share the tasks of a batch otherwise.
        team: Processes that share the batches.

    Returns:
        Scores after the last step, of every task with or without its recall, as it will be evaluated.
    """
    rule = memory.skip_unhelpful
    if rule is None:
        raise ConfigError(
            "this memory uses all of its slots.", hint="Pass skip_unhelpful=SkipUnhelpful(...)."
        )
    rule.failed.zero_()
    how: dict[str, Any] = {"every_step": False, "batched": batched, "workers": workers}
    how["team"] = team
    found = _scored(learner, params, episodes, memory, **how)
    given, recalls = join([scores for scores, _ in found]), [r for _, r in found if r is not None]
    if not recalls or not recalls[0].m:  # nothing is remembered yet
        return given
    alone = evaluate(learner, params, episodes, **how)
    recall = join(recalls)
    rule.judge(recall.slots, recall.weights, _points(given) - _points(alone))
    return _chosen(rule.allows(recall).cpu(), given, alone)


def _chosen(active: Bool[Tensor, " task"], given: Scores, alone: Scores) -> Scores:
    """Take the scores with recall where it is used, those without elsewhere."""
    column, right = active[:, None], given.accuracy
    if right is not None and alone.accuracy is not None:
        right = torch.where(column, right, alone.accuracy)
    loss = torch.where(column, given.loss, alone.loss)
    used = active if given.recalled is None else active & given.recalled
    return given._replace(loss=loss, accuracy=right, recalled=used)


def _points(scores: Scores) -> Float[Tensor, " task"]:
    """Higher is better: the share of right answers, or minus the squared error."""
    return -scores.loss[:, -1] if scores.accuracy is None else scores.accuracy[:, -1]


def batches(
    sample: Callable[[int, int], Episode], *, tasks: int, size: int = 4
) -> Iterable[Episode]:
    """Cut episodes 0 .. ``tasks`` - 1 of a sampler ``(start, count) -> Episode`` into batches."""
    return (sample(start, min(size, tasks - start)) for start in range(0, tasks, size))


def _score(episode: Episode, given: Prediction) -> Scores:
    y, answers = episode.query.y.cpu(), [out.cpu() for out in given.outputs]
    right = None
    if not y.is_floating_point():
        right = torch.stack([accuracy(out, y) for out in answers], 1)
    unknown = torch.full((y.shape[0],), -1, device="cpu")
    return Scores(
        loss=torch.stack([task_loss(out, y) for out in answers], 1),
        accuracy=right,
        domain=unknown if episode.domain is None else episode.domain.cpu(),
        episode=unknown if episode.index is None else episode.index.cpu(),
        recalled=None if given.recall is None else given.recall.active.cpu(),
    )
