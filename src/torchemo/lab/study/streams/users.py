"""The visits of many users, side by side: one batch for the i-th visit of all of them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast, final

import torch
from jaxtyping import Int
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.task_axis import join, take
from torchemo.core.types import Batch
from torchemo.data.episodes import EpisodeIds, gather
from torchemo.data.source import PictureTasks, RegressionTasks, TaskSource
from torchemo.data.streams import ONCE, StreamTasks, Visit
from torchemo.lab.study.streams.visits import Streams

KEPT = 4
"""For how many groups of users it is kept which images they meet."""
_CHOSEN: dict[tuple[object, ...], tuple[EpisodeIds, ...]] = {}


class Moment(NamedTuple):
    """One visit of each of B users.

    Attributes:
        users: Which users, as they are counted in their group.
        task: Which of their tasks that come back, `ONCE` for others.
        visit: How often it was there before.
        classes: Class of each label; for a function one number that stands for it.
        support: Support sets; features of a pretrained network are ids of images.
        query: Query sets, likewise.
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

    def length(self, users: Sequence[int]) -> int:
        """Return the most visits of some users."""
        return max(len(self.timetable(user)) for user in users)

    def moments(self, users: Sequence[int]) -> Iterator[Moment]:
        """Draw the visits of some users, the first visits of all of them first."""
        tables = [self.timetable(user) for user in users]
        chosen = self._chosen(users, tables)
        for i in range(max(map(len, tables))):
            rows = [row for row, table in enumerate(tables) if i < len(table)]
            visits = [tables[row][i] for row in rows]
            if chosen is None:
                each = zip(rows, visits, strict=True)
                yield join([self._function(row, users[row], visit) for row, visit in each])
            else:
                yield self._pictures(rows, visits, chosen[i])

    def _chosen(
        self, users: Sequence[int], tables: list[list[Visit]]
    ) -> tuple[EpisodeIds, ...] | None:
        """Choose the images of the i-th visits of all users; other runs on the same data meet them, too."""
        if not isinstance(self.source.source, PictureTasks):
            return None
        key = (self.source.fingerprint, self.source.source.spec, self.streams, tuple(users))
        if key not in _CHOSEN:
            while len(_CHOSEN) >= KEPT:
                _CHOSEN.pop(next(iter(_CHOSEN)))
            _CHOSEN[key] = self._choose(self.source.source, users, tables)
        return _CHOSEN[key]

    def _choose(
        self, source: PictureTasks, users: Sequence[int], tables: list[list[Visit]]
    ) -> tuple[EpisodeIds, ...]:
        s = self.streams
        each = [
            source.visited.ids(table, seed=self._seed(user), split=s.split, n_query=s.n_query)
            for user, table in zip(users, tables, strict=True)
        ]
        return tuple(
            join([take(ids, slice(i, i + 1)) for ids in each if i < len(ids.number)])
            for i in range(max(map(len, tables)))
        )

    def _seed(self, user: int) -> int:
        return 1000 * self.streams.seed + user

    def _visits(self, user: int, count: int) -> list[Visit]:
        return self.source.visits(self.streams.split, seed=self._seed(user), start=0, count=count)

    def _pictures(self, rows: list[int], visits: list[Visit], ids: EpisodeIds) -> Moment:
        index = cast(PictureTasks, self.source.source).index
        if index.holds_features:
            sets = Batch(ids.support, ids.support_y), Batch(ids.query, ids.query_y)
        else:
            drawn = gather(index, ids)
            sets = drawn.support, drawn.query
        return _moment(rows, visits, ids.classes, sets, ids.domain)

    def _function(self, row: int, user: int, visit: Visit) -> Moment:
        drawn = self.source.source.visited.draw(
            [visit], seed=self._seed(user), split=self.streams.split, n_query=None
        )
        identity = torch.tensor([[visit.identity]])
        domain = torch.zeros(1, dtype=torch.int64) if drawn.domain is None else drawn.domain
        return _moment([row], [visit], identity, (drawn.support, drawn.query), domain)


def _moment(
    rows: list[int],
    visits: list[Visit],
    classes: Tensor,
    sets: tuple[Batch, Batch],
    domain: Tensor,
) -> Moment:
    task, visit = (torch.tensor([getattr(v, name) for v in visits]) for name in ("task", "visit"))
    return Moment(torch.tensor(rows), task, visit, classes, *sets, domain)
