"""L8: what is unsure counts little, and answers are weighed; all of it chosen on validation classes."""

from torchemo.lab.study.entry import Cell, Contrast, entry
from torchemo.lab.study.scales import ONCE, Scale
from torchemo.lab.study.streams.entries import TITLES, drawn
from torchemo.lab.study.streams.kinds import (
    RIGHT,
    Pair,
    by_visit,
    cells_of,
    paired,
    streams_of,
    worlds_of,
)

MISTAKEN = tuple(f"{share} % right" for share in RIGHT)
KINDS = (
    "none", "images", "images sure", "shares", "wrong shares", "shares means", "shares weighed",
    "names", "means", "both", "weighed", "told", *MISTAKEN,
)  # fmt: skip
FOUND = (
    Pair("shares", "none", "better"),
    Pair("images sure", "none"),
    Pair("shares", "images", "better"),
    Pair("shares", "wrong shares", "better"),
    Pair("shares means", "none"),
    Pair("shares weighed", "none", "better"),
    Pair("shares weighed", "shares"),
    Pair("shares weighed", "shares means"),
    *(Pair(kind, "none") for kind in MISTAKEN),
)
NAMED = (
    Pair("weighed", "none", "better"),
    Pair("weighed", "names"),
    Pair("weighed", "means"),
    Pair("both", "means"),
)
NEVER_BELOW = (Pair("weighed", "means"), Pair("weighed", "names"))
"""Compared at every visit."""
UNHARMED = (
    Pair("images sure", "none"),
    Pair("shares", "none"),
    Pair("shares weighed", "shares means"),
    Pair("weighed", "means"),
)


def _cells(scale: Scale) -> tuple[Cell, ...]:
    found: list[Cell] = []
    for world in worlds_of(scale):
        found += cells_of("anil", scale, world, KINDS, title=TITLES["anil"])
    return tuple(found)


def _contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found = paired("anil", scale, (*FOUND, *NAMED))
    both = paired("anil", scale, NEVER_BELOW)
    found += [c for visit in range(1, streams_of(scale).visits) for c in by_visit(both, visit)]
    found += paired("anil", scale, UNHARMED, test=ONCE)
    return drawn(scale, tuple(found), _cells)


L8 = entry("L8", _cells, _contrasts)
