"""One outer step of meta-training (Algorithm 1), and the adaptation of meta-test (Algorithm 2).

Gradients are cut once. A task's leaves are its start theta_b, its rates, its recall weights and the
aggregator's parameters; each task returns its rows for them. The rows are reduced in task order and
carried back once more into what all tasks share: the initialisation, the rates, the key network, the
slot keys. So the result does not depend on how the tasks are spread over calls.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.emo import EMO
from torchemo.episode import check_episode
from torchemo.heads import answer_heads, separable, solve_heads
from torchemo.learners.learner import Learner, network_names
from torchemo.models.norm import update_running
from torchemo.retrieval import slice_recall
from torchemo.solve import Solved, merge, solve, start_of, tasks_of
from torchemo.tree import detach, expand, leaves, select, tree_map
from torchemo.types import Episode, Params, Recall, Start
from torchemo.workers import run_tasks

TOGETHER = 100_000
"""Networks on vectors with fewer parameters are bound by the interpreter, not by arithmetic."""


class OuterStep(NamedTuple):
    """The result of an outer step; nothing has been changed yet.

    Attributes:
        losses: Outer losses of the B tasks.
        support_losses: Support losses before each inner step.
        gradients: Gradient of the mean outer loss in all meta-parameters.
        emo_gradients: The same in EMO's parameters, by name; those it does not reach are left out.
        rows: The tasks' rows of the outer gradient, ``{name: [B, *shape]}``.
        recall: What was recalled, for `EMO.remember`.
        values: What to remember, for `EMO.remember`.
        buffers: Running normalisation statistics after this step, where the network keeps them.
    """

    losses: Float[Tensor, " task"]
    support_losses: Float[Tensor, "task step"]
    gradients: Params
    emo_gradients: Params
    rows: Params
    recall: Recall | None
    values: Params
    buffers: Params


def outer_step(
    learner: Learner,
    params: Params,
    episode: Episode,
    *,
    emo: EMO | None = None,
    batched: bool | None = False,
    workers: int = 1,
) -> OuterStep:
    """Adapt B tasks and return the outer gradient and what to remember (Algorithm 1 without its writes).

    Args:
        learner: The learner.
        params: Its meta-parameters.
        episode: B tasks.
        emo: The memory optimizer; None is the base learner.
        batched: Run the whole task axis in one call instead of task by task; None: see `runs_together`.
        workers: Threads that share the tasks when they run one by one; the result is bitwise the same.
    """
    tasks = episode.support.x.shape[0]
    theta, extras = _split(params)
    check_episode(episode, n_way=_outputs(learner, theta))
    recall = None if emo is None else _recall(emo, theta, episode)
    base = expand(detach(theta), tasks)
    if emo is not None and recall is not None:
        base = emo.offset(base, recall)
    base_leaves, extra_leaves = leaves(base), leaves(extras)
    start = learner.start({**theta, **extra_leaves}, episode.support, base=base_leaves)

    def work(group: slice) -> Solved:
        part = None if recall is None else slice_recall(recall, group)
        return solve(
            learner, start_of(start, group), tasks_of(episode, group), emo=emo, recall=part
        )

    groups = _groups(params, episode, batched)
    if len(groups) > 1 and separable(learner, emo, recall):
        solved = solve_heads(learner, start, episode, emo=emo, recall=recall, workers=workers)
    else:
        solved = merge(run_tasks(work, groups, workers=workers))
    rows, extra_gradients = _through_start(start, solved, base_leaves, extra_leaves)
    rows = {n: row for n, row in rows.items() if n not in learner.loop.model.buffers}
    gradients = tree_map(lambda row: row.mean(0), rows)
    gradients.update(tree_map(lambda g: g / tasks, extra_gradients))
    emo_gradients: Params = {}
    values = solved.values
    if emo is not None and recall is not None:
        emo_gradients = _through_recall(emo, recall, base, rows, solved)
        if emo.policy.content == "meta":
            values = emo.value(rows=rows)
    buffers = select(theta, learner.loop.model.buffers)
    for step, statistics in sorted(solved.statistics.items()):
        buffers = update_running(buffers, statistics, step=step)
    return OuterStep(
        losses=solved.losses,
        support_losses=solved.support_losses,
        gradients=gradients,
        emo_gradients=emo_gradients,
        rows=rows,
        recall=recall,
        values=values,
        buffers=buffers,
    )


def runs_together(params: Params, episode: Episode) -> bool:
    """Choose how tasks are run where nobody else does: all in one call, or one by one.

    One call serves devices other than the CPU, and small networks on vectors. Pictures on a CPU go one by
    one, to task workers and the compiled block. The choice does not depend on the number of workers, so
    neither do the results.

    Args:
        params: The meta-parameters.
        episode: The tasks.
    """
    x = episode.support.x
    small = x.ndim == 3 and sum(p.numel() for p in params.values()) < TOGETHER
    return x.device.type != "cpu" or small


def predict(
    learner: Learner,
    params: Params,
    episode: Episode,
    *,
    emo: EMO | None = None,
    steps: int | None = None,
    batched: bool | None = False,
    workers: int = 1,
) -> list[Tensor]:
    """Adapt on the support sets and answer the queries after every step (Algorithm 2).

    The memory is only read; put ``emo`` into eval mode first. No graph is kept.

    Returns:
        Outputs ``[B, n_query, n_out]`` after 0, 1, ..., ``steps`` inner steps.
    """
    tasks = episode.support.x.shape[0]
    steps = learner.loop.steps if steps is None else steps
    with torch.no_grad():
        theta, extras = _split(params)
        check_episode(episode, n_way=_outputs(learner, theta))
        recall = None if emo is None else _recall(emo, theta, episode)
        base = expand(theta, tasks)
        if emo is not None and recall is not None:
            base = emo.offset(base, recall)
        start = learner.start({**theta, **extras}, episode.support, base=base)
        groups = _groups(params, episode, batched)
        if len(groups) > 1 and separable(learner, emo, recall):
            return answer_heads(
                learner, start, episode, emo=emo, recall=recall, steps=steps, workers=workers
            )

        def answer(group: slice) -> list[Tensor]:
            bound = None
            if emo is not None and recall is not None:
                bound = emo.bind(slice_recall(recall, group))
            part, begin = tasks_of(episode, group), start_of(start, group)
            adapted = learner.adapt(begin, part.support, bound=bound, steps=steps, order=0)
            return learner.loop.outputs(adapted, part.query.x, steps=range(steps + 1))

        answers = run_tasks(answer, groups, workers=workers)
    return [torch.cat(step) for step in zip(*answers, strict=True)]


def _recall(emo: EMO, theta: Params, episode: Episode) -> Recall:
    keys = emo.encode(episode.support, detach(theta))
    return emo.recall(
        keys,
        support=episode.support,
        params=detach(theta),
        domain=episode.domain,
        index=episode.index,
    )


def _through_start(
    start: Start, solved: Solved, base: Params, extras: Params
) -> tuple[Params, Params]:
    """Carry the rows at the starts back to ``theta`` per task and to the learner's other parameters."""
    ends = [(start.theta[n], row) for n, row in solved.theta.items()]
    ends += [((start.rates or {})[n], row) for n, row in solved.rates.items()]
    ends = [(end, row) for end, row in ends if end.requires_grad]
    inputs = [*base.values(), *extras.values()]
    found = torch.autograd.grad(
        [end for end, _ in ends], inputs, [row for _, row in ends], allow_unused=True
    )
    full = [
        torch.zeros_like(leaf) if g is None else g for leaf, g in zip(inputs, found, strict=True)
    ]
    rows = dict(zip(base, full[: len(base)], strict=True))
    return rows, dict(zip(extras, full[len(base) :], strict=True))


