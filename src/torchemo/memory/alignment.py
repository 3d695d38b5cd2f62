"""Head alignment: put the rows of a recalled head gradient into the class order of the task at hand (A7).

Labels are assigned at random in every task, so row c of a head gradient means another class in every
slot. With class prototypes remembered beside the gradient, the best matching of classes is a linear
assignment problem.
"""

from itertools import permutations
from math import factorial

import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.tree import with_rows
from torchemo.core.types import Params, Recall

_FEW = factorial(6)


def match_classes(
    prototypes: Float[Tensor, "task way dim"], recalled: Float[Tensor, "task m known dim"]
) -> Int[Tensor, "task m way"]:
    """Find pi minimising ``sum_c ||p_c - p'_pi(c)||^2`` for every task and recalled slot.

    Args:
        prototypes: p_c of the task at hand.
        recalled: p'_c of the recalled tasks, in their own label order.

    Returns:
        pi: class c of the task at hand corresponds to class pi(c) of the recalled one; -1 to none, where it
            has fewer.
    """
    # [task, m, way, way]: cost of giving our class c the recalled class c'.
    cost = (prototypes[:, None, :, None] - recalled[:, :, None, :]).detach().square().sum(-1)
    way, known = cost.shape[2:]
    if way == known and factorial(way) <= _FEW:
        orders = torch.tensor(list(permutations(range(way))), device=cost.device)
        totals = torch.stack([cost[..., c, orders[:, c]] for c in range(way)]).sum(0)
        return orders[totals.argmin(-1)]
    flat = cost.flatten(0, 1).double().cpu().numpy()
    assigned = torch.full((len(flat), way), -1, device="cpu")
    for place, one in zip(assigned, flat, strict=True):
        ours, theirs = linear_sum_assignment(one)
        place[ours] = torch.from_numpy(theirs)
    return assigned.view(*cost.shape[:3]).to(cost.device)


def align_heads(
    recall: Recall,
    prototypes: Float[Tensor, "task way dim"],
    *,
    head: tuple[str, ...],
    class_axis: int = 2,
) -> Recall:
    """Permute the class rows of the recalled ``head`` values to the task's own label order.

    Args:
        recall: A recall whose notes hold the ``prototypes`` of the remembered tasks.
        prototypes: Class prototypes of the tasks at hand.
        head: Names of the head tensors.
        class_axis: Axis of a recalled head value ``[B, m, ...]`` that counts classes.
    """
    if recall.m == 0:
        return recall
    if recall.notes is None or "prototypes" not in recall.notes:
        raise ConfigError(
            "head alignment: the memory holds no class prototypes of its tasks.",
            hint="Fill the memory with head alignment switched on from the start.",
        )
    order = match_classes(prototypes, recall.notes["prototypes"].to(prototypes.dtype))
    values: Params = dict(recall.values)
    for name in head:
        if name in values:
            value = values[name]
            shape = [*order.shape[:2], *(1,) * (value.dim() - 2)]
            shape[class_axis] = order.shape[2]
            place = order.view(shape)
            found = torch.take_along_dim(value, place.clamp(min=0), dim=class_axis)
            mean = value.mean(class_axis, keepdim=True)
            values[name] = torch.where(place >= 0, found, mean)
    return recall._replace(values=values)


def resize_heads(
    recall: Recall, n_way: int, *, head: tuple[str, ...], class_axis: int, keep: bool = False
) -> Recall:
    """Give recalled ``head`` values ``n_way`` class rows, as `torchemo.core.tree.with_rows` does."""
    values = {
        n: with_rows(v, n_way, axis=class_axis, keep=keep) if n in head else v
        for n, v in recall.values.items()
    }
    return recall._replace(values=values)
