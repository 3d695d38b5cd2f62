"""Kinds of memory at play: find, recall, fit, answer, remember, for many users at once."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import normalize

from torchemo.config.registry import Part
from torchemo.core.rng import generator_for
from torchemo.core.task_axis import join
from torchemo.core.types import Params, Recall
from torchemo.lab.study.streams.bank import NONE, Bank, Parts, noisy, nothing_like
from torchemo.lab.study.streams.finders import Names, Numbers, find
from torchemo.lab.study.streams.play import Player, Seen
from torchemo.lab.study.streams.replay import Replay
from torchemo.lab.study.streams.shares import Shares, centres_of, parts_of, shares_of
from torchemo.lab.study.streams.visits import Visits
from torchemo.learners.learner import Curved, Fitted, Stepwise
from torchemo.memory.bound import BoundMemory
from torchemo.memory.controllers import build_controller
from torchemo.memory.lifelong.memory import LifelongMemory
from torchemo.memory.lifelong.mixture import Mixture
from torchemo.memory.lifelong.recognise import ByName
from torchemo.memory.lifelong.shares import sure
from torchemo.memory.values import leading_axes, pick

Watch: TypeAlias = Callable[[list[Tensor], Tensor, Tensor], None]
"""Called with the parts of answers, the examples known per class, and the labels of the queries."""


class Met(NamedTuple):
    """How visits went.

    Attributes:
        scores: Accuracy or squared error of each task, after the inner steps that are scored.
        known: Classes that the user had seen before.
        right: Classes that were taken for what they are.
        wrong: Classes that were taken for others.
        seconds: CPU time of a visit, all ways of answering together.
        bytes: What a visit leaves behind.
    """

    scores: Float[Tensor, "task step"]
    known: Tensor
    right: Tensor
    wrong: Tensor
    seconds: float
    bytes: int


@final
class Game:
    """One kind of memory, for some users.

    Args:
        player: The learner.
        asked: Kinds of memory that differ in what answers alone.
        users: How many users.
        length: Most visits of a user.
        every_step: Score after every inner step.
        watch: Told the parts of all answers, the examples that are known per class, and the labels.
    """

    def __init__(
        self,
        player: Player,
        asked: Sequence[Visits],
        users: int,
        length: int,
        *,
        every_step: bool = False,
        watch: Watch | None = None,
    ) -> None:
        self.player, self.asked, self.every_step, self.watch = player, asked, every_step, watch
        self.visits = visits = asked[0]
        head, axes = player.learner.model.head, leading_axes(visits.content)
        self.bank = Bank(users, length, player.way, head=head, axes=axes)
        if visits.slots is not None:
            self.bank.limit(visits.slots, build_controller(Part(visits.controller)))
        self.numbers = Numbers(users)
        self.memory = LifelongMemory(ByName(), head=head, join=visits.join, content=visits.content)
        self.replay = Replay()
        self.shares: Shares | None = None
        self.at = 0

    def meet(self, seen: Seen) -> list[Met]:
        """Meet the visits of B users: answer their queries in all asked ways, and keep the visits."""
        return meet([self], seen)[0]

    def begin(self, seen: Seen) -> "Turn":
        """Find and recall the past visits of B users."""
        began, self.shares = time.process_time(), self._shares(seen)
        found = self._find(seen)
        parts = self._parts(seen, found)
        recall = None if self.visits.replay else self._recall(seen, parts)
        return Turn(found, parts, recall, self._judged(seen, found), time.process_time() - began)

    def end(self, seen: Seen, turn: "Turn", fit: "Fit", queries: Params) -> list[Met]:
        """Answer the queries of B users in all asked ways, and keep the visits."""
        began = time.process_time()
        if self.visits.replay:
            answers = [self.replay.outputs(seen, self.player.inner, self._outputs)] * len(
                self.asked
            )
            self.replay.keep(seen)
        else:
            answers = self._answers(seen, fit.outputs, turn.found, queries)
            self._remember(seen, turn.found, turn.parts, fit.values)
        self.at += 1
        seconds = turn.seconds + fit.seconds + time.process_time() - began
        y = seen.moment.query.y
        scores = [torch.stack([_scores(out, y) for out in outputs], 1) for outputs in answers]
        return [Met(one, *turn.judged, seconds / len(y), self.bytes) for one in scores]

    # -- find and recall ---------------------------------------------------------------------------

    @property
    def by_task(self) -> bool | None:
        """Whether somebody tells the task, or the names of classes; None if nobody does."""
        told = {"told": True, "random": True, "nothing": True, "named": False}
        return told.get(self.visits.finder)

    def _find(self, seen: Seen) -> Names:
        if self.visits.find == "nothing":
            return torch.full_like(seen.moment.classes, NONE)
        if self.by_task is not None:
            told = self.numbers.told(seen.moment, by_task=self.by_task, at=self.at)
            return told if self.visits.right == 1 else self._mistaken(seen, told)
        if self.visits.find == "shares":
            return (
                torch.full_like(seen.moment.classes, NONE)
                if self.shares is None
                else sure(self.shares)
            )
        return find(self.visits.find, self.visits.threshold, seen.look, self.bank)

    def _mistaken(self, seen: Seen, told: Names) -> Names:
        """Take some of the tasks that came back for others of the same user."""
        moment, bank = seen.moment, self.bank
        others = (bank.task[moment.users] != moment.task[:, None]) & self._filled(seen)
        generator = generator_for(self.at, "mistaken")
        wrong = torch.rand(len(told), generator=generator) >= self.visits.right
        slot = torch.rand(others.shape, generator=generator).masked_fill(~others, -1.0).argmax(1)
        taken = bank.classes[moment.users, slot].where(others.any(1)[:, None], NONE)
        known = (told != NONE).all(1)
        return torch.where((wrong & known)[:, None], taken, told)

    def _filled(self, seen: Seen) -> Bool[Tensor, "task slot"]:
        return (self.bank.classes[seen.moment.users] != NONE).all(2)

    def _shares(self, seen: Seen) -> Shares | None:
        visits = self.visits
        if visits.find != "shares":
            return None
        shares = shares_of(seen.look, self.bank, trust=visits.trust, new=visits.new)
        # Still probabilities, but each is that of another class.
        return shares.roll(1, 1) if shares is not None and visits.broken == "labels" else shares

    def _parts(self, seen: Seen, found: Names) -> Parts:
        """Return how much every class at hand was each class of each visit that is recalled."""
        users = seen.moment.users
        if self.shares is not None:
            return parts_of(self.bank, users, self.shares)
        if self.visits.finder != "random":
            parts = self.bank.parts(users, found)
            # Labels are still all different, but each is that of another class.
            return parts.roll(1, 2) if self.visits.broken == "labels" else parts
        filled = self._strangers(seen)
        generator = generator_for(self.at, "random visits")
        order = torch.rand(filled.shape, generator=generator).masked_fill(~filled, 2.0).argsort(1)
        place = order.argsort(1)
        chosen = filled & (place < seen.moment.visit.clamp(min=0)[:, None])
        return chosen[:, : self.bank.used, None, None] * torch.eye(found.shape[1])

    def _strangers(self, seen: Seen) -> Bool[Tensor, "task slot"]:
        """Return which visits may be recalled in the place of those of the task itself."""
        moment, bank, filled = seen.moment, self.bank, self._filled(seen)
        if self.visits.find == "random":
            return filled
        alike = bank.domain[moment.users] == moment.domain[:, None]
        others = bank.task[moment.users] != moment.task[:, None]
        return filled & others & (alike if self.visits.find == "same domain" else ~alike)

    @property
    def pooled(self) -> bool:
        """Whether the visits of a task may be recalled as one: the direction is linear in their gradients."""
        visits = self.visits
        plain = visits.content == "per_step" and visits.join == "mean"
        return plain and visits.broken != "contents"

    def _recall(self, seen: Seen, parts: Parts) -> Recall:
        own = float(seen.look.shots.sum(1)[0]) if self.visits.own else 0.0
        recall = self.bank.recall(
            seen.moment.users, parts, own=own, k=self.visits.k, pooled=self.pooled
        )
        if self.visits.broken == "contents":
            recall = noisy(recall, generator_for(self.at, "random contents"))
        return recall

    # -- fit and answer ----------------------------------------------------------------------------

    @property
    def company(self) -> tuple[object, ...]:
        """What games have in common that are fitted together: the form of recall, and what is made of it."""
        v = self.visits
        alone = self if v.replay or v.find == "likelihood" else None
        return v.content, v.join, v.first, self.pooled, self.every_step, alone

    def fit(self, seen: Seen, recalls: Sequence[Recall]) -> "list[Fit]":
        """Fit B tasks under each of several recalls."""
        began, count = time.process_time(), len(recalls)
        known = next((recall for recall in recalls if recall.m), None)
        # Before anything is known all memories are alike.
        if known is not None:
            seen = seen.rows(torch.arange(len(seen.query)).repeat(count))
        memory = None
        if known is not None:
            whole = join([recall if recall.m else nothing_like(known) for recall in recalls])
            memory = BoundMemory(_Joined(self.memory, self.visits.first), whole)
        with torch.no_grad():
            fitted = self.player.inner.fit(seen.start, seen.support, memory=memory, graph=False)
            outputs = self._outputs(fitted, seen.query)
        values = self._values(seen, fitted)
        each = (time.process_time() - began) / count
        if known is None:
            return [Fit(outputs, values, each)] * count
        parted = zip(*(out.chunk(count) for out in outputs), strict=True)
        kept = [{n: v.chunk(count)[i] for n, v in values.items()} for i in range(count)]
        return [Fit(list(out), one, each) for out, one in zip(parted, kept, strict=True)]

    def _outputs(self, fitted: Fitted, query: Tensor) -> list[Tensor]:
        learner = self.player.inner
        if self.player.headed is None:  # a head alone answers each query by itself in any case
            fitted = fitted._replace(alone={})
        if self.every_step and isinstance(learner, Stepwise):
            return learner.predict_path(fitted, query, steps=range(len(fitted.path)))
        return [learner.predict(fitted, query)]

    def _answers(
        self, seen: Seen, adapted: list[Tensor], found: Names, queries: Params
    ) -> list[list[Tensor]]:
        """Answer the queries in each of the ways that are asked for."""
        with torch.no_grad():
            means, examples = self._means(seen, found, queries if self.asks_means else {})
        parts = [adapted[-1].log_softmax(2), *means]
        if self.watch is not None:
            self.watch(parts, examples, seen.moment.query.y)
        found_answers = []
        for one in self.asked:
            if one.answer == "adapted":
                found_answers.append(adapted)
            elif one.answer == "mixture":
                found_answers.append([Mixture(one.weights)(parts, examples)])
            else:
                some = [] if one.answer == "means" else adapted[-1:]
                some = some + [one.sharpness * cosines for cosines in means]
                found_answers.append([torch.stack([p.log_softmax(2) for p in some]).sum(0)])
        return found_answers

    @property
    def asks_means(self) -> bool:
        """Whether class means have a part in an answer."""
        return self.watch is not None or any(one.answer != "adapted" for one in self.asked)

    def _means(self, seen: Seen, found: Names, spaces: Params) -> tuple[list[Tensor], Tensor]:
        """Return cosines to class means in every space, and how many examples a class has."""
        answers, counts = [], seen.look.shots
        for space, queries in spaces.items():
            centres, counts = self._centres(seen, found, space)
            answers.append(queries @ normalize(centres, dim=2).mT)
        return answers, counts.to(torch.float32).mean(1)

    def _centres(self, seen: Seen, found: Names, space: str) -> tuple[Tensor, Tensor]:
        """Return the mean of each class over all visits, and of how many examples it is."""
        shots, centres = seen.look.shots, seen.look.means[space]
        if space not in self.bank.sums:
            return centres, shots
        if self.shares is not None:
            return centres_of(self.bank, seen.moment.users, self.shares, centres, shots, space)
        users, rows = seen.moment.users[:, None], found.clamp(min=0)
        past = self.bank.sums[space][users, rows] * (found != NONE)[..., None]
        counts = shots + self.bank.counts[users, rows] * (found != NONE)
        return (shots[..., None] * centres + past) / counts[..., None], counts

    # -- remember ----------------------------------------------------------------------------------

    def _remember(self, seen: Seen, found: Names, parts: Parts, values: Params) -> None:
        moment = seen.moment
        named = self.numbers.named(moment, found, by_task=self.by_task, at=self.at)
        self.bank.touch(moment.users, parts)
        self.bank.write(
            moment.users,
            named,
            moment.classes,
            seen.look.shots,
            means=seen.look.means if self._keeps_means else {},
            values=values if self._keeps_values else {},
            company=(moment.domain, moment.task),
        )

    @property
    def _keeps_means(self) -> bool:
        return self.by_task is None or self.asks_means

    @property
    def bytes(self) -> int:
        """Bytes that a visit takes: gradients and class means, or the inputs themselves."""
        if self.visits.replay:
            return self.replay.bytes
        kept = [v[0, 0].numel() for n, v in self.bank.values.items() if "/" not in n]
        means = [self.player.way * v.shape[2] for v in self.bank.sums.values()]
        return 4 * sum(kept + means)

    @property
    def _keeps_values(self) -> bool:
        answered = any(one.answer != "means" for one in self.asked)
        return self.visits.find != "nothing" and answered

    def _values(self, seen: Seen, fitted: Fitted) -> Params:
        learner = self.player.inner
        if self.visits.content == "gauss_newton" and isinstance(learner, Curved):
            return learner.followed(fitted, seen.support, rates=seen.start.rates)
        values = pick(self.visits.content, fitted.gradients, fitted.path, fitted.extra_values or {})
        if self.visits.first:
            values = {n: v[:, :1] for n, v in values.items()}
        if self.visits.find == "likelihood":
            head = self.player.learner.model.head
            values |= {f"adapted/{n}": fitted.path[-1][n] for n in head}
        return values

    def _judged(self, seen: Seen, found: Names) -> tuple[Tensor, Tensor, Tensor]:
        """Count classes that were known, and that were recognised, rightly or not."""
        moment = seen.moment
        truth = self.bank.truth[moment.users]
        known = (truth[:, :, None] == moment.classes[:, None]).any(1)
        taken_for = truth.gather(1, found.clamp(min=0))
        right = (found != NONE) & (taken_for == moment.classes)
        return known.sum(1), right.sum(1), (found != NONE).sum(1) - right.sum(1)


class Turn(NamedTuple):
    """What a game has found out before tasks are fitted."""

    found: Names
    parts: Parts
    recall: Recall | None
    judged: tuple[Tensor, Tensor, Tensor]
    seconds: float


class Fit(NamedTuple):
    """Tasks that were fitted: answers after the inner steps that are scored, and what may be kept."""

    outputs: list[Tensor]
    values: Params
    seconds: float


def meet(games: Sequence[Game], seen: Seen) -> list[list[Met]]:
    """Let several memories meet the same visits; those with recalls of one form are fitted together."""
    turns = [game.begin(seen) for game in games]
    companies: dict[tuple[object, ...], list[int]] = {}
    for i, game in enumerate(games):
        companies.setdefault(game.company, []).append(i)
    fits: dict[int, Fit] = {}
    for company in companies.values():
        recalls = [recall for i in company if (recall := turns[i].recall) is not None]
        found = games[company[0]].fit(seen, recalls) if recalls else [Fit([], {}, 0.0)]
        fits |= zip(company, found, strict=True)
    queries = seen.queries() if any(game.asks_means for game in games) else {}
    return [game.end(seen, turns[i], fits[i], queries) for i, game in enumerate(games)]


class _Joined(NamedTuple):
    """A memory that joins the first inner steps alone, if it keeps first gradients alone."""

    memory: LifelongMemory
    first: int

    def combine(
        self, grads: Params, recall: Recall, *, step: int = 0, theta: Params | None = None
    ) -> Params:
        """Return the direction of an inner step."""
        if self.first and step >= self.first:
            return grads
        return self.memory.combine(grads, recall, step=step, theta=theta)

    def opening(self, recall: Recall) -> Params | None:
        """Return None: there is no step before the first support gradient."""
        return None


def _scores(out: Tensor, y: Tensor) -> Float[Tensor, " task"]:
    if y.is_floating_point():
        return (out - y).square().flatten(1).mean(1)
    return (out.argmax(2) == y).float().mean(1)
