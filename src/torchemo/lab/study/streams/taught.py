"""L9: meta-training on visits of tasks that come back, against memory added after ordinary training."""

from dataclasses import replace

from torchemo.lab.study.entry import Cell, Contrast, Expectation, entry, versus
from torchemo.lab.study.scales import Scale
from torchemo.lab.study.streams.entries import TITLES, drawn
from torchemo.lab.study.streams.kinds import cell_name, cells_of, where, worlds_of

KINDS = ("none", "names", "told", "means", "weighed")
VISITS = 3
"""Visits of a task in one outer step; its data are as many times those of ordinary training."""
LONGER = 1.5
"""An outer step on three visits takes so many times the CPU time of one on a support set of one example."""
TAUGHT, LATER = ", trained on visits", ", trained longer"


def _cells(scale: Scale) -> tuple[Cell, ...]:
    found: list[Cell] = []
    visits = (f"learner.visits={VISITS}", f"data.n_shot={VISITS}")
    longer = (f"train.steps={round(LONGER * scale.steps)}",)
    for world in worlds_of(scale):
        for suffix, options in (("", ()), (TAUGHT, visits), (LATER, longer)):
            cells = cells_of("anil", scale, world, KINDS, title=TITLES["anil"], suffix=suffix)
            found += _trained(cells, options)
    return tuple(found)


def _trained(cells: list[Cell], options: tuple[str, ...]) -> list[Cell]:
    """Return cells that share runs with other options of training."""
    first = cells[0].name
    return [
        replace(
            cell,
            options=(*cell.options, *options),
            of=None if cell.name == first else first,
            role="base" if cell.name == first else cell.role,
            tests=(),
        )
        for cell in cells
    ]


def _contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found: list[Contrast] = []
    for world in worlds_of(scale):
        named = {kind: cell_name("anil", where(scale, world), kind) for kind in KINDS}
        pairs = [(kind, kind + end) for kind in KINDS for end in ("", LATER)]
        pairs += [("names", "none" + TAUGHT), ("names", "means" + TAUGHT)]
        pairs += [("weighed", "means" + TAUGHT)]
        found += [_versus(named, kind, *other.partition(",")) for kind, other in pairs]
    return drawn(scale, tuple(found), _cells)


def _versus(named: dict[str, str], kind: str, other: str, comma: str, end: str) -> Contrast:
    """Compare a kind of memory after training on visits with another cell."""
    expect: Expectation = "better" if kind == other and kind in ("names", "told") else "shown"
    return versus(named[kind] + TAUGHT, named[other] + comma + end, expect)


L9 = entry("L9", _cells, _contrasts)
