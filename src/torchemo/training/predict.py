"""Adapt to support sets and answer queries (Algorithm 2); the memory is read and not changed.

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
    >>> found = predict(learner, learner.init(generator_for(0)), episode)
    >>> len(found.outputs), found.outputs[-1].shape
    (4, torch.Size([2, 10, 1]))
"""

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.checks import check_episode
from torchemo.core.task_axis import join, take
from torchemo.core.tree import detach, expand, select
from torchemo.core.types import Batch, Episode, Params, Recall, Start, Statistics
from torchemo.core.workers import run_tasks
from torchemo.learners.learner import (
    Fitted,
    Learner,
    Stepwise,
    network_names,
    start_of,
    steps_of,
)
from torchemo.memory.interface import TaskMemory
from torchemo.training.device import CPU, batch_to, home, to_device
from torchemo.training.heads import answer_heads, head_learner
from torchemo.training.solve import Held

TOGETHER = 100_000
"""Networks on vectors with fewer parameters are bound by the interpreter, not by arithmetic."""


class Prediction(NamedTuple):
    """Answers to the queries of B tasks.

    Attributes:
        outputs: ``[B, n_query, n_out]`` after each inner step that was asked for, on the device of the
            queries.
        recall: What the memory recalled for the tasks; None without a memory.
    """

    outputs: tuple[Tensor, ...]
    recall: Recall | None


def predict(
    learner: Learner,
    params: Params,
    episode: Episode,
    *,
    memory: TaskMemory | None = None,
    steps: int | None = None,
    every_step: bool = True,
    statistics: Statistics = "transductive",
    batched: bool | None = False,
    workers: int = 1,
) -> Prediction:
    """Adapt on the support sets and answer the queries (Algorithm 2).

    Put ``memory`` into eval mode first. No graph is kept.

    Args:
        learner: The learner.
        params: Its meta-parameters.
        episode: B tasks.
        memory: The memory; None is the base learner.
        steps: Inner steps, by default those of training.
        every_step: Answer after 0, 1, ..., ``steps`` inner steps, else after the last alone. A learner
            without an inner loop answers once.
        statistics: Answer each query by itself (``inductive``), or all queries of a task together, as the
            network normalises what it is given at once (``transductive``).
        batched: Run the whole task axis in one call; None: see `runs_together`.
        workers: Threads that share the tasks otherwise.
    """
    asked, device = episode.query.x.device, home(params)
    if device.type != "cpu":
        check_episode(episode, n_way=head_outputs(learner, params))
    episode = to_device(episode, device)
    with torch.no_grad():
        begin, held = begun(learner, params, episode, memory=memory)
        shown = _shown(learner, steps, every_step)
        answering = _Answering(learner, begin, episode, held, shown, statistics)
        outputs = answering.all(groups_of(params, episode, batched), workers=workers)
    answers = tuple(out.to(asked) for out in outputs)
    return Prediction(answers, None if held is None else held.recall)


