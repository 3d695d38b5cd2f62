"""The lifelong memory: past visits of tasks, recognised, recalled and joined to inner steps."""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, TypeAlias, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Params, Recall
from torchemo.memory.bound import BoundMemory
from torchemo.memory.controllers import LRU, Controller
from torchemo.memory.interface import check_choice
from torchemo.memory.ledger import Ledger
from torchemo.memory.lifelong.recognise import Names, Recogniser
from torchemo.memory.lifelong.shares import LEAST_SHARE, Sharing
from torchemo.memory.lifelong.visits import Known, KnownClass, PastVisit, Sight, pooled_mean
from torchemo.memory.values import at_step, leading_axes

Join: TypeAlias = Literal["mean", "sum"]
Kept: TypeAlias = Literal["per_step", "secant", "gauss_newton"]


class Recognised(NamedTuple):
    """What the memory makes of a task.

    Attributes:
        names: Known name of each class, None for a class that is new.
        slots: Visits that share a class with it, oldest first.
        visits: How often each class was there before.
        last: When it was there last, if that is known.
        shares: Where it is not sure: the probability of each known class, ``{name: [way]}``.
    """

    names: Names
    slots: tuple[int, ...]
    visits: tuple[int, ...]
    last: str
    shares: Params | None = None


@final
class LifelongMemory:
    """Past visits of tasks, and what they add to the inner steps of a task that comes back.

    The direction of step s is the gradient of all examples together, as far as it is known: with n examples
    at hand and n_j at the j-th past visit,

        (n g_s + sum_j n_j v_js) / (n + sum_j n_j).

    For visits of equal size this is the paper's Mean (Eq. 8). Rows of the head belong to classes: a row is
    recalled from the visits that had its class. All other tensors count the shared part of a visit.

    Args:
        recogniser: Says which known classes a task has.
        head: Names of the head tensors; their first axis counts classes.
        capacity: Most visits to keep; None keeps all.
        controller: Which visit a full memory forgets.
        content: ``per_step`` gradients, the same with a rank-one curvature (``secant``), or one gradient with
            the curvature of all its examples (``gauss_newton``), see `torchemo.memory.values`.
        join: ``mean`` as above, or ``sum``: g_s + sum_j v_js (Eq. 9).

    Example:
        >>> from torchemo.memory.lifelong.recognise import ByName
        >>> memory = LifelongMemory(ByName())
        >>> sight = Sight(shots=(1,), means={}, names=("my curve",))
        >>> _ = memory.remember(sight, memory.recognise(sight), {"w": torch.tensor([[3.0]])})
        >>> recall = memory.recall([sight], [memory.recognise(sight)], shapes={"w": (1,)})
        >>> memory.combine({"w": torch.tensor([[1.0]])}, recall)["w"]
        tensor([[2.]])
    """

    OWN: ClassVar[str] = "examples"
    ROWS: ClassVar[str] = "rows"

    def __init__(
        self,
        recogniser: Recogniser,
        *,
        head: tuple[str, ...] = (),
        capacity: int | None = None,
        controller: Controller | None = None,
        content: Kept = "per_step",
        join: Join = "mean",
    ) -> None:
        check_choice("content", content, get_args(Kept))
        check_choice("join", join, get_args(Join))
        if capacity is not None and capacity < 1:
            raise ConfigError(f"capacity should be None, or 1 or more; got {capacity}.")
        self.recogniser = recogniser
        self.head = head
        self.capacity = capacity
        self.controller = LRU() if controller is None else controller
        self.content: Kept = content
        self.join: Join = join
        self.visits: list[PastVisit] = []
        self._ledger = Ledger.empty(capacity or 0)
        self._born = 0
        self._known: Known | None = None

    def __len__(self) -> int:
        return len(self.visits)

    def __repr__(self) -> str:
        return f"LifelongMemory({len(self)} visits of {len(self.known().tasks)} tasks)"

    # -- recognise ---------------------------------------------------------------------------------

    def known(self) -> Known:
        """Return all known classes, and the sets in which they came."""
        if self._known is None:
            self._known = self._survey()
        return self._known

    def _survey(self) -> Known:
        slots: dict[str, list[int]] = {}
        for slot in self._oldest_first():
            for name in self.visits[slot].classes:
                slots.setdefault(name, []).append(slot)
        classes = {name: self._class(name, where) for name, where in slots.items()}
        tasks = dict.fromkeys(tuple(sorted(visit.classes)) for visit in self.visits)
        return Known(classes, tuple(tasks))

    def _class(self, name: str, slots: list[int]) -> KnownClass:
        parts = [self._part(self.visits[slot], name) for slot in slots]
        spaces = parts[0][1] if parts else {}
        means = {space: pooled_mean([(n, m[space]) for n, m in parts]) for space in spaces}
        return KnownClass(name, tuple(slots), means, sum(n for n, _ in parts))

    @staticmethod
    def _part(visit: PastVisit, name: str) -> tuple[int, Params]:
        label = visit.classes.index(name)
        return visit.sight.shots[label], {s: m[label] for s, m in visit.sight.means.items()}

    def recognise(self, sight: Sight) -> Recognised:
        """Return which known classes a task has, and which visits had them."""
        known = self.known()
        names, shares = self.recogniser.recognise(sight, known), None
        found = {name: known.classes[name].visits for name in names if name is not None}
        slots = {slot for visits in found.values() for slot in visits}
        if isinstance(self.recogniser, Sharing):
            columns = self.recogniser.shares(sight, known).unbind(1)
            shares = dict(zip(known.classes, columns, strict=True))
            probable = [n for n, share in shares.items() if bool(share.max() >= LEAST_SHARE)]
            slots = {slot for name in probable for slot in known.classes[name].visits}
        ordered = tuple(slot for slot in self._oldest_first() if slot in slots)
        counts = tuple(0 if n is None else len(found[n]) for n in names)
        last = [slot for slot in ordered if any(slot in visits for visits in found.values())]
        return Recognised(
            names, ordered, counts, self.visits[last[-1]].when if last else "", shares
        )

    def means_with(self, sight: Sight, recognised: Recognised) -> Params:
        """Return the class means of a task over all its visits, this one included."""
        parts = [self._alike(recognised, c) for c in range(sight.way)]
        return {
            space: torch.stack(
                [
                    pooled_mean([(sight.shots[c], own[c]), *[(n, k.means[space]) for n, k in some]])
                    if some
                    else own[c]
                    for c, some in enumerate(parts)
                ]
            )
            for space, own in sight.means.items()
        }

    def examples_with(self, sight: Sight, recognised: Recognised) -> float:
        """Return how many examples a class of a task has on average over all its visits."""
        past = [n for c in range(sight.way) for n, _ in self._alike(recognised, c)]
        return (sum(sight.shots) + sum(past)) / sight.way

    def _alike(self, recognised: Recognised, label: int) -> list[tuple[float, KnownClass]]:
        """Return the known classes that a class may be, with the number of examples that count."""
        known = self.known().classes
        if recognised.shares is None:
            name = recognised.names[label]
            return [] if name is None else [(known[name].examples, known[name])]
        some = ((n, float(share[label])) for n, share in recognised.shares.items())
        return [(known[n].examples * share, known[n]) for n, share in some if share > 0]

    # -- recall ------------------------------------------------------------------------------------

    def recall(
        self,
        sights: Sequence[Sight],
        recognised: Sequence[Recognised],
        *,
        shapes: Mapping[str, Sequence[int]],
    ) -> Recall:
        """Recall the past visits of B tasks, aligned to their labels.

        Args:
            sights: What is seen of the tasks; all have the same number of classes.
            recognised: What `recognise` said of them.
            shapes: Names and shapes of the tensors that inner steps move.
        """
        m = max((len(one.slots) for one in recognised), default=0)
        padded = [[*one.slots, *[-1] * (m - len(one.slots))] for one in recognised]
        slots = torch.tensor(padded, device="cpu").long().view(len(recognised), m)
        orders = [[self._order(slot, one) for slot in one.slots] for one in recognised]
        way = sights[0].way
        rows = torch.zeros(len(sights), m, way, device="cpu")
        for b, one in enumerate(orders):
            for j, order in enumerate(one):
                rows[b, j] = _part_of(order) * float(self.visits[int(slots[b, j])].examples)
        values = {
            name: self._values(name, shape, slots, orders)
            for name, shape in (shapes if m else {}).items()
        }
        own = torch.tensor([float(sum(s.shots)) for s in sights], device="cpu")
        return recalled(slots, values, rows=rows, own=own)

    def _order(self, slot: int, one: Recognised) -> Tensor:
        """Return where the classes at hand are in a visit.

        This is the label that each class had there, -1 where it was not there. Where classes have shares,
        it is the probability that class c was label l there, ``[way, way there]``.
        """
        there, names = self.visits[slot].classes, one.names
        if one.shares is not None:
            return torch.stack([one.shares[name] for name in there], 1)
        return torch.tensor(
            [there.index(n) if n is not None and n in there else -1 for n in names], device="cpu"
        )

    def _values(
        self, name: str, shape: Sequence[int], slots: Tensor, orders: list[list[Tensor]]
    ) -> Float[Tensor, "task m ..."]:
        """Stack the recalled values of a tensor; absent visits and rows are zero."""
        axes, used = leading_axes(self.content), {s for s in slots.flatten().tolist() if s >= 0}
        each = [self.visits[slot].values[name].shape[:axes] for slot in used]
        # Visits of fewer examples have fewer factors of curvature: further ones are zero.
        leading = [max(sizes) for sizes in zip(*each, strict=True)]
        found = self.visits[0].values[name].new_zeros(*slots.shape, *leading, *shape)
        for b, one in enumerate(orders):
            for j, order in enumerate(one):
                kept = self.visits[int(slots[b, j])].values[name]
                place = found[b, j] if axes < 2 else found[b, j, :, : kept.shape[1]]
                place[:] = _aligned(kept, order, axes) if name in self.head else kept
        return found

    # -- use ---------------------------------------------------------------------------------------

    def bind(self, recall: Recall) -> BoundMemory:
        """Hold a recall for an inner loop."""
        return BoundMemory(self, recall)

    def combine(
        self, grads: Params, recall: Recall, *, step: int = 0, theta: Params | None = None
    ) -> Params:
        """Return the direction of inner step ``step``: the gradient of all visits' examples."""
        if recall.m == 0 or recall.notes is None or recall.own_notes is None:
            return grads
        names = [n for n in grads if n in recall.values]
        values = at_step({n: recall.values[n] for n in names}, self.content, step, theta)
        joined = {}
        for name in names:
            weights = recall.notes[self.ROWS] if name in self.head else recall.weights
            joined[name] = self._joined(
                grads[name], values[name], weights, recall.own_notes[self.OWN]
            )
        return grads | joined

    def _joined(self, own: Tensor, past: Tensor, weights: Tensor, examples: Tensor) -> Tensor:
        weights = weights.to(own).view(*weights.shape, *(1,) * (past.dim() - weights.dim()))
        if self.join == "sum":
            return own + (past * (weights > 0)).sum(1)
        n = examples.to(own).view(-1, *(1,) * (own.dim() - 1))
        total = weights.sum(1)
        pooled = (n * own + (weights * past).sum(1)) / (n + total)
        # Not through n g / n, which rounds: a task that is new must be the base learner's bit for bit.
        return torch.where(total > 0, pooled, own)

    def opening(self, recall: Recall) -> Params | None:
        """Return None: there is no step before the first support gradient."""
        return None

    # -- remember ----------------------------------------------------------------------------------

    def remember(
        self, sight: Sight, recognised: Recognised, values: Params, *, when: str = ""
    ) -> PastVisit:
        """Keep a visit; a full memory forgets another one.

        Args:
            sight: What was seen of the task.
            recognised: What `recognise` said of it; new classes get the given or new names.
            values: Its support gradients, ``{name: [step, ..., *shape]}``.
            when: Date and time.
        """
        given = sight.names or (None,) * sight.way
        names = tuple(
            known or own or f"class {self._born}.{c}"
            for c, (known, own) in enumerate(zip(recognised.names, given, strict=True))
        )
        self._born += 1
        visit = PastVisit(names, sight, {n: v.detach() for n, v in values.items()}, when)
        self._touch(recognised.slots)
        self.add(visit)
        return visit

    def add(self, visit: PastVisit) -> None:
        """Keep a visit as it is."""
        if len(set(visit.classes)) < len(visit.classes):
            raise ConfigError(f"class names should differ, got {', '.join(visit.classes)}.")
        self._known = None
        if self.capacity is None or len(self.visits) < self.capacity:
            self.visits.append(visit)
            slot = len(self.visits) - 1
        else:
            slot = self.controller.victim(self._ledger)
            self.visits[slot] = visit
        if self.capacity is not None:
            self.controller.wrote(self._ledger, slot)
            self._ledger.filled.fill_(len(self.visits))

    def _touch(self, slots: Iterable[int]) -> None:
        recent = list(slots)[::-1]
        if self.capacity is not None and recent:
            self.controller.touch(self._ledger, torch.tensor(recent, device="cpu"))

    def _oldest_first(self) -> list[int]:
        if self.capacity is None:
            return list(range(len(self.visits)))
        return sorted(range(len(self.visits)), key=lambda slot: int(self._ledger.written[slot]))


