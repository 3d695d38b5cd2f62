"""How a cell of a study meets tasks that come back, and what its memory does with them. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, final

from torchemo.config.run import StreamSpec
from torchemo.core.errors import ConfigError

Find: TypeAlias = Literal[
    "nothing",
    "task",
    "names",
    "class cosine",
    "task cosine",
    "class ratio",
    "task ratio",
    "mean",
    "likelihood",
    "random",
    "same domain",
    "other domains",
    "shares",
]
"""How past visits are found.

nothing: no memory. task: somebody tells which task it is. names: by the names of its classes, in whatever
company they came. class, task: single classes, or whole sets of classes, by cosine or by likelihood ratio
(`torchemo.memory.lifelong.ratio`). mean: by the mean of all examples. likelihood: by how well the classifiers
of earlier visits answer the new support set. random: any visits, as many as the task had. same
domain, other domains: as random, among other tasks of the same domain, or of others. shares: no class is
taken for a known one, each counts by how probable it is (`torchemo.memory.lifelong.shares`).
"""

Broken: TypeAlias = Literal["nothing", "labels", "contents"]
"""What is wrong on purpose: the order of labels, or the stored gradients (noise of the same norm)."""

Report: TypeAlias = Literal["visits", "once", "steps", "stream"]
"""What is scored: visit 1, 2, ... of the tasks that come back; tasks that do not; the last visit after 0, 1,
... inner steps; the mean over all visits of a user, the first of each task apart."""


_FINDERS = {
    "nothing": "nothing",
    "task": "told",
    "names": "named",
    "random": "random",
    "same domain": "random",
    "other domains": "random",
}


def finder_of(find: str) -> str:
    """Return who finds past visits: nothing, told, named, random, or by images."""
    return _FINDERS.get(find, "by images")


@final
@dataclass(frozen=True)
class Streams:
    """Users, each with tasks that come back.

    Attributes:
        users: How many users.
        pool: Tasks of each that come back.
        visits: How often each of them comes; with ``length``, visits that are scored one by one.
        once: Share of the visits that belong to tasks that never come back.
        law: Which task comes next (`torchemo.config.run.StreamSpec`).
        labels: Whether label orders are kept.
        exchanged: Classes that are replaced at every later visit.
        length: Visits of a user in all; None ends with the last of ``visits``.
        n_query: Queries per class.
        split: Classes they are drawn from.
        seed: Of the users; user u has the tasks of seed ``1000 seed + u``.
    """

    users: int = 200
    pool: int = 5
    visits: int = 5
    once: float = 0.2
    law: Literal["uniform", "rounds", "zipf", "bursts", "drift"] = "rounds"
    labels: Literal["kept", "shuffled"] = "shuffled"
    exchanged: int = 0
    length: int | None = None
    n_query: int = 15
    split: Literal["train", "val", "test"] = "test"
    seed: int = 0

    def spec(self) -> StreamSpec:
        """Return the stream of one user."""
        return StreamSpec(
            pool=self.pool,
            law=self.law,
            once=self.once,
            labels=self.labels,
            exchanged=self.exchanged,
        )


@final
@dataclass(frozen=True)
class Visits:
    """What a cell does with tasks that come back.

    Attributes:
        streams: The users and their tasks.
        find: How past visits are found.
        threshold: What is less sure than this is not recalled.
        answer: What answers queries.
        replay: Fit to the support examples of all visits of the task instead: the upper bound, which keeps
            all of them.
        first: Store the first gradient alone, and recall it at this many inner steps; 0 stores and recalls
            the gradients of all steps.
        join: Mean over all examples, or the sum.
        content: Gradients alone, or with curvature (`torchemo.memory.values`).
        own: Use the support set at hand; without it only recalled gradients move the parameters.
        broken: What is wrong on purpose.
        k: Most visits that are recalled, the latest.
        slots: Visits that a user's memory keeps; None keeps all.
        controller: What a full memory forgets.
        sharpness: Factor of the cosine to class means, where they answer.
        trust: Factor of likelihood ratios, where classes are recalled in shares.
        new: Weight of a class that is new there.
        right: Share of the visits for which the right task is told, where one is told; else a wrong one is.
        calibrated: Choose what decides recall and answer on visits of validation classes
            (`torchemo.lab.study.streams.calibrated`).
        weights: Of the parts of an answer (`torchemo.memory.lifelong.mixture`).
    """

    streams: Streams
    find: Find = "nothing"
    threshold: float = 0.0
    answer: Literal["adapted", "means", "both", "mixture"] = "adapted"
    replay: bool = False
    first: int = 0
    join: Literal["mean", "sum"] = "mean"
    content: Literal["per_step", "secant", "gauss_newton"] = "per_step"
    own: bool = True
    broken: Broken = "nothing"
    k: int | None = None
    slots: int | None = None
    controller: Literal["fifo", "lru", "clock"] = "lru"
    sharpness: float = 10.0
    trust: float = 0.25
    new: float = 1.0
    right: float = 1.0
    calibrated: bool = False
    weights: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.replay and self.find not in ("nothing", "task"):
            raise ConfigError(f"replay is told which task it is, got find = '{self.find}'.")
        told = self.finder in ("nothing", "told", "named", "random") and self.answer == "adapted"
        if self.slots is not None and not told:
            raise ConfigError(
                "class means of a full memory are not followed here: leave out slots."
            )

    @property
    def finder(self) -> str:
        """Who finds past visits: nothing, told, named, random, or by images."""
        return finder_of(self.find)

    @property
    def needs_ratio(self) -> bool:
        """Whether what tells classes apart has to be learned from the training classes."""
        return self.find.endswith("ratio") or self.find == "shares"

    @property
    def memory(self) -> "Visits":
        """The same memory, whatever answers: kinds that differ in their answers share it."""
        return replace(self, answer="adapted", sharpness=10.0, weights=())


class Asked(NamedTuple):
    """What a cell wants to know.

    Attributes:
        visits: The kind of memory.
        report: What is scored.
    """

    visits: Visits
    report: Report


def mean_rates(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average what was noted of the visits over seeds."""
    noted = [record["visits"] for record in records]
    found: dict[str, Any] = {"ms": sum(one["ms"] for one in noted) / len(noted)}
    if all("bytes" in one for one in noted):  # earlier scores have none
        found["bytes"] = noted[0]["bytes"]
    for name in ("known", "hits", "precision"):
        columns = zip(*(one[name] for one in noted), strict=True)
        found[name] = [_mean(column) for column in columns]
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(sum(known) / len(known), 4) if known else None
