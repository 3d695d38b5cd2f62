"""Streams: tasks that come back, each time with new examples.

Visit i of a stream is a pure function of (seed, split, i). A pool of R tasks of a split comes back by a law,
and between them come tasks that are seen once.

Of every class one half of the images, or Q if that is more, is kept for queries. So no query is ever a
support example, in whatever company its class comes back. A recurring task has the same queries at all
visits, which makes visits comparable. Support examples of a class are not repeated until the class runs out;
then they come again in the same order.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import NamedTuple, Protocol, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchemo.config.run import StreamSpec
from torchemo.core.errors import ConfigError, DataError
from torchemo.core.rng import generator_for
from torchemo.core.types import Episode, TaskShape
from torchemo.data.dense import base_classes
from torchemo.data.episodes import EpisodeIds, EpisodeSpec, class_pools, gather
from torchemo.data.index import ClassIndex
from torchemo.data.synthetic.regression import RegressionSpec, sample_visits

ONCE = -1
"""Task number of a task that never comes back."""

_BLOCK = 1024

Ids: TypeAlias = NDArray[np.int64]


class Visit(NamedTuple):
    """One visit of a stream, without its examples.

    Attributes:
        number: Which visit of the stream it is, i.
        task: Which task of the pool it is, or `ONCE`.
        visit: How often that task was there before.
        classes: Class of each label; empty for regression.
        used: How often each of these classes was there before, in any task.
    """

    number: int
    task: int
    visit: int
    classes: Ids
    used: Ids

    @property
    def identity(self) -> int:
        """Return a number that all visits of a task share and no other task has."""
        return self.task if self.task != ONCE else -1 - self.number


@final
class Timetable:
    """Which task comes when, and which classes it has; grows as far as it is asked for.

    Args:
        spec: The stream.
        path: Seed and split.
        classes: ``(identity, visit, number) -> classes`` of a visit; none for regression.
    """

    def __init__(
        self,
        spec: StreamSpec,
        path: tuple[int, str],
        *,
        classes: Callable[[int, int, int], Ids] = lambda identity, visit, number: np.empty(0, int),
    ) -> None:
        self.spec, self.path, self.classes = spec, path, classes
        self._visits: list[Visit] = []
        self._seen: Counter[int] = Counter()
        self._used: Counter[int] = Counter()
        self._draws = torch.empty(0, 2)
        share = 1 / torch.arange(1, spec.pool + 1, dtype=torch.float64)
        self._zipf = share.cumsum(0) / share.sum()
        self._lock = Lock()

    def between(self, start: int, count: int) -> list[Visit]:
        """Return ``count`` visits from number ``start`` on."""
        if start < 0 or count < 1:
            raise ConfigError(
                f"visits are counted from 0 and at least one is drawn: {start=}, {count=}."
            )
        with self._lock:
            while len(self._visits) < start + count:
                self._visits.append(self._next(len(self._visits)))
        return self._visits[start : start + count]

    def _next(self, number: int) -> Visit:
        seed, split = self.path
        if number % _BLOCK == 0:
            generator = generator_for(seed, "stream", split, number // _BLOCK)
            self._draws = torch.rand(_BLOCK, 2, generator=generator, dtype=torch.float64)
        once, which = self._draws[number % _BLOCK].tolist()
        task = ONCE if once < self.spec.once else self._task(number, which)
        made = Visit(number, task, 0 if task == ONCE else self._seen[task], *_nothing())
        classes = self.classes(made.identity, made.visit, number)
        used = np.array([self._used[c] for c in classes.tolist()], dtype=np.int64)
        if task != ONCE:
            self._seen[task] += 1
        self._used.update(classes.tolist())
        return made._replace(classes=classes, used=used)

    def _task(self, number: int, which: float) -> int:
        """Choose a task of the pool by the law of the stream; ``which`` is uniform in [0, 1)."""
        spec, (seed, split) = self.spec, self.path
        active = min(spec.active, spec.pool)
        if spec.law == "rounds":
            return self._seen.total() % spec.pool
        if spec.law == "zipf":
            return int(torch.searchsorted(self._zipf, which, right=True))
        if spec.law == "bursts":
            generator = generator_for(seed, "stream-burst", split, number // spec.span)
            return int(torch.randperm(spec.pool, generator=generator)[int(which * active)])
        if spec.law == "drift":
            return (number // spec.span + int(which * active)) % spec.pool
        return int(which * spec.pool)


def _nothing() -> tuple[Ids, Ids]:
    return np.empty(0, np.int64), np.empty(0, np.int64)


class Visited(Protocol):
    """Draws the examples of visits."""

    def timetable(self, spec: StreamSpec, *, seed: int, split: str) -> Timetable:
        """Return which task comes when."""
        ...

    def names(self, visit: Visit) -> tuple[str, ...]:
        """Return the class names of a visit in the order of its labels; none for regression."""
        ...

    def draw(self, visits: list[Visit], *, seed: int, split: str, n_query: int | None) -> Episode:
        """Draw the examples of some visits."""
        ...


class Wrapped(Protocol):
    """What a stream needs to know of the source that it draws from."""

    @property
    def shape(self) -> TaskShape:
        """What the tasks look like."""
        ...

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the domains."""
        ...

    @property
    def fingerprint(self) -> str:
        """A digest of everything the tasks depend on."""
        ...

    @property
    def visited(self) -> Visited:
        """How examples of a task that comes back are drawn."""
        ...


