"""F3 and F7: how many slots, and how many neighbours, in three variants of EMO."""

from dataclasses import dataclass
from typing import final

from torchemo.lab.study.entry import (
    MIXED,
    OFFSETS,
    REPAIRED,
    Cell,
    Contrast,
    Expectation,
    entry,
    versus,
)
from torchemo.lab.study.paper.cells import MIXED_OPTIONS, REPAIRED_OPTIONS, base_cell, suffix
from torchemo.lab.study.paper.published import PUBLISHED, Published
from torchemo.lab.study.scales import Scale

_CHANGES = {MIXED: MIXED_OPTIONS, REPAIRED: REPAIRED_OPTIONS, OFFSETS: ()}
"""What a variant changes about its preset."""


@final
@dataclass(frozen=True)
class _Sweep:
    """Sizes of one part of a memory, from none to more than enough.

    Attributes:
        letter: What the paper calls the size.
        option: The option that sets it.
        variant: Which variant of EMO is varied.
        sizes: The sizes, none (the base learner) left out.
        chosen: The size that the preset has, whose rates the others take.
        middle: Where growth should end.
        claim: The claim it bears on.
        table: The paper's numbers, for the printed variant.
        everything: The size that needs no option, as it is all there is.
    """

    letter: str
    option: str
    variant: str
    sizes: tuple[int, ...]
    chosen: int
    middle: int
    claim: str
    table: Published | None = None
    everything: int | None = None

    def cell_name(self, size: int, n_shot: int) -> str:
        """Name the cell of a size; size 0 is the base learner."""
        head = f"{self.letter}={size} {self.variant}" if size else "maml"
        return head + suffix(n_shot)

    def cells(self, scale: Scale, n_shot: int) -> list[Cell]:
        """Return the cells of all sizes.

        At the scale of the paper each tunes its rates. Elsewhere all take those of the size that the preset
        has, which is what the paper does and favours its claim, and runs are shared with the other studies.
        """
        whole = scale.name == "paper"
        chosen = self.cell_name(self.chosen, n_shot)
        # As in R1: where the own gradient keeps its rate, that of the base learner fits.
        first = "maml" if self.variant == REPAIRED else None
        found = []
        for size in self.sizes:
            name = self.cell_name(size, n_shot)
            found.append(
                Cell(
                    name,
                    f"{self.letter} = {size} {self.variant}{suffix(n_shot)}",
                    "maml-offsets-joint" if self.variant == OFFSETS else "maml-emo-paper",
                    "memory",
                    options=(*_CHANGES[self.variant], *self._sized(size)),
                    world=_world(scale),
                    n_shot=n_shot,
                    of=None if whole else first if name == chosen else chosen,
                    variant=self.variant,
                )
            )
        return found

    def _sized(self, size: int) -> tuple[str, ...]:
        return () if size == self.everything else (f"{self.option}={size}",)

    def contrasts(self, n_shot: int) -> list[Contrast]:
        """Grow from nothing to the middle, then stay: what the paper says of T and of k."""
        pairs: list[tuple[int, int, Expectation]] = [
            (self.middle, 0, "better"),
            (self.middle, self.sizes[0], "better"),
            (self.sizes[-1], self.middle, "no better"),
        ]
        names = {size: self.cell_name(size, n_shot) for size in (0, *self.sizes)}
        return [
            versus(
                names[a],
                names[b],
                expect,
                paper=self._printed(a, b, n_shot),
                claims=(self.claim,),
            )
            for a, b, expect in pairs
            if a != b
        ]

    def _printed(self, a: int, b: int, n_shot: int) -> float | None:
        if self.table is None or not {str(a), str(b)} <= set(self.table.header):
            return None
        return self.table.gain(str(a), str(b), shot=f"{n_shot}-shot")


def _world(scale: Scale) -> str:
    """The paper sweeps on miniImageNet; elsewhere the mixed sets, whose runs T1 has already."""
    return "narrow" if scale.name == "paper" else "mixed"


def _slots(scale: Scale) -> tuple[_Sweep, ...]:
    option, few, own = "memory.capacity", scale.capacities, scale.own_capacities
    usual, ours = _among(few, 100), _among(own, 16 if scale.regression else 8)
    return (
        _Sweep("T", option, MIXED, few, usual, usual, "C4", PUBLISHED["F3"]),
        _Sweep("T", option, REPAIRED, few, usual, usual, "C4"),
        _Sweep("T", option, OFFSETS, own, ours, ours, "C4"),
    )


def _neighbours(scale: Scale) -> tuple[_Sweep, ...]:
    option, few, own = "memory.k", scale.neighbours, scale.own_neighbours
    usual, everything = _among(few, 20), own[-1]
    return (
        _Sweep("k", option, MIXED, few, usual, usual, "C5", PUBLISHED["F7"]),
        _Sweep("k", option, REPAIRED, few, usual, usual, "C5"),
        _Sweep("k", option, OFFSETS, own, everything, own[-2], "C5", None, everything),
    )


def _among(sizes: tuple[int, ...], size: int) -> int:
    return size if size in sizes else sizes[-1]


def _cells(scale: Scale, sweeps: tuple[_Sweep, ...]) -> tuple[Cell, ...]:
    found: list[Cell] = []
    for n_shot in scale.shots:
        found.append(base_cell("maml", world=_world(scale), n_shot=n_shot))
        for sweep in sweeps:
            found += sweep.cells(scale, n_shot)
    return tuple(found)


def _contrasts(scale: Scale, sweeps: tuple[_Sweep, ...]) -> tuple[Contrast, ...]:
    return tuple(
        contrast
        for n_shot in scale.shots
        for sweep in sweeps
        for contrast in sweep.contrasts(n_shot)
    )


F3 = entry(
    "F3",
    lambda scale: _cells(scale, _slots(scale)),
    lambda scale: _contrasts(scale, _slots(scale)),
)
F7 = entry(
    "F7",
    lambda scale: _cells(scale, _neighbours(scale)),
    lambda scale: _contrasts(scale, _neighbours(scale)),
)
