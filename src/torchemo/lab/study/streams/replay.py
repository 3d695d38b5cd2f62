"""The upper bound: all examples of a task are kept, and fitted to again at every visit."""

from collections.abc import Callable
from typing import TypeAlias, final

import torch
from torch import Tensor

from torchemo.core.types import Batch
from torchemo.lab.study.streams.play import Seen
from torchemo.learners.learner import Fitted, Learner

Outputs: TypeAlias = Callable[[Fitted, Tensor], list[Tensor]]
"""Answers queries after the inner steps that are scored."""


@final
class Replay:
    """Support examples of the tasks of many users, each with what stands for its class."""

    def __init__(self) -> None:
        self.past: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        self.bytes = 0

    def outputs(self, seen: Seen, learner: Learner, answer: Outputs) -> list[Tensor]:
        """Fit to the examples of all visits of each task, tasks with as many visits at a time."""
        counts = [len(self._examples(seen, b)) for b in range(len(seen.query))]
        order: list[Tensor] = []
        found: list[list[Tensor]] = []
        for count in sorted(set(counts)):
            chosen = torch.tensor([b for b, n in enumerate(counts) if n == count])
            some = seen.rows(chosen)
            with torch.no_grad():
                support = self._pooled(seen, chosen.tolist())
                found.append(answer(learner.fit(some.start, support, graph=False), some.query))
            order.append(chosen)
        back = torch.cat(order).argsort()
        return [torch.cat(column)[back] for column in zip(*found, strict=True)]

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

    def keep(self, seen: Seen) -> None:
        """Keep the support examples of B visits."""
        moment = seen.moment
        # Images have a byte for each number, other inputs four.
        self.bytes = seen.input_numbers * (1 if moment.support.x.dim() == 5 else 4)
        for b, key in enumerate(zip(moment.users.tolist(), moment.task.tolist(), strict=True)):
            y = seen.support.y[b]
            named = y if y.is_floating_point() else moment.classes[b][y]
            self.past.setdefault(key, []).append((seen.support.x[b], named))


def _labels(old: Tensor, classes: Tensor, y: Tensor) -> Tensor:
    """Return the labels that classes of an earlier visit have now; functions have targets instead."""
    if y.is_floating_point():
        return old
    return (old[:, None] == classes).to(y.dtype).argmax(1)