@final
@dataclass(frozen=True)
class StreamTasks:
    """Tasks of a source that come back; itself a source of tasks.

    Example:
        >>> from torchemo.config.run import DataConfig
        >>> from torchemo.data.source import open_source
        >>> data = DataConfig(source=("regression:sinusoid",), stream=StreamSpec(pool=3))
        >>> stream = open_source(data).sample("test", seed=0, start=0, count=6)
        >>> stream.task.tolist(), stream.visit.tolist()
        ([2, 1, 1, 0, 2, 2], [0, 0, 1, 0, 1, 2])
    """

    source: Wrapped
    spec: StreamSpec
    _tables: dict[tuple[int, str], Timetable] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.spec.pool < 1:
            raise ConfigError(
                f"data.stream.pool should be 1 or more for a stream, got {self.spec.pool}."
            )

    @property
    def shape(self) -> TaskShape:
        """As of the source."""
        return self.source.shape

    @property
    def domains(self) -> tuple[str, ...]:
        """As of the source."""
        return self.source.domains

    @property
    def fingerprint(self) -> str:
        """Digest of the source, and the stream."""
        return f"{self.source.fingerprint} {self.spec}"

    def visits(self, split: str, *, seed: int, start: int, count: int) -> list[Visit]:
        """Return visits ``start .. start + count - 1`` of a split without their examples."""
        table = self._tables.get((seed, split))
        if table is None:
            table = self.source.visited.timetable(self.spec, seed=seed, split=split)
            self._tables[seed, split] = table
        return table.between(start, count)

    def sample(
        self, split: str, *, seed: int, start: int, count: int, n_query: int | None = None
    ) -> Episode:
        """Return visits ``start .. start + count - 1`` of a split."""
        visits = self.visits(split, seed=seed, start=start, count=count)
        episode = self.source.visited.draw(visits, seed=seed, split=split, n_query=n_query)
        return replace(
            episode,
            index=torch.tensor([v.number for v in visits]),
            task=torch.tensor([v.task for v in visits]),
            visit=torch.tensor([v.visit for v in visits]),
        )


@final
@dataclass(frozen=True)
class FunctionVisits:
    """Visits of functions: the same function again, with new support points."""

    spec: RegressionSpec

    def timetable(self, spec: StreamSpec, *, seed: int, split: str) -> Timetable:
        """Return which function comes when."""
        if spec.exchanged or spec.labels != "kept":
            raise ConfigError("data.stream.exchanged and labels are for tasks with classes.")
        return Timetable(spec, (seed, split))

    def names(self, visit: Visit) -> tuple[str, ...]:
        """Return nothing: a function has no classes."""
        return ()

    def draw(self, visits: list[Visit], *, seed: int, split: str, n_query: int | None) -> Episode:
        """Draw functions and query points by task, support points by visit."""
        spec = replace(self.spec, n_query=n_query or self.spec.n_query)
        path = (seed, "stream-function", spec.group, split)
        functions = [generator_for(*path, v.identity) for v in visits]
        return sample_visits(
            spec, functions, [generator_for(*path, "points", v.number) for v in visits]
        )


