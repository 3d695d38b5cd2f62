"""Meta-training for tasks that come back: a support set is taken as several visits of its task.

Every visit is fitted with what the earlier ones left in a lifelong memory, and each visit's query loss is
part of the outer loss. Nothing is detached: initialisation, rates and trunk learn to leave gradients behind
that help later, and to use them. Recalled gradients are never stale, as all visits have the same
meta-parameters.
"""

from collections.abc import Callable

import torch

from torchemo.core.errors import ShapeError
from torchemo.core.types import Batch, Params, Recall
from torchemo.learners.learner import Fitted
from torchemo.memory.bound import BoundMemory
from torchemo.memory.lifelong.memory import LifelongMemory, recalled
from torchemo.memory.lifelong.recognise import ByName
from torchemo.memory.values import pick


def fit_visits(
    fit: Callable[[Batch, BoundMemory | None], Fitted],
    support: Batch,
    *,
    visits: int,
    head: tuple[str, ...],
) -> Fitted:
    """Fit the visits of B tasks in turn; return the last one with all earlier ones.

    Args:
        fit: ``(support set, memory) -> fitted`` for one visit.
        support: The examples of all visits.
        visits: How many visits they make.
        head: Tensors whose rows belong to classes.
    """
    memory = LifelongMemory(ByName(), head=head)
    found: list[Fitted] = []
    for part in parted(support, visits):
        bound = BoundMemory(memory, _recalled(found, part)) if found else None
        found.append(fit(part, bound))
    return found[-1]._replace(earlier=tuple(found[:-1]))


def parted(support: Batch, visits: int) -> list[Batch]:
    """Divide support sets into visits with as many examples of every class each."""
    x, y = support.x, support.y
    tasks, n = y.shape[:2]
    if y.is_floating_point():
        order, groups = torch.arange(n, device=x.device).expand(tasks, n), 1
    else:
        order, groups = y.argsort(dim=1, stable=True), int(y.max()) + 1
    if n % (groups * visits):
        raise ShapeError(
            f"{n} support examples of {groups} classes do not make {visits} visits of equal size.",
            hint="Set data.n_shot to a multiple of learner.visits.",
        )
    places = order.view(tasks, groups, visits, -1).transpose(1, 2).flatten(2)
    rows = torch.arange(tasks, device=x.device)[:, None]
    return [Batch(x[rows, at], y[rows, at]) for at in places.unbind(1)]


def _recalled(past: list[Fitted], support: Batch) -> Recall:
    """Return what a lifelong memory recalls of visits with the same labels, on the graph."""
    tasks, n = support.y.shape[:2]
    way = 1 if support.y.is_floating_point() else int(support.y.max()) + 1
    each = [pick("per_step", one.gradients, one.path, {}) for one in past]
    values: Params = {name: torch.stack([one[name] for one in each], 1) for name in each[0]}
    m, device = len(past), support.x.device
    return recalled(
        torch.arange(m, device=device).expand(tasks, m),
        values,
        rows=torch.full((tasks, m, way), float(n), device=device),
        own=torch.full((tasks,), float(n), device=device),
    )
