"""One task without a task axis: what a host holds that adapts one task at a time."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor

from torchemo.core.errors import ShapeError
from torchemo.core.task_axis import take
from torchemo.core.types import Params, Recall
from torchemo.memory.emo import EMO

Grads = TypeVar("Grads", bound=Mapping[str, Tensor | None] | Sequence[Tensor | None])
"""Gradients of one task: ``{name: [*shape]}``, or a list or tuple of ``[*shape]``; None where missing."""


def combine_one(
    emo: EMO,
    grads: Grads,
    recall: Recall,
    *,
    step: int = 0,
    task: int | None = None,
    names: Sequence[str] | None = None,
) -> Grads:
    """Return Aggr(g, V) of one task (Eq. 7) in the form in which g came; differentiable in g.

    A tensor without gradient (frozen, or not used by the loss) is left alone, as optimizers do.

    Args:
        emo: The memory optimizer.
        grads: Support gradients g of the task.
        recall: What was recalled for this task, or for a batch of tasks.
        step: Inner step s.
        task: Which task of the batch this is; needed if the recall is of more than one.
        names: Names of the tensors, needed if ``grads`` is a list or tuple.

    Example:
        >>> import torch
        >>> from torchemo.interop import for_module
        >>> net = torch.nn.Linear(2, 1)
        >>> emo = for_module(net, k=5, capacity=10, key_dim=3)
        >>> grads = torch.autograd.grad(net(torch.ones(4, 2)).sum(), list(net.parameters()))
        >>> recall = emo.recall(torch.zeros(1, 3))
        >>> combine_one(emo, grads, recall, names=["weight", "bias"])
        (tensor([[4., 4.]]), tensor([4.]))
    """
    own, part = as_task(grads, names=names), _of_task(recall, task)
    _check_names(own, part)
    direction = emo.combine(own, part, step=step)
    # Only where the task has a gradient: a frozen tensor must not start to move along a recalled one.
    combined = {
        name: None if grad is None else direction[name][0]
        for name, grad in _named(grads, names).items()
    }
    return _in_form_of(grads, combined)


def as_task(
    grads: Mapping[str, Tensor | None] | Sequence[Tensor | None],
    *,
    names: Sequence[str] | None = None,
) -> Params:
    """Give the gradients of one task names and a task axis, ``{name: [1, *shape]}``; drop missing ones."""
    given = {n: grad for n, grad in _named(grads, names).items() if grad is not None}
    nested = [n for n, grad in given.items() if not isinstance(grad, Tensor)]
    if nested:
        raise ShapeError(
            f"gradients of one task are tensors by name; {nested} are not tensors.",
            hint="Flatten nested parameters, for example by dict(module.named_parameters()).",
        )
    if not given:
        raise ShapeError(
            "no tensor has a gradient.",
            hint="Call loss.backward() first, and look at requires_grad of the parameters.",
        )
    return {n: grad[None] for n, grad in given.items()}


def _named(
    grads: Mapping[str, Tensor | None] | Sequence[Tensor | None], names: Sequence[str] | None
) -> dict[str, Tensor | None]:
    if isinstance(grads, Mapping):
        return dict(grads)
    if names is None or len(set(names)) != len(grads) or len(names) != len(grads):
        given = "no names" if names is None else f"{len(names)} names {list(names)}"
        raise ShapeError(
            f"{len(grads)} gradients need as many different names, got {given}.",
            hint="Pass names=[name for name, _ in module.named_parameters()].",
        )
    return dict(zip(names, grads, strict=True))


def _in_form_of(grads: Grads, combined: dict[str, Tensor | None]) -> Grads:
    form: Any = tuple if isinstance(grads, tuple) else list
    return cast(Grads, combined if isinstance(grads, Mapping) else form(combined.values()))


def _check_names(own: Params, recall: Recall) -> None:
    """Refuse names of which the memory knows none: nothing would ever be combined."""
    if recall.m and own.keys().isdisjoint(recall.values):
        raise ShapeError(
            f"combine: gradients of {sorted(own)}, but only {sorted(recall.values)} are remembered.",
            hint="Use the same names everywhere; wrappers add a prefix such as 'module.'.",
        )


def _of_task(recall: Recall, task: int | None) -> Recall:
    """Take one task of a recall and keep its axis."""
    tasks = recall.keys.shape[0]
    if task is None and tasks == 1:
        task = 0
    if task is None or not 0 <= task < tasks:
        raise ShapeError(
            f"the recall is of {tasks} tasks, and task {task} was asked for.",
            hint="Pass task=b for the b-th of the tasks that were recalled together.",
        )
    return take(recall, slice(task, task + 1))