@final
@dataclass(frozen=True)
class ClassVisits:
    """Visits of sets of classes: the same classes again, with new support images."""

    index: ClassIndex
    spec: EpisodeSpec
    stored: bool = False
    """Leave images as they are kept, uint8 0 .. 255."""

    def timetable(self, spec: StreamSpec, *, seed: int, split: str) -> Timetable:
        """Return which classes come when."""
        if self.spec.rotations:
            raise ConfigError(
                "classes of a stream are not turned: data.rotations is set, and so is data.stream.",
                hint="Set data.rotations to false.",
            )
        pools = class_pools(self.index, split=split)
        if not pools:
            raise DataError(f"no class has split {split!r}.")
        smallest, needed = min(map(len, pools)), self.spec.n_way + spec.exchanged
        if smallest < needed or spec.exchanged > self.spec.n_way:
            raise DataError(
                f"a domain has {smallest} classes in split {split!r}; {self.spec.n_way}-way tasks that"
                f" exchange {spec.exchanged} classes need {needed}.",
                hint="Lower data.stream.exchanged or data.n_way.",
            )

        def classes(identity: int, visit: int, number: int) -> Ids:
            return self._classes(spec, pools, (identity, visit, number), path=(seed, split))

        return Timetable(spec, (seed, split), classes=classes)

    def names(self, visit: Visit) -> tuple[str, ...]:
        """Return the class names of a visit."""
        return tuple(self.index.class_names[c] for c in visit.classes)

    def _classes(
        self,
        spec: StreamSpec,
        pools: list[Ids],
        which: tuple[int, int, int],
        *,
        path: tuple[int, str],
    ) -> Ids:
        """Choose the classes of a visit in the order of their labels."""
        (identity, visit, number), (seed, split), n = which, path, self.spec.n_way
        generator = generator_for(seed, "stream-task", split, identity)
        pool = pools[int(torch.randint(len(pools), (), generator=generator))]
        order = torch.randperm(len(pool), generator=generator).numpy()
        places, others = order[:n].copy(), order[n:]
        generator = generator_for(seed, "stream-visit", split, number)
        if visit and spec.exchanged:
            leave = torch.randperm(n, generator=generator)[: spec.exchanged].numpy()
            join = torch.randperm(len(others), generator=generator)[: spec.exchanged].numpy()
            places[leave] = others[join]
        if spec.labels == "shuffled":
            places = places[torch.randperm(n, generator=generator).numpy()]
        chosen: Ids = pool[places]
        return chosen

    def draw(self, visits: list[Visit], *, seed: int, split: str, n_query: int | None) -> Episode:
        """Draw query images by task and support images by class, in an order of their own."""
        ids = self.ids(visits, seed=seed, split=split, n_query=n_query)
        base = base_classes(self.index, ids) if split == "train" else None
        return replace(gather(self.index, ids, stored=self.stored), base=base)

    def ids(self, visits: list[Visit], *, seed: int, split: str, n_query: int | None) -> EpisodeIds:
        """Draw the images of `draw` without fetching them."""
        spec = replace(self.spec, n_query=n_query or self.spec.n_query)
        tasks = [_images(self.index, spec, visit, path=(seed, split)) for visit in visits]
        return EpisodeIds(*(torch.stack(c) for c in zip(*tasks, strict=True)))


def _images(
    index: ClassIndex, spec: EpisodeSpec, visit: Visit, *, path: tuple[int, str]
) -> tuple[Tensor, ...]:
    """Choose the images of one visit; the fields of `EpisodeIds` without their task axis."""
    (seed, split), n, k, q = path, spec.n_way, spec.n_shot, spec.n_query
    support, query = [], []
    for c, used in zip(visit.classes.tolist(), visit.used.tolist(), strict=True):
        generator = generator_for(seed, "stream-images", split, c)
        order = torch.randperm(int(index.counts[c]), generator=generator)
        held = min(max(q, len(order) // 2), len(order) - k)  # for queries
        free = len(order) - held
        support.append(order[held + (used * k + torch.arange(k)) % free] + int(index.starts[c]))
        generator = generator_for(seed, "stream-queries", split, visit.identity, c)
        query.append(order[torch.randperm(held, generator=generator)[:q]] + int(index.starts[c]))
    shuffle = torch.randperm(
        n * k, generator=generator_for(seed, "stream-order", split, visit.number)
    )
    by_label, ids = torch.arange(n), torch.from_numpy(index.order)
    return (
        ids[torch.cat(support)[shuffle]],
        by_label.repeat_interleave(k)[shuffle],
        ids[torch.cat(query)],
        by_label.repeat_interleave(q),
        torch.from_numpy(visit.classes),
        torch.zeros(n, dtype=torch.int64),
        torch.tensor(index.domain_of_class[visit.classes[0]]),
        torch.tensor(visit.number),
    )
