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

from torchemo.core.checks import check_episode
from torchemo.core.tree import detach, expand, leaves, select, tree_map
from torchemo.core.types import Episode, Params, Recall, Start
from torchemo.core.workers import run_tasks
from torchemo.learners.learner import STATE, Learner, network_names
from torchemo.memory.emo import EMO
from torchemo.memory.recall import slice_recall
from torchemo.models.norm import update_running
from torchemo.training.heads import answer_heads, separable, solve_heads
from torchemo.training.solve import Solved, merge, solve, start_of, tasks_of

TOGETHER = 100_000
"""Networks on vectors with fewer parameters are bound by the interpreter, not by arithmetic."""


class OuterStep(NamedTuple):
    """The result of an outer step; nothing has been changed yet.

    Attributes:
        losses: Outer losses of the B tasks, with what the learner adds to them.
        support_losses: Support losses before each inner step.
        gradients: Gradient of the mean outer loss in all meta-parameters.
        emo_gradients: The same in EMO's parameters, by name; those it does not reach are left out.
        rows: The tasks' rows of the outer gradient, in the tensors they start from, ``{name: [B, *shape]}``.
        recall: What was recalled, for `EMO.remember`.
        values: What to remember, for `EMO.remember`.
        buffers: Running normalisation statistics after this step, where the network keeps them.
        about: What the learner found out about the tasks.
    """

    losses: Float[Tensor, " task"]
    support_losses: Float[Tensor, "task step"]
    gradients: Params
    emo_gradients: Params
    rows: Params
    recall: Recall | None
    values: Params
    buffers: Params
    about: Params


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
    theta, extras, state = _split(params)
    check_episode(episode, n_way=_outputs(learner, theta))
    base, own = leaves(expand(detach(theta), tasks)), tree_map(_leaf, extras)
    start = learner.start({**detach(theta), **own, **state}, episode.support, base=base)
    recall = None if emo is None else _recall(emo, theta, episode, start)
    shift = {} if emo is None or recall is None else emo.shift(recall)
    begin = _begin(start, shift)

    def work(group: slice) -> Solved:
        part = None if recall is None else slice_recall(recall, group)
        return solve(
            learner, start_of(begin, group), tasks_of(episode, group), emo=emo, recall=part
        )

    groups = _groups(params, episode, batched)
    if len(groups) > 1 and separable(learner, emo, recall):
        solved = solve_heads(learner, begin, episode, emo=emo, recall=recall, workers=workers)
    else:
        solved = merge(run_tasks(work, groups, workers=workers))
    fixed = learner.loop.model.buffers
    shares, own_gradients = _through_start(start, shift, solved, base, own)
    gradients = {n: share.mean(0) for n, share in shares.items() if n not in fixed}
    gradients.update(tree_map(lambda g: g / tasks, own_gradients))
    rows = select(solved.theta, network_names(solved.theta))
    emo_gradients: Params = {}
    values = solved.values
    if emo is not None and recall is not None:
        emo_gradients = _through_recall(emo, recall, begin.theta, rows, solved)
        if emo.policy.content == "meta":
            # Offsets are added before the gates, gradients joined with those of the gated tensors.
            values = emo.value(rows=_times(rows, start.gates) if emo.consolidates else rows)
    buffers = select(theta, fixed)
    for step, statistics in sorted(solved.statistics.items()):
        buffers = update_running(buffers, statistics, step=step)
    added = 0 if start.auxiliary is None else start.auxiliary.detach()
    return OuterStep(
        losses=solved.losses + added,
        support_losses=solved.support_losses,
        gradients=gradients,
        emo_gradients=emo_gradients,
        rows=rows,
        recall=recall,
        values=values,
        buffers=buffers,
        about=start.about or {},
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
    # What looks at a task before it starts (gates, embeddings) runs once and for all tasks anyway.
    own = network_names(params) or list(params)
    small = x.ndim == 3 and sum(params[n].numel() for n in own) < TOGETHER
    return x.device.type != "cpu" or small


def predict(
    learner: Learner,
    params: Params,
    episode: Episode,
    *,
    emo: EMO | None = None,
    steps: int | None = None,
    every_step: bool = True,
    batched: bool | None = False,
    workers: int = 1,
) -> list[Tensor]:
    """Adapt on the support sets and answer the queries after every step (Algorithm 2).

    The memory is only read; put ``emo`` into eval mode first. No graph is kept.

    Returns:
        Outputs ``[B, n_query, n_out]`` after 0, 1, ..., ``steps`` inner steps; after the last alone unless
        ``every_step``.
    """
    tasks = episode.support.x.shape[0]
    steps = learner.loop.steps if steps is None else steps
    shown = range(steps + 1) if every_step else range(steps, steps + 1)
    with torch.no_grad():
        theta = select(params, network_names(params))
        check_episode(episode, n_way=_outputs(learner, theta))
        start = learner.start(params, episode.support, base=expand(theta, tasks))
        recall = None if emo is None else _recall(emo, theta, episode, start)
        begin = _begin(start, {} if emo is None or recall is None else emo.shift(recall))
        groups = _groups(params, episode, batched)
        if len(groups) > 1 and separable(learner, emo, recall):
            return answer_heads(
                learner, begin, episode, emo=emo, recall=recall, shown=shown, workers=workers
            )

        def answer(group: slice) -> list[Tensor]:
            bound = None
            if emo is not None and recall is not None:
                bound = emo.bind(slice_recall(recall, group))
            part = tasks_of(episode, group)
            own = start_of(begin, group)
            adapted = learner.adapt(own, part.support, bound=bound, steps=steps, order=0)
            return learner.loop.outputs(adapted, part.query.x, steps=shown)

        answers = run_tasks(answer, groups, workers=workers)
    return [torch.cat(step) for step in zip(*answers, strict=True)]


def look_up(learner: Learner, params: Params, episode: Episode, *, emo: EMO) -> Recall:
    """Recall what `predict` would for these tasks; nothing is adapted and no graph is kept."""
    with torch.no_grad():
        theta = select(params, network_names(params))
        tasks = episode.support.x.shape[0]
        start = learner.start(params, episode.support, base=expand(theta, tasks))
        return _recall(emo, theta, episode, start)


def _recall(emo: EMO, theta: Params, episode: Episode, start: Start) -> Recall:
    about = start.about or {}
    # A memory without a key network of its own takes the learner's description of the task.
    own = about.get("key") if emo.encoder is None else None
    keys = emo.encode(episode.support, detach(theta)) if own is None else own
    return emo.recall(
        keys,
        support=episode.support,
        params=detach(theta),
        domain=episode.domain,
        index=episode.index,
        group=about.get("group"),
    )


def _begin(start: Start, shift: Params) -> Start:
    """Cut the tasks' starts from what made them, and add what the memory adds."""
    theta = detach(start.theta)
    for name, moved in _times(shift, start.gates).items():
        theta[name] = theta[name] + moved
    return Start(theta, None if start.rates is None else detach(start.rates))


def _times(tensors: Params, gates: Params | None) -> Params:
    """Multiply by the learner's gates, where it has any."""
    factors = {} if gates is None else detach(gates)
    return {n: t * factors[n] if n in factors else t for n, t in tensors.items()}


def _through_start(
    start: Start, shift: Params, solved: Solved, base: Params, extras: Params
) -> tuple[Params, Params]:
    """Carry the rows at the starts back to ``theta`` per task and to the learner's other parameters."""
    ends = [(start.theta[n], row) for n, row in solved.theta.items()]
    ends += [((start.rates or {})[n], row) for n, row in solved.rates.items()]
    # Gates multiply what the memory adds as well as theta.
    gated = (start.gates or {}).items()
    ends += [(g, solved.theta[n] * shift[n].detach()) for n, g in gated if n in shift]
    if start.auxiliary is not None:
        ends.append((start.auxiliary, torch.ones_like(start.auxiliary)))
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


def _through_recall(
    emo: EMO, recall: Recall, theta: Params, rows: Params, solved: Solved
) -> Params:
    """Carry the rows at recall weights and offsets back to the key network and the slot keys."""
    tasks = recall.keys.shape[0]
    gradients: Params = {}
    trained = [n for n, p in emo.aggregator.named_parameters() if p.requires_grad]
    for name, gradient in zip(trained, solved.aggregator, strict=True):
        gradients[f"aggregator.{name}"] = gradient / tasks
    ends = [(theta[n], row / tasks) for n, row in rows.items() if theta[n].requires_grad]
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


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _split(params: Params) -> tuple[Params, Params, Params]:
    """Separate the network's parameters, the learner's own, and what it keeps without learning it."""
    theta = select(params, network_names(params))
    state = {n: p for n, p in params.items() if n.startswith(STATE)}
    return theta, {n: p for n, p in params.items() if n not in theta and n not in state}, state