def recalled(slots: Tensor, values: Params, *, rows: Tensor, own: Tensor) -> Recall:
    """Return a recall of past visits, which have no keys: the examples behind them are their weights.

    Args:
        slots: Which visits, ``[task, m]``.
        values: What they left behind, ``{name: [task, m, ...]}``.
        rows: Their examples of each class at hand, ``[task, m, way]``.
        own: Examples at hand, ``[task]``.
    """
    weights = rows.mean(2)
    return Recall(
        keys=weights.new_zeros(len(slots), 0),
        slots=slots,
        distances=torch.zeros_like(weights),
        weights=weights,
        values=values,
        generations=torch.zeros_like(slots),
        active=(weights > 0).any(1),
        notes={LifelongMemory.ROWS: rows},
        own_notes={LifelongMemory.OWN: own},
    )


def _part_of(order: Tensor) -> Float[Tensor, " way"]:
    """Return how much of each class at hand a visit had: all, nothing, or its share."""
    return order.sum(1).to(torch.float32) if order.dim() == 2 else (order >= 0).float()


def _aligned(kept: Tensor, order: Tensor, axis: int) -> Tensor:
    """Put the rows of a visit where the classes at hand are; several by their shares."""
    if order.dim() == 2:
        shares = order.to(kept)
        each = shares / shares.sum(1, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny)
        rows = kept.movedim(axis, 0)
        return (each @ rows.flatten(1)).view(len(each), *rows.shape[1:]).movedim(0, axis)
    rows = kept.index_select(axis, order.clamp(min=0))
    present = (order >= 0).view(-1, *(1,) * (rows.dim() - axis - 1))
    return rows * present.to(rows)
