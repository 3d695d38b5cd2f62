"""L1 to L4: tasks that come back with new examples. Not in the paper, but what it sets out from."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torchemo.lab.study.entry import Cell, Contrast, Expectation, entry
from torchemo.lab.study.scales import ONCE, Scale
from torchemo.lab.study.streams.kinds import (
    Pair,
    by_visit,
    cell_name,
    cells_of,
    paired,
    streams_of,
    where,
    worlds_of,
)

TITLES = {"anil": "ANIL", "maml": "MAML", "meta-sgd": "Meta-SGD", "protonet": "ProtoNet"}

MAIN = (
    "none", "names", "images", "told", "both", "images both", "means", "images means",
    "replay", "random", "noise", "wrong labels", "secant",
)  # fmt: skip
FEW = ("none", "names", "images", "told", "both", "replay", "random", "wrong labels")

GAINS: tuple[Pair, ...] = (
    Pair("names", "none", "better"),
    Pair("images", "none", "better"),
    Pair("told", "none", "better"),
)
COMPARED: tuple[Pair, ...] = (
    Pair("names", "replay"),
    Pair("told", "replay"),
    Pair("names", "random", "better"),
    Pair("told", "noise", "better"),
    Pair("told", "wrong labels", "better"),
    Pair("names", "means"),
    Pair("both", "names"),
    Pair("both", "means"),
    Pair("images both", "images"),
    Pair("images both", "images means"),
    Pair("secant", "names"),
    Pair("curvature", "none", "better"),
    Pair("curvature", "told"),
    Pair("curvature", "replay"),
)
UNHARMED: tuple[Pair, ...] = (
    Pair("names", "none"),
    Pair("images", "none"),
    Pair("both", "means"),
)


def first_learner(scale: Scale) -> str:
    """Return the learner that most cells have."""
    return "maml" if scale.regression else "anil"


def _main_cells(scale: Scale) -> tuple[Cell, ...]:
    learner, found = first_learner(scale), list[Cell]()
    streams = streams_of(scale, users=200 if scale.regression else 60)
    kinds = (*MAIN, "curvature") if scale.regression else MAIN
    for world in worlds_of(scale):
        found += cells_of(learner, scale, world, kinds, title=TITLES[learner], streams=streams)
        if not scale.regression:
            found += cells_of(
                "protonet", scale, world, ("none", "replay"), title="ProtoNet", streams=streams
            )
    return tuple(found)


def _main_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    learner = first_learner(scale)
    gains = paired(learner, scale, GAINS, claims=("C1",))
    visits = streams_of(scale).visits
    earlier = [c for visit in range(2, visits) for c in by_visit(gains, visit)]
    once = paired(learner, scale, UNHARMED, test=ONCE)
    return drawn(scale, (*gains, *earlier, *paired(learner, scale, COMPARED), *once), _main_cells)


def drawn(
    scale: Scale, contrasts: tuple[Contrast, ...], cells: Callable[[Scale], tuple[Cell, ...]]
) -> tuple[Contrast, ...]:
    """Leave out contrasts of cells that a scale does not have."""
    known = {cell.name: cell for cell in cells(scale)}
    return tuple(
        c
        for c in contrasts
        if {c.cell, c.against} <= known.keys()
        and (c.test is None or all(c.test in known[n].tests for n in (c.cell, c.against)))
    )


L1 = entry("L1", _main_cells, _main_contrasts)


def _maml_cells(scale: Scale) -> tuple[Cell, ...]:
    found: list[Cell] = []
    for world in worlds_of(scale):
        streams = streams_of(scale, users=20)
        found += cells_of("maml", scale, world, FEW, title="MAML", streams=streams)
    return tuple(found)


def _maml_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    gains = paired("maml", scale, GAINS, claims=("C1",))
    others = paired("maml", scale, COMPARED), paired("maml", scale, UNHARMED, test=ONCE)
    return drawn(scale, (*gains, *others[0], *others[1]), _maml_cells)


L2 = entry("L2", _maml_cells, _maml_contrasts)

POOLS = {"little overlap": 3, "heavy overlap": 10}
FOUND = ("none", "told", "images", "by class", "by cosine", "by classifiers", "by mean")


def _found_cells(scale: Scale) -> tuple[Cell, ...]:
    found: list[Cell] = []
    for world in worlds_of(scale):
        found += cells_of("anil", scale, world, FOUND, title="ANIL")
        for name, pool in POOLS.items():
            streams = streams_of(scale, users=180 // pool, pool=pool)
            kinds = ("none", "told", "images", "images both", "images means")
            found += cells_of(
                "anil", scale, world, kinds, title="ANIL", streams=streams, suffix=f", {name}"
            )
    return tuple(found)


def _found_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    kinds = [kind for kind in FOUND if kind not in ("none", "told")]
    found = paired("anil", scale, tuple(Pair(kind, "none", "better") for kind in kinds))
    found += paired("anil", scale, tuple(Pair(kind, "none") for kind in kinds), test=ONCE)
    for name in POOLS:
        suffix = f", {name}"
        pairs = (
            Pair("images", "none", "better"),
            Pair("images both", "images means"),
            Pair("images both", "images"),
        )
        found += paired("anil", scale, pairs, suffix=suffix)
        found += paired("anil", scale, (Pair("images", "none"),), suffix=suffix, test=ONCE)
    return drawn(scale, tuple(found), _found_cells)


L3 = entry("L3", _found_cells, _found_contrasts)

SETTINGS = ("none", "told", "first once", "first always", "sum", "alone", "k=1", "k=2")
CONTROLLERS = ("fifo", "lru", "clock")


def setting_worlds(scale: Scale) -> tuple[str, ...]:
    """Return the task sets of studies with many cells: birds and flowers."""
    return worlds_of(scale)[::3]


def _setting_cells(scale: Scale) -> tuple[Cell, ...]:
    learner, found = first_learner(scale), list[Cell]()
    title = TITLES[learner]
    for world in setting_worlds(scale):
        found += cells_of(learner, scale, world, SETTINGS, title=title)
        found += [
            _stepwise(cell)
            for cell in cells_of(
                learner, scale, world, ("none", "told"), title=title, suffix=", steps"
            )
        ]
        zipf = streams_of(scale, users=60, pool=20, law="zipf", once=0.0, length=100)
        kinds = partial(cells_of, learner, scale, world, title=title, streams=zipf)
        found += whole_streams(kinds(("none", "told"), suffix=", zipf"))
        for controller in CONTROLLERS:
            full = kinds(("told",), suffix=f", zipf {controller}", slots=10, controller=controller)
            found += whole_streams(full)
    return tuple(found)


def _stepwise(cell: Cell) -> Cell:
    return replace(cell, report="steps", tests=())


def whole_streams(cells: list[Cell]) -> list[Cell]:
    """Return cells that report the mean over all visits."""
    return [replace(cell, report="stream", tests=()) for cell in cells]


def _setting_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    learner, worlds = first_learner(scale), setting_worlds(scale)
    pairs = tuple(Pair(kind, "told") for kind in SETTINGS[2:])
    found = paired(learner, scale, pairs, worlds=worlds)
    return drawn(scale, tuple(found + _controlled(learner, scale, worlds)), _setting_cells)


def _controlled(learner: str, scale: Scale, worlds: tuple[str, ...]) -> list[Contrast]:
    """Return the contrasts on which the claims about controllers and inner steps rest."""
    found = []
    for world in worlds:
        place = where(scale, world)
        told, none = (cell_name(learner, place, kind) for kind in ("told", "none"))
        fifo, lru, clock = (f"{told}, zipf {c}" for c in CONTROLLERS)
        expected: dict[tuple[str, str], Expectation] = {
            (lru, fifo): "better",
            (clock, fifo): "better",
            (fifo, f"{none}, zipf"): "worse",
        }
        for (first, second), expect in expected.items():
            found.append(Contrast(f"{first} vs {second}", first, second, expect, claims=("C3",)))
        found.append(Contrast(f"{lru} vs all slots", lru, f"{told}, zipf"))
        one_step = f"{told}, steps"
        name = f"{told} in one step vs {none}"
        found.append(Contrast(name, one_step, f"{none}, steps", "better", step=1, claims=("C2",)))
    return found


L4 = entry("L4", _setting_cells, _setting_contrasts)
