"""One outer step of meta-training (Algorithm 1 without its writes).

Gradients are cut once. A task's leaves are its start theta_b, its rates, its recall weights and the
aggregator's parameters; each task returns its gradients for them. These are reduced in task order and
carried back once more into what all tasks share: the initialisation, the rates, the key network, the
slot keys. So the result does not depend on how the tasks are spread over calls.

Example:
    >>> from torchemo.core.losses import task_loss
    >>> from torchemo.core.rng import generator_for
    >>> from torchemo.core.types import Batch
    >>> from torchemo.learners.gradient.loop import InnerLoop
    >>> from torchemo.learners.gradient.maml import MAML
    >>> from torchemo.models import MLP
    >>> x = torch.rand(2, 10, 1)  # two regression tasks of ten points
    >>> episode = Episode(Batch(x, x.sin()), Batch(x, x.sin()))
    >>> learner = MAML(InnerLoop(MLP(), loss=task_loss))
    >>> step = outer_step(learner, learner.init(generator_for(0)), episode)
    >>> step.rows["head.bias"].shape, step.gradients["head.bias"].shape
    (torch.Size([2, 1]), torch.Size([1]))
"""

from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.checks import check_episode
from torchemo.core.errors import Diverged
from torchemo.core.task_axis import take
from torchemo.core.tree import (
    carried_back,
    detach,
    expand,
    is_finite,
    leaf,
    leaves,
    select,
    tree_map,
)
from torchemo.core.types import Episode, Params, Recall, Start
from torchemo.core.workers import run_tasks
from torchemo.learners.at_once import AtOnce
from torchemo.learners.learner import (
    STATE,
    Learner,
    buffers_of,
    learned,
    moving,
    network_names,
    start_of,
    within,
)
from torchemo.memory.interface import TaskMemory
from torchemo.models.norm import update_running
from torchemo.training.device import home, to_device
from torchemo.training.distributed import ALONE, Team, refuse_idle
from torchemo.training.heads import head_learner, solve_heads
from torchemo.training.predict import begin_at, gated, groups_of, head_outputs, recalled
from torchemo.training.solve import Held, Solved, merge, solve


class OuterStep(NamedTuple):
    """The result of an outer step; nothing has been changed yet.

    Attributes:
        losses: Outer losses of the B tasks, with what the learner adds to them.
        support_losses: Support losses before each inner step.
        gradients: Gradient of the mean outer loss in all meta-parameters.
        memory_gradients: The same in the memory's parameters, by name; those it does not reach are left out.
        rows: Per-task outer gradients in the tensors the tasks start from, ``{name: [B, *shape]}``; none
            where all tasks went through the network at once.
        recall: What was recalled, for `TaskMemory.remember`.
        values: What to remember, for `TaskMemory.remember`.
        slot_key_gradient: Gradient in the keys of the filled slots, for `TaskMemory.remember`; None if
            they do not learn.
        buffers: Running normalisation statistics after this step, where the network keeps them, and what a
            learner has written.
        about: What the learner found out about the tasks.
    """

    losses: Float[Tensor, " task"]
    support_losses: Float[Tensor, "task step"]
    gradients: Params
    memory_gradients: Params
    rows: Params
    recall: Recall | None
    values: Params
    slot_key_gradient: Tensor | None
    buffers: Params
    about: Params


class _Opened(NamedTuple):
    """B tasks before the cut, on the graph of what they share.

    Attributes:
        base: The network's tensors, a copy per task: the leaves of the per-task gradients.
        own: The learner's own parameters, as leaves.
        start: Where the tasks begin.
        held: The memory with what it recalled for them.
        offset: What the memory adds to their starts.
    """

    base: Params
    own: Params
    start: Start
    held: Held | None
    offset: Params


class _Shared(NamedTuple):
    """Gradients in what the tasks share of a memory."""

    parameters: Params
    slot_keys: Tensor | None = None


