"""Finding past visits of many users at once: the twins of `torchemo.memory.lifelong.recognise`."""

from collections.abc import Callable
from functools import cache
from itertools import permutations
from typing import NamedTuple, TypeAlias, final

import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import normalize

from torchemo.core.errors import ConfigError
from torchemo.core.types import Params
from torchemo.lab.study.streams.bank import NONE, Bank
from torchemo.lab.study.streams.users import Moment
from torchemo.lab.study.streams.visits import Find
from torchemo.memory.lifelong.ratio import SameClass

Names: TypeAlias = Int[Tensor, "task way"]
"""Number of the known class that each class of a task is, or `NONE`."""

NEVER = -torch.inf


class Look(NamedTuple):
    """What is seen of the support sets of B users.

    Attributes:
        moment: The visits.
        space: Feature space in which classes are compared.
        means: Class means of the support examples, ``{space: [task, way, dim]}``.
        shots: Examples of each class.
        ratio: Class means along the directions of `same`, if there is one.
        same: What tells classes apart.
        loglikelihood: ``(bank) -> [task, slot, way now, way then]``: how likely the labels at hand
            are to the classifiers of past visits.
    """

    moment: Moment
    space: str
    means: Params
    shots: Int[Tensor, "task way"]
    same: SameClass | None
    loglikelihood: Callable[[Bank], Tensor]


@final
class Numbers:
    """Numbers of the classes that each user knows."""

    def __init__(self, users: int) -> None:
        self.by_key: list[dict[tuple[int, int], int]] = [{} for _ in range(users)]
        self.count = [0] * users

    def told(self, moment: Moment, *, by_task: bool, at: int) -> Names:
        """Return the numbers of classes that somebody names, `NONE` for new ones."""
        return torch.tensor(
            [
                [self.by_key[user].get(key, NONE) for key in keys]
                for user, keys in _keys(moment, by_task=by_task, at=at)
            ]
        )

    def named(self, moment: Moment, found: Names, *, by_task: bool | None, at: int) -> Names:
        """Return ``found`` with new numbers for classes that are new; None: nobody names them."""
        rows = []
        told = by_task is not None
        for (user, keys), known in zip(
            _keys(moment, by_task=bool(by_task), at=at), found.tolist(), strict=True
        ):
            row = []
            for key, number in zip(keys, known, strict=True):
                chosen = self.by_key[user].get(key, NONE) if told else number
                if chosen == NONE:
                    chosen = self.count[user]
                    self.count[user] += 1
                    self.by_key[user][key] = chosen
                row.append(chosen)
            rows.append(row)
        return torch.tensor(rows)


def _keys(moment: Moment, *, by_task: bool, at: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return what stands for each class of each user: its name, and the task where tasks are told."""
    found = []
    for user, task, classes in zip(
        moment.users.tolist(), moment.task.tolist(), moment.classes.tolist(), strict=True
    ):
        company = (task if task >= 0 else -1 - at) if by_task else 0
        found.append((user, [(company, c) for c in classes]))
    return found


def find(kind: Find, threshold: float, look: Look, bank: Bank) -> Names:
    """Return which known classes the classes of B tasks are, from their examples alone."""
    nothing = torch.full_like(look.moment.classes, NONE)
    if int(bank.written.max()) == 0:
        return nothing
    if kind == "likelihood":
        return _best_task(look.loglikelihood(bank), threshold, look, bank)
    if kind == "mean":
        return _by_mean(threshold, look, bank)
    alike = likelihood_ratios(look, bank) if kind.endswith("ratio") else _cosines(look, bank)
    if kind.startswith("class"):
        sure = alike >= threshold
        gains = alike if kind == "class cosine" else alike - threshold
        return _by_class(torch.where(sure, gains, 0.0), sure)
    return _best_task(_by_slot(alike, look, bank), threshold, look, bank)


def _cosines(look: Look, bank: Bank) -> Float[Tensor, "task way known"]:
    known, counts = bank.known(look.moment.users, look.space)
    cosines = normalize(look.means[look.space], dim=2) @ normalize(known, dim=2).mT
    return cosines.masked_fill((counts == 0)[:, None], NEVER)


def likelihood_ratios(look: Look, bank: Bank) -> Float[Tensor, "task way known"]:
    """Return how much more likely a class at hand and a known class are one than two."""
    if look.same is None:
        raise ConfigError("without known classes there is nothing to learn likelihood ratios from.")
    known, counts = bank.known(look.moment.users, "ratio")
    ratios = look.same.ratios(look.means["ratio"], look.shots, known, counts.clamp(min=1))
    return ratios.masked_fill((counts == 0)[:, None], NEVER)


def _by_class(gains: Tensor, sure: Tensor) -> Names:
    """Assign classes one to one, where that is sure enough."""
    found = torch.full(gains.shape[:2], NONE)
    for b, one in enumerate(gains.double().numpy()):
        for row, column in zip(*linear_sum_assignment(-one), strict=True):
            if sure[b, row, column]:
                found[b, row] = int(column)
    return found


def _by_slot(alike: Tensor, look: Look, bank: Bank) -> Float[Tensor, "task slot way then"]:
    """Compare the classes of each task with those of each visit."""
    classes = bank.classes[look.moment.users]
    b, slots, way = classes.shape
    columns = classes.clamp(min=0).view(b, 1, slots * way).expand(-1, way, -1)
    pairs = alike.gather(2, columns).view(b, way, slots, way).transpose(1, 2)
    return pairs.masked_fill((classes == NONE)[:, :, None], NEVER)


def _best_task(pairs: Tensor, threshold: float, look: Look, bank: Bank) -> Names:
    """Choose the visit whose classes fit best under optimal assignment, if they do well enough."""
    orders = _orders(pairs.shape[-1])
    picked = pairs[:, :, torch.arange(pairs.shape[-1]), orders]  # [task, slot, order, way]
    scores = picked.mean(3)
    best, order = scores.max(2)
    score, slot = best.max(1)
    rows = torch.arange(len(pairs))
    labels = orders[order[rows, slot]]
    found = bank.classes[look.moment.users][rows, slot].gather(1, labels)
    return torch.where((score >= threshold)[:, None], found, NONE)


def _by_mean(threshold: float, look: Look, bank: Bank) -> Names:
    """Choose the visit with the nearest mean of all examples; align it by its classes."""
    users = look.moment.users
    known, _ = bank.known(users, look.space)
    classes = bank.classes[users]
    b, slots, way = classes.shape
    index = classes.clamp(min=0).view(b, slots * way, 1).expand(-1, -1, known.shape[2])
    centres = known.gather(1, index).view(b, slots, way, -1).mean(2)
    own = look.means[look.space].mean(1)
    cosines = (normalize(centres, dim=2) @ normalize(own, dim=1)[:, :, None])[..., 0]
    cosines = cosines.masked_fill(classes[:, :, 0] == NONE, NEVER)
    score, slot = cosines.max(1)
    pairs = _by_slot(_cosines(look, bank), look, bank)
    others = torch.arange(slots) != slot[:, None]
    found = _best_task(pairs.masked_fill(others[..., None, None], NEVER), -2.0, look, bank)
    return torch.where((score >= threshold)[:, None], found, NONE)


@cache
def _orders(way: int) -> Int[Tensor, "order way"]:
    return torch.tensor(list(permutations(range(way))))