@final
@dataclass(frozen=True)
class Classifier:
    """A learner fitted to the support set of one task; answers any number of queries, each by itself.

    Attributes:
        learner: The learner.
        fitted: What it made of the support set.
        recall: What the memory recalled for the task; None without a memory.
        device: Where its network is; answers come back to where the queries are.
    """

    learner: Learner
    fitted: Fitted
    recall: Recall | None
    device: torch.device = CPU

    def __call__(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n out"]:
        """Return the outputs for queries; no answer depends on the others."""
        with torch.no_grad():
            return self.learner.predict(self.fitted, x[None].to(self.device))[0].to(x.device)


def classifier(
    learner: Learner,
    params: Params,
    support: Batch,
    *,
    memory: TaskMemory | None = None,
    steps: int | None = None,
) -> Classifier:
    """Fit one task once, to answer queries as they come (Algorithm 2).

    Args:
        learner: The learner.
        params: Its meta-parameters.
        support: The support set of one task, ``[1, n, ...]``.
        memory: The memory, in eval mode; None is the base learner.
        steps: Inner steps, by default those of training.
    """
    support = batch_to(support, home(params))
    with torch.no_grad():
        begin, held = begun(learner, params, Episode(support, support), memory=memory)
        bound = None if held is None else held.bind()
        fitted = learner.fit(begin, support, memory=bound, steps=steps, graph=False)
    recall = None if held is None else held.recall
    return Classifier(learner, fitted._replace(alone={}), recall, home(params))


def begun(
    learner: Learner, params: Params, episode: Episode, *, memory: TaskMemory | None
) -> tuple[Start, Held | None]:
    """Return where tasks begin, the memory's offsets included, and what it recalled for them."""
    theta = select(params, network_names(params))
    check_episode(episode, n_way=head_outputs(learner, theta))
    start = start_of(learner, params, episode.support, base=expand(theta, _tasks(episode)))
    held = None if memory is None else recalled(memory, theta, episode, start)
    return begin_at(start, {} if held is None else held.memory.offset(held.recall)), held


class _Answering(NamedTuple):
    """Adapts to tasks and answers them."""

    learner: Learner
    begin: Start
    episode: Episode
    held: Held | None
    steps: range
    statistics: Statistics

    def all(self, groups: list[slice], *, workers: int) -> list[Tensor]:
        """Answer all tasks, with the heads of several in one call where nothing else is adapted."""
        learner, begin, episode, held, steps, statistics = self
        headed = head_learner(learner, held) if len(groups) > 1 else None
        if headed is None:
            answers: list[Tensor] = join(run_tasks(self.some, groups, workers=workers))
            return answers
        return answer_heads(
            learner,
            headed,
            begin,
            episode,
            held=held,
            steps=steps,
            statistics=statistics,
            workers=workers,
        )

    def some(self, group: slice) -> list[Tensor]:
        """Adapt and answer a group of the tasks."""
        begin, part, held = take((self.begin, self.episode, self.held), group)
        bound = None if held is None else held.bind()
        learner, last = self.learner, self.steps[-1]
        fitted = learner.fit(begin, part.support, memory=bound, steps=last, graph=False)
        if self.statistics == "inductive":
            fitted = fitted._replace(alone={})
        if not isinstance(learner, Stepwise):
            return [learner.predict(fitted, part.query.x)]
        return learner.predict_path(fitted, part.query.x, steps=self.steps)


def recalled(memory: TaskMemory, theta: Params, episode: Episode, start: Start) -> Held:
    """Encode the support sets and recall what is remembered of similar tasks (Eq. 4)."""
    about = start.about or {}
    # A memory without a key network of its own takes the learner's description of the task.
    own = about.get("key") if memory.encoder is None else None
    keys = memory.encode(episode.support, detach(theta)) if own is None else own
    recall = memory.recall(
        keys,
        support=episode.support,
        params=detach(theta),
        domain=episode.domain,
        index=episode.index,
        group=about.get("group"),
    )
    return Held(memory, recall)


def begin_at(start: Start, offset: Params) -> Start:
    """Cut the tasks' starts from what made them, and add the memory's offsets."""
    theta = detach(start.theta)
    for name, moved in gated(offset, start.gates).items():
        theta[name] = theta[name] + moved
    return Start(theta, None if start.rates is None else detach(start.rates))


def gated(tensors: Params, gates: Params | None) -> Params:
    """Multiply by the learner's gates, where it has any."""
    factors = {} if gates is None else detach(gates)
    return {n: t * factors[n] if n in factors else t for n, t in tensors.items()}


def runs_together(params: Params, episode: Episode) -> bool:
    """Choose how tasks are run where nobody else does: all in one call, or one by one.

    One call serves devices other than the CPU, and small networks on vectors. Images on a CPU go one by one,
    to task workers and the compiled block. The choice does not depend on the number of workers, so neither
    do the results.
    """
    x = episode.support.x
    # What looks at a task before it starts (gates, embeddings) runs once and for all tasks anyway.
    own = network_names(params) or list(params)
    small = x.ndim == 3 and sum(params[n].numel() for n in own) < TOGETHER
    return x.device.type != "cpu" or small


def groups_of(params: Params, episode: Episode, batched: bool | None) -> list[slice]:
    """Cut the task axis into what goes through the network at once."""
    tasks = _tasks(episode)
    together = runs_together(params, episode) if batched is None else batched
    return [slice(0, tasks)] if together else [slice(b, b + 1) for b in range(tasks)]


def head_outputs(learner: Learner, theta: Params) -> int | None:
    """Return how many outputs the head has, if it is among the meta-parameters."""
    head = learner.model.head
    return theta[head[0]].shape[0] if head and head[0] in theta else None


def _shown(learner: Learner, steps: int | None, every_step: bool) -> range:
    last = steps_of(learner) if steps is None else steps
    return range(last + 1) if every_step else range(last, last + 1)


def _tasks(episode: Episode) -> int:
    return episode.support.x.shape[0]