def outer_step(
    learner: Learner,
    params: Params,
    episode: Episode,
    *,
    memory: TaskMemory | None = None,
    batched: bool | None = False,
    workers: int = 1,
    team: Team = ALONE,
) -> OuterStep:
    """Adapt B tasks and return the outer gradient and what to remember.

    Args:
        learner: The learner.
        params: Its meta-parameters.
        episode: B tasks.
        memory: The memory; None is the base learner.
        batched: Run the whole task axis in one call; None: see `torchemo.training.predict.runs_together`.
        workers: Threads that share the tasks when they run one by one; the result is bitwise the same.
        team: Processes that share the tasks; the result is bitwise the same in all of them.
    """
    episode = to_device(episode, home(params))
    if memory is None and isinstance(learner, AtOnce) and learner.runs_at_once:
        return _all_at_once(learner, params, episode, team)
    opened = _open(learner, params, episode, memory)
    held, groups = opened.held, groups_of(params, episode, batched)
    begin = begin_at(opened.start, opened.offset)
    solved = _solve_all(learner, begin, episode, held, groups=groups, workers=workers, team=team)
    buffers = _buffers(select(params, buffers_of(learner)), solved)
    return _carried_back(learner, opened, begin, solved)._replace(buffers=buffers)


def check_finite(
    result: OuterStep, episode: Episode, *, iteration: int, norm: Tensor | None = None
) -> float:
    """Refuse numbers that are not finite, and fetch the norm of the gradient in the same wait.

    Raises:
        Diverged: A task or the memory has such numbers; names it.
    """
    finite = result.losses.isfinite()
    # A learner may have nothing of its own per task, such as nearest mean on fixed features.
    if numbers := {**result.rows, **within("value/", result.values)}:
        finite &= is_finite(numbers)
    sound = [g.isfinite().all() for g in result.memory_gradients.values()]
    memory_sound = torch.stack(sound).all() if sound else finite.new_ones(())
    size = result.losses.new_zeros(()) if norm is None else norm.to(finite.device)
    tasks_fine, memory_fine, fetched_norm = torch.stack(
        [finite.all().to(size.dtype), memory_sound.to(size.dtype), size]
    ).tolist()
    if tasks_fine:
        if not memory_fine:
            raise diverged(iteration, "the memory has a non-finite gradient")
        return float(fetched_norm)
    bad = int((~finite).nonzero()[0])
    name = bad if episode.index is None else int(episode.index[bad])
    raise diverged(iteration, f"task {name} has a non-finite loss or gradient")


def diverged(iteration: int, what: str) -> Diverged:
    """Say what is not finite at an outer step."""
    return Diverged(
        f"outer step {iteration}: {what}.",
        hint="Lower the inner or the outer rate; nothing was changed by this step.",
    )


def _all_at_once(learner: Learner, params: Params, episode: Episode, team: Team) -> OuterStep:
    """Differentiate the mean outer loss in what the tasks share; there are no per-task gradients.

    The statistics of a batch depend on all of its images, so it is not cut into tasks.
    """
    refuse_idle(team, 1)
    check_episode(episode, n_way=head_outputs(learner, params))
    own = {n: leaf(p) for n, p in learned(learner, params).items()}
    losses, statistics, state = cast(AtOnce, learner).at_once({**params, **own}, episode)
    found = carried_back([(losses, torch.full_like(losses, 1 / len(losses)))], list(own.values()))
    buffers = select(params, buffers_of(learner))
    for step, seen in sorted(statistics.items()):
        buffers = update_running(buffers, detach(seen), step=step)
    return OuterStep(
        losses=losses.detach(),
        support_losses=losses.new_zeros(len(losses), 0),
        gradients=dict(zip(own, found, strict=True)),
        memory_gradients={},
        rows={},
        recall=None,
        values={},
        slot_key_gradient=None,
        buffers={**buffers, **state},
        about={},
    )


def _open(learner: Learner, params: Params, episode: Episode, memory: TaskMemory | None) -> _Opened:
    """Check the tasks, let the learner choose their starts, and recall what is remembered."""
    theta, extras, state = _split(params)
    check_episode(episode, n_way=head_outputs(learner, theta))
    base = leaves(expand(detach(theta), episode.support.x.shape[0]))
    own = tree_map(leaf, extras)
    start = start_of(learner, {**detach(theta), **own, **state}, episode.support, base=base)
    held = None if memory is None else recalled(memory, theta, episode, start)
    return _Opened(base, own, start, held, {} if held is None else held.memory.offset(held.recall))


def _solve_all(
    learner: Learner,
    begin: Start,
    episode: Episode,
    held: Held | None,
    *,
    groups: list[slice],
    workers: int,
    team: Team,
) -> Solved:
    """Solve all tasks, with the heads of several in one call where nothing else is adapted."""
    refuse_idle(team, len(groups))
    headed = head_learner(learner, held) if len(groups) > 1 else None
    if headed is not None:
        return solve_heads(learner, headed, begin, episode, held=held, workers=workers, team=team)

    def work(group: slice) -> Solved:
        whole = (begin, episode, held)
        own, part, memory = whole if len(groups) == 1 else take(whole, group)
        return solve(learner, own, part, held=memory)

    return merge(team.share(lambda own: run_tasks(work, own, workers=workers), groups))