def _through_recall(emo: EMO, recall: Recall, base: Params, rows: Params, solved: Solved) -> Params:
    """Carry the rows at recall weights and offsets back to the key network and the slot keys."""
    tasks = recall.keys.shape[0]
    gradients: Params = {}
    trained = [n for n, p in emo.aggregator.named_parameters() if p.requires_grad]
    for name, gradient in zip(trained, solved.aggregator, strict=True):
        gradients[f"aggregator.{name}"] = gradient / tasks
    ends = [(base[n], row / tasks) for n, row in rows.items() if base[n].requires_grad]
    if solved.weights is not None:
        ends.append((recall.weights, solved.weights / tasks))
    if not ends:
        return gradients
    named = {n: p for n, p in emo.named_parameters() if p.requires_grad and n not in gradients}
    inputs: list[Tensor] = list(named.values())
    if recall.slot_keys is not None:
        inputs.append(recall.slot_keys)
    found = torch.autograd.grad(
        [end for end, _ in ends], inputs, [row for _, row in ends], allow_unused=True
    )
    gradients.update({n: g for n, g in zip(named, found, strict=False) if g is not None})
    if recall.slot_keys is not None:
        recall.slot_keys.grad = found[-1]
    return gradients


def _groups(params: Params, episode: Episode, batched: bool | None) -> list[slice]:
    """Cut the task axis into what goes through the network at once."""
    tasks = episode.support.x.shape[0]
    together = runs_together(params, episode) if batched is None else batched
    return [slice(0, tasks)] if together else [slice(b, b + 1) for b in range(tasks)]


def _outputs(learner: Learner, theta: Params) -> int | None:
    """Return how many outputs the head has, if it is among the meta-parameters."""
    head = learner.loop.model.head
    return theta[head[0]].shape[0] if head and head[0] in theta else None


def _split(params: Params) -> tuple[Params, Params]:
    names = network_names(params)
    theta = select(params, names)
    return theta, {n: p for n, p in params.items() if n not in theta}
