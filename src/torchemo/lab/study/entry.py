"""What a study is: cells to run, contrasts to draw between them, and how to show them. No torch here."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypeAlias, final

from torchemo.lab.study.paper.published import PUBLISHED, Published
from torchemo.lab.study.scales import SCALES, Scale
from torchemo.lab.study.streams.visits import Report, Visits

MIXED, REPAIRED, OFFSETS = "mixed", "repaired", "offsets"
"""Variants of EMO beside those that presets are named after: the printed one with stored gradients that are
summed beside an own gradient that is averaged, as it was recorded; the same with what R1 finds to break it
repaired; our memory of offsets."""

USUAL_SCALES = tuple(name for name, scale in SCALES.items() if scale.network is None)
"""Where an entry can be run that does not say so."""

LIFELONG = "lifelong"
"""Variant of the memories of tasks that come back."""

Role: TypeAlias = Literal["base", "memory", "control"]
Expectation: TypeAlias = Literal["better", "worse", "no better", "shown"]


@final
@dataclass(frozen=True)
class Cell:
    """One method of a study, trained once per seed.

    Attributes:
        name: Its name in the entry.
        title: Its name in tables and figures.
        preset: The preset it starts from.
        role: base: no memory. memory: with memory. control: a ``memory`` cell with one thing broken.
        options: Options of the configuration on top of preset and scale.
        world: Task set that it is trained and tested on (`Scale.worlds`).
        tests: Further task sets it is tested on, or `torchemo.lab.study.scales.SEEN`.
        n_shot: K.
        of: It takes the rates chosen for this cell, as controls do; others choose their own on a grid.
        missing: Why it cannot be run, if it cannot.
        grid: Rates among which it chooses, as options, where those of the scale do not fit; a single one
            was chosen elsewhere.
        variant: Which variant of EMO it has, where its preset does not say so (`MIXED`, `REPAIRED`).
        visits: What it does with tasks that come back, where it is tested on these.
        report: What of these is scored.
        network: Pretrained network whose features it sees. Its sizes are then those of its preset, not those
            of the scale, and its data are opened as they lie, with their features from the cache.
    """

    name: str
    title: str
    preset: str
    role: Role
    options: tuple[str, ...] = ()
    world: str = "mixed"
    tests: tuple[str, ...] = ()
    n_shot: int = 1
    of: str | None = None
    missing: str | None = None
    grid: tuple[tuple[str, ...], ...] = ()
    variant: str | None = None
    visits: Visits | None = None
    report: Report = "visits"
    network: str | None = None


@final
@dataclass(frozen=True)
class Contrast:
    """One cell against another on the same tasks: ``cell`` minus ``against``.

    Attributes:
        name: Its name in the entry.
        cell: The first.
        against: The second.
        expect: What the paper says of the first: better, worse, no better; ``shown`` claims nothing.
        test: Task set of the test tasks, or `SEEN`; None for the cells' own.
        step: Inner steps of the first, or number of its visit from 0; None for the last.
        against_step: The same of the second.
        paper: The paper's difference in points, oriented so that positive is better.
        claims: Claims C1 .. C7 it bears on.
    """

    name: str
    cell: str
    against: str
    expect: Expectation = "shown"
    test: str | None = None
    step: int | None = None
    against_step: int | None = None
    paper: float | None = None
    claims: tuple[str, ...] = ()


def versus(
    cell: str, against: str, expect: Expectation = "shown", *, test: str | None = None, **more: Any
) -> Contrast:
    """Set one cell against another, under a name that says so."""
    where = "" if test is None else f", {test}"
    return Contrast(f"{cell} vs {against}{where}", cell, against, expect, test, **more)


@final
@dataclass(frozen=True)
class Entry:
    """A table or a figure of the paper as a study.

    Attributes:
        name: T1 .. T9, F1 .. F7; R1 to R7, P1, P2 and L1 to L7 are our own.
        title: What it is about.
        says: What the paper says, one sentence.
        published: The paper's own numbers.
        cells: Cells at a scale.
        contrasts: Contrasts at a scale.
        figure: How it is drawn.
        measure: score: test tasks. cost: parameters, bytes and time, without training.
        scales: Where it can be run: ``scale/tasks``.
        note: What a reader must know about our version of it.
        seeds: Training seeds, where they are not those of the scale.
        test_seed: Which test tasks; all entries share those of 0 unless they must not.
        statistics: How test queries are answered (`torchemo.runs.score.Protocol`).
        test_tasks: Test tasks by ``scale/tasks``, where they are not those of the scale.
    """

    name: str
    title: str
    says: str
    published: Published
    cells: Callable[[Scale], tuple[Cell, ...]]
    contrasts: Callable[[Scale], tuple[Contrast, ...]]
    figure: Literal["forest", "steps", "sweep", "matrix", "curves", "bars", "visits", "cost"] = (
        "forest"
    )
    measure: Literal["score", "cost"] = "score"
    scales: tuple[str, ...] = USUAL_SCALES
    note: str = ""
    seeds: tuple[int, ...] | None = None
    test_seed: int = 0
    statistics: Literal["inductive", "transductive"] = "transductive"
    test_tasks: Mapping[str, int] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """What it is about, as it is shown: who says so, if it is the paper."""
        return f"The paper: {self.says}" if self.in_paper else self.says

    @property
    def in_paper(self) -> bool:
        """Whether it is a table or a figure of the paper."""
        return self.name[0] in "TF"


def entry(
    name: str,
    cells: Callable[[Scale], tuple[Cell, ...]],
    contrasts: Callable[[Scale], tuple[Contrast, ...]] = lambda scale: (),
) -> Entry:
    """Return the study that ``entries.toml`` describes under this name."""
    about: dict[str, Any] = {
        n: tuple(v) if isinstance(v, list) else v for n, v in _texts()[name].items()
    }
    published = PUBLISHED.get(about.pop("published", name), Published(""))
    return Entry(name, published=published, cells=cells, contrasts=contrasts, **about)


@cache
def _texts() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("torchemo.lab.study").joinpath("entries.toml").read_text("utf-8"))
