"""Recall in shares for many users at once: the twin of `torchemo.memory.lifelong.shares`."""

from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor

from torchemo.lab.study.streams.bank import NONE, Bank, Parts
from torchemo.lab.study.streams.finders import Look, likelihood_ratios
from torchemo.memory.lifelong.shares import LEAST_SHARE, in_shares

Shares: TypeAlias = Float[Tensor, "task way known"]


def shares_of(look: Look, bank: Bank, *, trust: float, new: float) -> Shares | None:
    """Return the probability that each class of each task is each known class; None if none is known."""
    if bank.used == 0:
        return None
    return in_shares(likelihood_ratios(look, bank), trust, new)


def parts_of(bank: Bank, users: Tensor, shares: Shares) -> Parts:
    """Return the probability that class c of a task was label l at each visit that is recalled."""
    classes = bank.classes[users, : bank.used]
    tasks, slots, way = classes.shape
    columns = classes.clamp(min=0).view(tasks, 1, -1).expand(-1, shares.shape[1], -1)
    found = shares.gather(2, columns).view(tasks, shares.shape[1], slots, way).transpose(1, 2)
    found = found * (classes != NONE)[:, :, None]
    return found * (found >= LEAST_SHARE).flatten(2).any(2)[..., None, None]


def centres_of(
    bank: Bank, users: Tensor, shares: Shares, means: Tensor, shots: Tensor, space: str
) -> tuple[Tensor, Tensor]:
    """Return the class means over all visits as far as they are shared, and of how many examples."""
    past = shares @ bank.sums[space][users]
    counts = shots + (shares @ bank.counts[users].to(shares)[..., None])[..., 0]
    return (shots[..., None] * means + past) / counts[..., None], counts
