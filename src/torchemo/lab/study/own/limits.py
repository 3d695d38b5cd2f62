"""R4 and R5: how few inner steps memory needs, and how much there is for it to gain. Not in the paper."""

from dataclasses import replace
from typing import TypeAlias

from torchemo.lab.study.entry import Cell, Contrast, entry, versus
from torchemo.lab.study.own.fresh import LONGER, chosen_rates, longer_options
from torchemo.lab.study.paper.cells import LEARNERS, base_cell, memory_cell
from torchemo.lab.study.scales import FOUR, Scale, rates

IN_ONE_STEP = " in one step"

Points: TypeAlias = tuple[tuple[str, ...], ...]
"""Rates to choose among, as options."""


_ONE_STEP: dict[str, Points] = {
    "cpu/images": rates((0.1, 0.006), (0.3, 0.006), (1.0, 0.006), (3.0, 0.006)),
    "cpu/regression": rates(*((a, b) for b in (0.012, 0.024) for a in (0.003, 0.01, 0.03))),
}
_RANGES = ((0.001, 0.005), (0.003, 0.015), (0.01, 0.05))
_ONE_STEP_META_SGD: dict[str, Points] = {
    "cpu/images": rates(
        *((0.05, 0.15, 0.006), (0.15, 0.45, 0.006), (0.5, 1.5, 0.006), (1.5, 4.5, 0.006))
    ),
    "cpu/regression": rates(*((*a, b) for b in (0.006, 0.012) for a in _RANGES)),
}
"""Rates for a single step, which has to go as far as several: those that T1 chose, and higher inner ones."""


def _one_step_grid(scale: Scale, learner: str) -> Points:
    known = _ONE_STEP_META_SGD if learner == "meta-sgd" else _ONE_STEP
    # Scale smoke chooses nothing that matters.
    return known.get(f"{scale.name}/{scale.tasks}", scale.own_grids.get(learner, scale.grid))


def _one_step_cells(scale: Scale) -> tuple[Cell, ...]:
    found: list[Cell] = []
    for learner in LEARNERS:
        base = base_cell(learner)
        found.append(replace(base, grid=(chosen_rates(scale, learner),)))
        found += [
            replace(
                cell,
                name=f"{cell.name}{IN_ONE_STEP}",
                title=f"{cell.title}, one inner step",
                options=("learner.steps=1",),
                grid=_one_step_grid(scale, learner),
            )
            for cell in (base, memory_cell(learner, "-offsets"))
        ]
    return tuple(found)


def _one_step_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found: list[Contrast] = []
    for learner in LEARNERS:
        ours, alone = f"{learner}-offsets{IN_ONE_STEP}", f"{learner}{IN_ONE_STEP}"
        found += [
            versus(ours, learner, "better", claims=("C2",)),
            versus(ours, alone),
            versus(alone, learner),
        ]
    return tuple(found)


R4 = entry("R4", _one_step_cells, _one_step_contrasts)

_SPECIALIST_RATES = 4
"""Points of the scale's grid: the two that remain are for the printed variant of EMO."""


def _on(scale: Scale, world: str) -> str:
    return f"anil on {scale.only_set(world)}"


def _gain_cells(scale: Scale) -> tuple[Cell, ...]:
    mixed = [
        replace(cell, grid=(chosen_rates(scale, cell.name),))
        for cell in (base_cell("anil", tests=FOUR), memory_cell("anil", "-offsets", tests=FOUR))
    ]
    alone = [
        replace(
            base_cell("anil", world=world),
            name=_on(scale, world),
            title=f"ANIL, trained on {scale.only_set(world)} alone",
            grid=scale.grid[:_SPECIALIST_RATES],
        )
        for world in FOUR
    ]
    longer = [
        replace(
            cell,
            name=f"{cell.name} longer",
            title=f"{cell.title}, {LONGER} times the outer steps",
            options=longer_options(scale),
            tests=scale.outside,
        )
        for cell in mixed
    ]
    return (*mixed, *alone, *longer)


def _gain_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found = [versus("anil-offsets", "anil")]
    for world in FOUR:
        name = scale.only_set(world)
        found += [
            Contrast(f"{_on(scale, world)} vs anil", _on(scale, world), "anil", test=world),
            Contrast(f"anil-offsets vs anil, {name}", "anil-offsets", "anil", test=world),
        ]
    found += [
        versus("anil longer", "anil"),
        *(
            versus("anil-offsets longer", "anil longer", test=test)
            for test in (None, *scale.outside)
        ),
    ]
    return tuple(found)


R5 = entry("R5", _gain_cells, _gain_contrasts)