def _values(held: Held | None, solved: Solved, rows: Params, start: Start) -> Params:
    if held is None or held.memory.wants != "outer":
        return solved.values
    # Offsets are added before the gates, gradients joined with those of the gated tensors.
    before = gated(rows, start.gates) if held.memory.offsets_start else rows
    return held.memory.value(rows=before)


def _buffers(buffers: Params, solved: Solved) -> Params:
    for step, statistics in sorted(solved.statistics.items()):
        buffers = update_running(buffers, statistics, step=step)
    return buffers


def _carried_back(learner: Learner, opened: _Opened, begin: Start, solved: Solved) -> OuterStep:
    """Carry what the tasks return back into what they share."""
    start, held = opened.start, opened.held
    gradients = _through_start(learner, opened, solved)
    rows = moving(learner, select(solved.theta, network_names(solved.theta)))
    carried = _Shared({}) if held is None else _through_recall(held, begin.theta, rows, solved)
    return OuterStep(
        losses=solved.losses + (0 if start.auxiliary is None else start.auxiliary.detach()),
        support_losses=solved.support_losses,
        gradients=gradients,
        memory_gradients=carried.parameters,
        rows=rows,
        recall=None if held is None else held.recall,
        values=_values(held, solved, rows, start),
        slot_key_gradient=carried.slot_keys,
        buffers={},
        about=start.about or {},
    )


def _through_start(learner: Learner, opened: _Opened, solved: Solved) -> Params:
    """Carry per-task gradients from the starts back to all meta-parameters, and average them."""
    base, own, start, offset = opened.base, opened.own, opened.start, opened.offset
    ends = [(start.theta[n], row) for n, row in solved.theta.items()]
    ends += [((start.rates or {})[n], row) for n, row in solved.rates.items()]
    # Gates multiply what the memory adds as well as theta.
    gates = (start.gates or {}).items()
    ends += [(g, solved.theta[n] * offset[n].detach()) for n, g in gates if n in offset]
    if start.auxiliary is not None:
        ends.append((start.auxiliary, torch.ones_like(start.auxiliary)))
    ends = [(end, row) for end, row in ends if end.requires_grad]
    inputs = [*base.values(), *own.values()]
    full = carried_back(ends, inputs)
    rows, fixed = dict(zip(base, full[: len(base)], strict=True)), buffers_of(learner)
    shared = dict(zip(own, full[len(base) :], strict=True))
    mean = {n: row.mean(0) for n, row in rows.items() if n not in fixed}
    own_mean = {n: g / len(solved.losses) for n, g in shared.items() if n not in fixed}
    return {**mean, **own_mean}


def _through_recall(held: Held, theta: Params, rows: Params, solved: Solved) -> _Shared:
    """Carry gradients at recall weights and offsets back to the key network and the slot keys."""
    memory, recall = held
    tasks = recall.keys.shape[0]
    inner = zip(memory.inner_parameters(), solved.inner, strict=True)
    gradients = {name: gradient / tasks for name, gradient in inner}
    ends = [(theta[n], row / tasks) for n, row in rows.items() if theta[n].requires_grad]
    if solved.weights is not None:
        ends.append((recall.weights, solved.weights / tasks))
    if not ends:
        return _Shared(gradients)
    named = {n: p for n, p in memory.named_parameters() if p.requires_grad and n not in gradients}
    inputs: list[Tensor] = list(named.values())
    if recall.slot_keys is not None:
        inputs.append(recall.slot_keys)
    found = torch.autograd.grad(
        [end for end, _ in ends], inputs, [row for _, row in ends], allow_unused=True
    )
    gradients.update({n: g for n, g in zip(named, found, strict=False) if g is not None})
    return _Shared(gradients, None if recall.slot_keys is None else found[-1])


def _split(params: Params) -> tuple[Params, Params, Params]:
    """Separate the network's parameters, the learner's own, and what it keeps without learning it."""
    theta = select(params, network_names(params))
    state = {n: p for n, p in params.items() if n.startswith(STATE)}
    return theta, {n: p for n, p in params.items() if n not in theta and n not in state}, state
