"""The memories of many users as tensors: `torchemo.memory.lifelong.memory` for all of them at once."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torchemo.core.types import Params, Recall
from torchemo.memory.controllers import Controller
from torchemo.memory.ledger import Ledger
from torchemo.memory.lifelong.memory import LifelongMemory

NONE = -1
"""Number of a class that is not known."""
TINY = torch.finfo(torch.float32).tiny

Parts: TypeAlias = Float[Tensor, "task slot way then"]
"""How much every class at hand was each class of each visit: all or nothing, or its share."""


@final
class Bank:
    """Past visits of U users.

    Args:
        users: How many users.
        length: Most visits of a user.
        way: Classes of a task.
        head: Tensors whose rows belong to classes; these are stored with the rows first.
        axes: How many axes of a stored value stand before its shape (`torchemo.memory.values`).
    """

    def __init__(
        self,
        users: int,
        length: int,
        way: int,
        *,
        head: Sequence[str] = (),
        axes: int = 1,
    ) -> None:
        self.head, self.axes = frozenset(head), axes
        self.values: Params = {}
        self.sums: Params = {}
        self.counts = torch.zeros(users, length * way, dtype=torch.int64)
        self.truth = torch.full((users, length * way), NONE)
        self.written = torch.zeros(users, dtype=torch.int64)
        self.controller: Controller | None = None
        self._ledgers: list[Ledger] = []
        self._empty(users, length, way)

    def _empty(self, users: int, slots: int, way: int) -> None:
        self.slots = slots
        self.classes = torch.full((users, slots, way), NONE)
        self.examples = torch.zeros(users, slots)
        self.domain = torch.full((users, slots), NONE)
        self.task = torch.full((users, slots), NONE)

    def limit(self, slots: int, controller: Controller) -> None:
        """Keep so many visits of each user, and let a controller say which are forgotten."""
        users, _, way = self.classes.shape
        self._empty(users, slots, way)
        self.controller = controller
        self._ledgers = [Ledger.empty(slots) for _ in range(users)]

    def known(self, users: Tensor, space: str) -> tuple[Float[Tensor, "task known dim"], Tensor]:
        """Return the means of all classes that users know, and of how many examples they are."""
        counts = self.counts[users]
        return self.sums[space][users] / counts.clamp(min=1)[..., None], counts

    @property
    def used(self) -> int:
        """Number of slots that any user has filled."""
        return min(self.slots, int(self.written.max()))

    def parts(self, users: Tensor, found: Int[Tensor, "task way"]) -> Parts:
        """Return which class of each visit every class at hand was: one or none."""
        there = self.classes[users, : self.used][:, :, None] == found[:, None, :, None]
        return (there & (found != NONE)[:, None, :, None]).to(self.examples)

    def recall(
        self, users: Tensor, parts: Parts, *, own: float, k: int | None = None, pooled: bool = True
    ) -> Recall:
        """Recall visits, aligned to the labels of the tasks.

        Args:
            users: Whose memories.
            parts: How much every class at hand was each class of each visit.
            own: Examples at hand.
            k: Most visits, the latest.
            pooled: Recall all visits of a task as one of as many examples, with the mean of their gradients.
                The direction of an inner step is the same, where it is linear in them.
        """
        used = parts.flatten(2).any(2)
        # Used slots first, the latest of them before all others.
        order = torch.where(used, torch.arange(used.shape[1]), NONE).sort(1, descending=True)
        if k is not None:
            used &= torch.zeros_like(used).scatter(1, order.indices[:, :k], value=True)
            parts = parts * used[..., None, None]
        m = int(used.sum(1).max()) if used.numel() else 0
        if m and pooled:
            return self._pooled(users, parts, own)
        slots = order.indices[:, :m]
        parts = parts.gather(1, slots[..., None, None].expand(-1, -1, *parts.shape[2:]))
        each = parts.sum(3)
        rows = each * self.examples[users[:, None], slots][..., None]
        within = parts / each.clamp(min=TINY)[..., None]
        values = self._values(users, slots, within) if m else {}
        return recalled(slots, rows.mean(2), values, rows, own)

    def _pooled(self, users: Tensor, parts: Parts, own: float) -> Recall:
        tasks, used, way, _ = parts.shape
        shares = parts * self.examples[users, :used, None, None]
        rows = shares.sum(3)
        weights, total = rows.mean(2), rows.sum(1)
        mix = shares.transpose(1, 2).flatten(2) / total.clamp(min=TINY)[..., None]
        among = weights / weights.sum(1, keepdim=True).clamp(min=TINY)
        values: Params = {}
        for name, kept in self._kept(users).items():
            if name in self.head:  # [task, slot, then, ...]: one product for all visits
                mean = mix @ kept[:, :used].flatten(1, 2).flatten(2)
                value = mean.view(tasks, way, *kept.shape[3:]).movedim(1, 1 + self.axes)
            else:
                mean = among[:, None] @ kept[:, :used].flatten(2)
                value = mean.view(tasks, *kept.shape[2:])
            values[name] = value[:, None]
        slots = torch.zeros(tasks, 1, dtype=torch.int64)
        return recalled(slots, weights.sum(1, keepdim=True), values, total[:, None], own)

    def _values(self, users: Tensor, slots: Tensor, within: Tensor) -> Params:
        found, rows = {}, torch.arange(len(users))[:, None]
        for name, kept in self._kept(users).items():
            value = kept[rows, slots]
            if name in self.head:
                mixed = (within @ value.flatten(3)).view(*within.shape[:3], *value.shape[3:])
                value = mixed.movedim(2, 2 + self.axes)
            found[name] = value
        return found

    def _kept(self, users: Tensor) -> Params:
        """Return the stored gradients of some users; classifiers of past visits are none."""
        everyone = torch.equal(users, torch.arange(len(self.examples)))
        return {
            name: kept if everyone else kept[users]
            for name, kept in self.values.items()
            if "/" not in name
        }

    def touch(self, users: Tensor, parts: Parts) -> None:
        """Note which visits were recalled."""
        if self.controller is None:
            return
        used = parts.flatten(2).any(2)
        for user, row in zip(users.tolist(), used, strict=True):
            ledger = self._ledgers[user]
            recalled = row.nonzero()[:, 0]
            if len(recalled):
                oldest_first = recalled[ledger.written[recalled].argsort()]
                self.controller.touch(ledger, oldest_first.flip(0))

    def write(
        self,
        users: Tensor,
        classes: Int[Tensor, "task way"],
        truth: Int[Tensor, "task way"],
        shots: Int[Tensor, "task way"],
        *,
        means: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        company: tuple[Tensor, Tensor],
    ) -> None:
        """Keep visits; classes are numbered by what they were recognised as, or anew.

        ``company`` is the domain and the task of each, for controls that recall others.
        """
        slots = torch.tensor([self._slot(user) for user in users.tolist()])
        if self.controller is not None:
            self._forget(users, slots)
        self.classes[users, slots] = classes
        self.examples[users, slots] = shots.sum(1).to(self.examples)
        self.domain[users, slots], self.task[users, slots] = company
        for name, given in values.items():
            value = given.movedim(1 + self.axes, 1) if name in self.head else given
            if name not in self.values:
                # Slots that are not used yet are recalled with weight zero, so they must be finite.
                self.values[name] = value.new_zeros(*self.examples.shape, *value.shape[1:])
            self.values[name][users, slots] = value
        rows = users[:, None].expand_as(classes)
        for space, mean in means.items():
            if space not in self.sums:
                self.sums[space] = mean.new_zeros(*self.counts.shape, mean.shape[2])
            self.sums[space].index_put_((rows, classes), mean * shots[..., None], accumulate=True)
        self.counts.index_put_((rows, classes), shots, accumulate=True)
        fresh = self.truth[rows, classes] == NONE
        self.truth[rows[fresh], classes[fresh]] = truth[fresh]
        self.written[users] += 1

    def _slot(self, user: int) -> int:
        count = int(self.written[user])
        if self.controller is None:
            return count
        ledger = self._ledgers[user]
        slot = count if count < self.slots else self.controller.victim(ledger)
        self.controller.wrote(ledger, slot)
        ledger.filled.fill_(min(count + 1, self.slots))
        return slot

    def _forget(self, users: Tensor, slots: Tensor) -> None:
        self.classes[users, slots] = NONE


def recalled(slots: Tensor, weights: Tensor, values: Params, rows: Tensor, own: float) -> Recall:
    """Return a recall as `LifelongMemory.recall` makes it."""
    return Recall(
        keys=torch.zeros(len(slots), 0),
        slots=slots,
        distances=torch.zeros(slots.shape),
        weights=weights,
        values=values,
        generations=torch.zeros_like(slots),
        active=(weights > 0).any(1),
        notes={LifelongMemory.ROWS: rows},
        own_notes={LifelongMemory.OWN: torch.full((len(slots),), own)},
    )


def nothing_like(recall: Recall) -> Recall:
    """Return a recall of no visit, in the form of another one."""
    return recall._replace(
        weights=torch.zeros_like(recall.weights),
        values={name: torch.zeros_like(value) for name, value in recall.values.items()},
        active=torch.zeros_like(recall.active),
        notes={name: torch.zeros_like(note) for name, note in (recall.notes or {}).items()},
    )


def noisy(recall: Recall, generator: torch.Generator) -> Recall:
    """Put random numbers with the norm of each stored gradient in its place."""
    found = {}
    for name, value in recall.values.items():
        noise = torch.randn(value.shape, generator=generator)
        size = [t.flatten(3).norm(dim=3) for t in (value, noise)]
        scale = size[0] / size[1].clamp(min=1e-12)
        found[name] = noise * scale.view(*scale.shape, *(1,) * (value.dim() - 3))
    return recall._replace(values=found)
