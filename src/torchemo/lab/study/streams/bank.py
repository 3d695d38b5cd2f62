"""The memories of many users as tensors: `torchemo.memory.lifelong.memory` for all of them at once."""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torchemo.core.types import Params, Recall
from torchemo.memory.controllers import Controller
from torchemo.memory.ledger import Ledger
from torchemo.memory.lifelong.memory import LifelongMemory

NONE = -1
"""Number of a class that is not known."""


@final
class Bank:
    """Past visits of U users.

    Args:
        users: How many users.
        length: Most visits of a user.
        way: Classes of a task.
        capacity: Visits that are kept of each; None keeps all.
        controller: What a full memory forgets.
    """

    def __init__(
        self,
        users: int,
        length: int,
        way: int,
        *,
        capacity: int | None = None,
        controller: Controller | None = None,
    ) -> None:
        self.slots = length if capacity is None else capacity
        self.classes = torch.full((users, self.slots, way), NONE)
        self.examples = torch.zeros(users, self.slots)
        self.values: Params = {}
        self.sums: Params = {}
        self.counts = torch.zeros(users, length * way, dtype=torch.int64)
        self.truth = torch.full((users, length * way), NONE)
        self.domain = torch.full((users, self.slots), NONE)
        self.task = torch.full((users, self.slots), NONE)
        self.written = torch.zeros(users, dtype=torch.int64)
        self.controller = controller
        self._ledgers = (
            [Ledger.empty(self.slots) for _ in range(users)] if controller is not None else []
        )

    def known(self, users: Tensor, space: str) -> tuple[Float[Tensor, "task known dim"], Tensor]:
        """Return the means of all classes that users know, and of how many examples they are."""
        counts = self.counts[users]
        return self.sums[space][users] / counts.clamp(min=1)[..., None], counts

    def matches(self, users: Tensor, found: Int[Tensor, "task way"]) -> tuple[Tensor, Tensor]:
        """Return which visits had which classes, and under which labels.

        Returns:
            ``[task, slot, way]``: whether the visit had the class, and the label it had there.
        """
        there = self.classes[users][:, :, :, None] == found[:, None, None, :]
        there &= (found != NONE)[:, None, None, :]
        return there.any(2), there.to(torch.int8).argmax(2)

    def recall(
        self,
        users: Tensor,
        matched: Tensor,
        labels: Tensor,
        *,
        own: float,
        head: Sequence[str],
        steps_axis: int,
        k: int | None = None,
    ) -> Recall:
        """Recall visits, aligned to the labels of the tasks.

        Args:
            users: Whose memories.
            matched: Which visits, for which classes, ``[task, slot, way]``.
            labels: The label that each class had there.
            own: Examples at hand.
            head: Tensors whose rows belong to classes.
            steps_axis: 1 if stored values have an axis of steps, else 0.
            k: Most visits, the latest.
        """
        used = matched.any(2)
        m = int(used.sum(1).max()) if k is None else min(k, int(used.sum(1).max()))
        # Used slots first, the latest of them before all others.
        order = torch.where(used, torch.arange(used.shape[1]), NONE)
        slots = order.sort(1, descending=True).indices[:, :m]
        pick = slots[..., None].expand(-1, -1, matched.shape[2])
        matched, labels = matched.gather(1, pick), labels.gather(1, pick)
        rows = matched * self.examples[users[:, None], slots][..., None]
        values = self._values(users, slots, matched, labels, head, steps_axis) if m else {}
        weights = rows.mean(2)
        return recalled(slots, weights, values, rows, own)

    def _values(
        self,
        users: Tensor,
        slots: Tensor,
        matched: Tensor,
        labels: Tensor,
        head: Sequence[str],
        steps_axis: int,
    ) -> Params:
        found = {}
        for name, kept in self.values.items():
            if "/" in name:
                continue  # classifiers of past visits, which are not joined to steps
            value = kept[users[:, None], slots]
            if name in head:
                value = _aligned(value, labels, matched, axis=2 + steps_axis)
            found[name] = value
        return found

    def touch(self, users: Tensor, matched: Tensor) -> None:
        """Note which visits were recalled."""
        if self.controller is None:
            return
        used = matched.any(2)
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
        for name, value in values.items():
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


def _aligned(value: Tensor, labels: Tensor, matched: Tensor, *, axis: int) -> Tensor:
    """Put rows of the head where the task at hand has their classes; others are zero."""
    shape = [*labels.shape[:2], *(1,) * (value.dim() - 2)]
    shape[axis] = labels.shape[2]
    index = labels.view(shape).expand(
        *value.shape[:axis], labels.shape[2], *value.shape[axis + 1 :]
    )
    return value.gather(axis, index) * matched.view(shape).to(value)
