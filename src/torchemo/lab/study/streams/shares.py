"""Recall in shares for many users at once: the twin of `torchemo.memory.lifelong.shares`."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.types import Params, Recall
from torchemo.lab.study.streams.bank import NONE, Bank, recalled
from torchemo.lab.study.streams.finders import Look, likelihood_ratios
from torchemo.memory.lifelong.shares import LEAST_SHARE, in_shares

Shares: TypeAlias = Float[Tensor, "task way known"]


def shares_of(look: Look, bank: Bank, *, trust: float, new: float) -> Shares | None:
    """Return the probability that each class of each task is each known class; None if none is known."""
    if int(bank.written.max()) == 0:
        return None
    return in_shares(likelihood_ratios(look, bank), trust, new)


def recall_shares(
    bank: Bank, users: Tensor, shares: Shares, *, own: float, head: Sequence[str], steps_axis: int
) -> Recall:
    """Recall the expected gradients of past visits."""
    parts = _by_visit(bank, users, shares)
    used = (parts >= LEAST_SHARE).flatten(2).any(2)
    slots = torch.arange(used.shape[1]).expand_as(used)
    parts = parts * used[..., None, None]
    each = parts.sum(3)
    rows = each * bank.examples[users][..., None]
    within = parts / each.clamp(min=torch.finfo(parts.dtype).tiny)[..., None]
    values: Params = {}
    for name, kept in bank.values.items():
        value = kept[users]
        values[name] = _mixed(value, within, axis=2 + steps_axis) if name in head else value
    return recalled(slots, rows.mean(2), values, rows, own)


def _by_visit(bank: Bank, users: Tensor, shares: Shares) -> Float[Tensor, "task slot way then"]:
    """Return the probability that class c of a task was label l at each visit."""
    classes = bank.classes[users]
    tasks, slots, way = classes.shape
    columns = classes.clamp(min=0).view(tasks, 1, -1).expand(-1, shares.shape[1], -1)
    found = shares.gather(2, columns).view(tasks, shares.shape[1], slots, way).transpose(1, 2)
    return found * (classes != NONE)[:, :, None]


def _mixed(value: Tensor, parts: Tensor, *, axis: int) -> Tensor:
    """Mix the rows of every visit: ``[task, slot, ..., then, ...]`` to ``[task, slot, ..., way, ...]``."""
    rows = value.movedim(axis, 2)
    return (parts @ rows.flatten(3)).view_as(rows).movedim(2, axis)


def centres_of(
    bank: Bank, users: Tensor, shares: Shares, means: Tensor, shots: Tensor, space: str
) -> tuple[Tensor, Tensor]:
    """Return the class means over all visits as far as they are shared, and of how many examples."""
    past = shares @ bank.sums[space][users]
    counts = shots + (shares @ bank.counts[users].to(shares)[..., None])[..., 0]
    return (shots[..., None] * means + past) / counts[..., None], counts
