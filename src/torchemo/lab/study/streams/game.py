"""One kind of memory at play: find, recall, fit, answer, remember, for many users at once."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import normalize

from torchemo.config.registry import Part
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch, Params, Recall
from torchemo.lab.study.streams.bank import NONE, Bank
from torchemo.lab.study.streams.finders import Names, Numbers, find
from torchemo.lab.study.streams.play import Player, Seen
from torchemo.lab.study.streams.shares import Shares, centres_of, recall_shares, shares_of
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
        controller = None
        if visits.slots is not None:
            controller = build_controller(Part(visits.controller))
        self.bank = Bank(users, length, player.way, capacity=visits.slots, controller=controller)
        self.numbers = Numbers(users)
        self.memory = LifelongMemory(
            ByName(), head=player.learner.model.head, join=visits.join, content=visits.content
        )
        self.past: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        self._input_bytes = 0
        self.shares: Shares | None = None
        self.at = 0

    def meet(self, seen: Seen) -> list[Met]:
        """Meet the visits of B users: answer their queries in all asked ways, and keep the visits."""
        began = time.process_time()
        self.shares = self._shares(seen)
        found = self._find(seen)
        matched, labels = self._matches(seen, found)
        recall = self._recall(seen, matched, labels)
        judged = self._judged(seen, found)
        if self.visits.replay:
            answers = [self._replayed(seen)] * len(self.asked)
            self._keep_examples(seen)
        else:
            fitted = self._fitted(seen, recall)
            answers = self._answers(seen, fitted, found)
            self._remember(seen, found, matched, fitted)
        self.at += 1
        seconds = (time.process_time() - began) / len(found)
        y = seen.moment.query.y
        scores = [torch.stack([_scores(out, y) for out in outputs], 1) for outputs in answers]
        return [Met(one, *judged, seconds, self.bytes) for one in scores]

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

    def _matches(self, seen: Seen, found: Names) -> tuple[Bool[Tensor, "task slot way"], Tensor]:
        users = seen.moment.users
        if self.visits.finder != "random":
            matched, labels = self.bank.matches(users, found)
            # Labels are still all different, but each is that of another class.
            return matched, labels.roll(1, 2) if self.visits.broken == "labels" else labels
        filled = self._strangers(seen)
        generator = generator_for(self.at, "random visits")
        order = torch.rand(filled.shape, generator=generator).masked_fill(~filled, 2.0).argsort(1)
        place = order.argsort(1)
        chosen = filled & (place < seen.moment.visit.clamp(min=0)[:, None])
        way = found.shape[1]
        everywhere = torch.arange(way).expand(*chosen.shape, way)
        return chosen[..., None].expand_as(everywhere), everywhere

    def _strangers(self, seen: Seen) -> Bool[Tensor, "task slot"]:
        """Return which visits may be recalled in the place of those of the task itself."""
        moment, bank, filled = seen.moment, self.bank, self._filled(seen)
        if self.visits.find == "random":
            return filled
        alike = bank.domain[moment.users] == moment.domain[:, None]
        others = bank.task[moment.users] != moment.task[:, None]
        return filled & others & (alike if self.visits.find == "same domain" else ~alike)

    def _recall(self, seen: Seen, matched: Tensor, labels: Tensor) -> Recall:
        users, head = seen.moment.users, self.memory.head
        own = float(seen.look.shots.sum(1)[0]) if self.visits.own else 0.0
        axis = leading_axes(self.visits.content)
        if self.shares is not None:
            recall = recall_shares(
                self.bank, users, self.shares, own=own, head=head, steps_axis=axis
            )
        else:
            recall = self.bank.recall(
                users, matched, labels, own=own, head=head, steps_axis=axis, k=self.visits.k
            )
        if self.visits.broken == "contents":
            recall = recall._replace(values=_noise(recall.values, self.at))
        return recall

    # -- fit and answer ----------------------------------------------------------------------------

    def _fitted(self, seen: Seen, recall: Recall) -> Fitted:
        learner = self.player.inner
        with torch.no_grad():
            if recall.m == 0:
                return learner.fit(seen.start, seen.support, graph=False)
            joined = _Joined(self.memory, self.visits.first)
            return learner.fit(
                seen.start, seen.support, memory=BoundMemory(joined, recall), graph=False
            )

    def _replayed(self, seen: Seen) -> list[Tensor]:
        """Fit to the examples of all visits of each task, tasks with as many visits at a time."""
        learner = self.player.inner
        found: dict[int, list[Tensor]] = {}
        counts = [len(self._examples(seen, b)) for b in range(len(seen.moment.users))]
        for count in sorted(set(counts)):
            rows = [b for b, n in enumerate(counts) if n == count]
            start = seen.start._replace(theta={n: t[rows] for n, t in seen.start.theta.items()})
            if seen.start.rates is not None:
                rates = {n: t[rows] for n, t in seen.start.rates.items()}
                start = start._replace(rates=rates)
            with torch.no_grad():
                fitted = learner.fit(start, self._pooled(seen, rows), graph=False)
                outputs = self._outputs(fitted, seen.query[rows])
            found |= {b: [out[i] for out in outputs] for i, b in enumerate(rows)}
        return [
            torch.stack(column) for column in zip(*(found[b] for b in sorted(found)), strict=True)
        ]

    def _examples(self, seen: Seen, b: int) -> list[tuple[Tensor, Tensor]]:
        key = int(seen.moment.users[b]), int(seen.moment.task[b])
        return self.past.get(key, []) if key[1] >= 0 else []

    def _pooled(self, seen: Seen, rows: list[int]) -> Batch:
        xs, ys = [], []
        for b in rows:
            past, classes = self._examples(seen, b), seen.moment.classes[b]
            x, y = seen.support.x[b], seen.support.y[b]
            xs.append(torch.cat([x, *(old for old, _ in past)]))
            ys.append(torch.cat([y, *(_labels(old, classes, y) for _, old in past)]))
        return Batch(torch.stack(xs), torch.stack(ys))

    def _keep_examples(self, seen: Seen) -> None:
        moment = seen.moment
        x = moment.support.x[0]  # images have a byte for each number, other inputs four
        self._input_bytes = x.numel() * (1 if x.dim() == 4 else 4)
        for b, key in enumerate(zip(moment.users.tolist(), moment.task.tolist(), strict=True)):
            y = seen.support.y[b]
            named = y if y.is_floating_point() else moment.classes[b][y]
            self.past.setdefault(key, []).append((seen.support.x[b], named))

    def _outputs(self, fitted: Fitted, query: Tensor) -> list[Tensor]:
        learner = self.player.inner
        if self.player.headed is None:  # a head alone answers each query by itself in any case
            fitted = fitted._replace(alone={})
        if self.every_step and isinstance(learner, Stepwise):
            return learner.predict_path(fitted, query, steps=range(len(fitted.path)))
        return [learner.predict(fitted, query)]

    def _answers(self, seen: Seen, fitted: Fitted, found: Names) -> list[list[Tensor]]:
        """Answer the queries in each of the ways that are asked for."""
        with torch.no_grad():
            adapted = self._outputs(fitted, seen.query)
            means, examples = self._means(seen, found)
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
    def _asks_means(self) -> bool:
        return self.watch is not None or any(one.answer != "adapted" for one in self.asked)

    def _means(self, seen: Seen, found: Names) -> tuple[list[Tensor], Tensor]:
        """Return cosines to class means in every space, and how many examples a class has."""
        answers, counts = [], seen.look.shots
        for space, queries in seen.queries.items() if self._asks_means else ():
            centres, counts = self._centres(seen, found, space)
            answers.append(normalize(queries, dim=2) @ normalize(centres, dim=2).mT)
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

    def _remember(self, seen: Seen, found: Names, matched: Tensor, fitted: Fitted) -> None:
        moment = seen.moment
        named = self.numbers.named(moment, found, by_task=self.by_task, at=self.at)
        self.bank.touch(moment.users, matched)
        self.bank.write(
            moment.users,
            named,
            moment.classes,
            seen.look.shots,
            means=seen.look.means if self._keeps_means else {},
            values=self._values(seen, fitted),
            company=(moment.domain, moment.task),
        )

    @property
    def _keeps_means(self) -> bool:
        return self.by_task is None or self._asks_means

    @property
    def bytes(self) -> int:
        """Bytes that a visit takes: gradients and class means, or the inputs themselves."""
        if self.visits.replay:
            return self._input_bytes
        kept = [v[0, 0].numel() for n, v in self.bank.values.items() if "/" not in n]
        means = [self.player.way * v.shape[2] for v in self.bank.sums.values()]
        return 4 * sum(kept + means)

    def _values(self, seen: Seen, fitted: Fitted) -> Params:
        if self.visits.find == "nothing" or all(one.answer == "means" for one in self.asked):
            return {}
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


def _labels(old: Tensor, classes: Tensor, y: Tensor) -> Tensor:
    """Return the labels that classes of an earlier visit have now; functions have targets instead."""
    if y.is_floating_point():
        return old
    return (old[:, None] == classes).to(y.dtype).argmax(1)


def _noise(values: Params, at: int) -> Params:
    """Return random numbers with the norm of each stored gradient."""
    generator = generator_for(at, "random contents")
    found = {}
    for name, value in values.items():
        noise = torch.randn(value.shape, generator=generator)
        size = [t.flatten(3).norm(dim=3) for t in (value, noise)]
        scale = size[0] / size[1].clamp(min=1e-12)
        found[name] = noise * scale.view(*scale.shape, *(1,) * (value.dim() - 3))
    return found


def _scores(out: Tensor, y: Tensor) -> Float[Tensor, " task"]:
    if y.is_floating_point():
        return (out - y).square().flatten(1).mean(1)
    return (out.argmax(2) == y).float().mean(1)
