"""The visits of many users, side by side: one batch for the i-th visit of all of them."""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.task_axis import join
from torchemo.core.types import Batch
from torchemo.data.source import PictureTasks, RegressionTasks, TaskSource
from torchemo.data.streams import ONCE, StreamTasks, Visit
from torchemo.lab.study.streams.visits import Streams


class Moment(NamedTuple):
    """One visit of each of B users.

    Attributes:
        users: Which users, as they are counted in their group.
        task: Which of their tasks that come back, `ONCE` for others.
        visit: How often it was there before.
        classes: Class of each label; for a function one number that stands for it.
        support: Support sets.
        query: Query sets.
        domain: Domain of each task.
    """

    users: Int[Tensor, " task"]
    task: Int[Tensor, " task"]
    visit: Int[Tensor, " task"]
    classes: Int[Tensor, "task way"]
    support: Batch
    query: Batch
    domain: Int[Tensor, " task"]

    def rows(self, chosen: Tensor) -> "Moment":
        """Return the visits of some users alone."""
        return Moment(
            self.users[chosen],
            self.task[chosen],
            self.visit[chosen],
            self.classes[chosen],
            Batch(self.support.x[chosen], self.support.y[chosen]),
            Batch(self.query.x[chosen], self.query.y[chosen]),
            self.domain[chosen],
        )

    def without_examples(self) -> "Moment":
        """Return what was visited, for records."""
        nothing = Batch(torch.empty(0), torch.empty(0))
        return self._replace(support=nothing, query=nothing)


@final
class Users:
    """Users of a source of tasks, each with a stream.

    Args:
        source: Where their tasks come from.
        streams: How many users, and how their tasks come back.
    """

    def __init__(self, source: TaskSource, streams: Streams) -> None:
        if not isinstance(source, PictureTasks | RegressionTasks):
            raise ConfigError("tasks of this source cannot come back.")
        self.streams = streams
        self.regression = isinstance(source, RegressionTasks)
        self.source = StreamTasks(source, streams.spec())

    def timetable(self, user: int) -> list[Visit]:
        """Return all visits of a user."""
        s = self.streams
        if s.length is not None:
            return self._visits(user, s.length)
        wanted, count = s.pool * s.visits, s.pool * s.visits
        while True:
            # As long as it takes until every task that comes back has come often enough.
            visits = self._visits(user, count)
            seen = [v for v in visits if v.task != ONCE and v.visit < s.visits]
            if len(seen) == wanted:
                return visits[: visits.index(seen[-1]) + 1]
            count += wanted - len(seen)

    def moments(self, users: Sequence[int]) -> list[Moment]:
        """Draw the visits of some users, the first visits of all of them first."""
        tables = [self.timetable(user) for user in users]
        longest = max(map(len, tables))
        return [
            join(
                [
                    self._draw(row, users[row], table[i])
                    for row, table in enumerate(tables)
                    if i < len(table)
                ]
            )
            for i in range(longest)
        ]

    def _seed(self, user: int) -> int:
        return 1000 * self.streams.seed + user

    def _visits(self, user: int, count: int) -> list[Visit]:
        return self.source.visits(self.streams.split, seed=self._seed(user), start=0, count=count)

    def _draw(self, row: int, user: int, visit: Visit) -> Moment:
        drawn = self.source.source.visited.draw(
            [visit],
            seed=self._seed(user),
            split=self.streams.split,
            n_query=None if self.regression else self.streams.n_query,
        )
        classes = torch.tensor([[visit.identity]]) if drawn.classes is None else drawn.classes
        domain = torch.zeros(1, dtype=torch.int64) if drawn.domain is None else drawn.domain
        return Moment(
            torch.tensor([row]),
            torch.tensor([visit.task]),
            torch.tensor([visit.visit]),
            classes,
            drawn.support,
            drawn.query,
            domain,
        )
