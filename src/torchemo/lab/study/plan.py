"""From an entry and a scale to runs: who is trained with what, and how a run is named."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any, TypeAlias, final

import tomli_w

from torchemo.config.presets import at_once, names, preset
from torchemo.config.run import RunConfig
from torchemo.config.toml import UNSET, from_dict, override, to_dict
from torchemo.core.errors import ConfigError
from torchemo.lab.study.controls import control_contrasts, controls_of
from torchemo.lab.study.entry import Cell, Contrast, Entry
from torchemo.lab.study.scales import Scale

Sources: TypeAlias = Mapping[str, tuple[str, ...]]
"""World -> what stands in ``data.source``."""


@final
@dataclass(frozen=True)
class Study:
    """An entry at a scale, ready to run.

    Attributes:
        entry: What the paper says and how we look at it.
        scale: How large.
        cells: All cells, controls included.
        contrasts: All contrasts, those with controls included.
        seeds: Training seeds.
        options: Options of every run on top of everything else.
        chosen: Patterns of the cells that were chosen; empty for all.
        controlled_cells: Patterns of the cells that have their controls, or of the controls; empty for all of
            them, or none.
    """

    entry: Entry
    scale: Scale
    cells: tuple[Cell, ...]
    contrasts: tuple[Contrast, ...]
    seeds: tuple[int, ...]
    options: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    controlled_cells: tuple[str, ...] = ()

    @property
    def available(self) -> tuple[Cell, ...]:
        """Cells that can be run."""
        return tuple(cell for cell in self.cells if cell.missing is None)

    @property
    def controlled(self) -> bool:
        """Whether the cells with memory have their controls."""
        remembering = any(cell.role == "emo" for cell in self.available)
        return not remembering or any(cell.role == "control" for cell in self.cells)

    def grid(self, cell: Cell) -> tuple[tuple[str, ...], ...]:
        """Return the rates among which a cell chooses; controls take those of their cell."""
        if self.entry.measure == "cost":
            return ((),)
        if cell.grid:
            return cell.grid
        learner = next((n for n in self.scale.own_grids if cell.preset.startswith(n)), None)
        return self.scale.grid if learner is None else self.scale.own_grids[learner]

    def chooser(self, cell: Cell) -> Cell:
        """Return the cell whose rates a cell takes; a control's cell may itself take those of another."""
        cells = {other.name: other for other in self.cells}
        while cell.of is not None:
            cell = cells[cell.of]
        return cell

    def config(
        self, cell: Cell, sources: Sources, *, rates: tuple[str, ...] = (), seed: int = 0
    ) -> RunConfig:
        """Resolve a cell: preset < scale < cell < rates < options of the study."""
        return _resolved(
            cell, self.scale, sources, more=(*rates, *self.options, f"train.seed={seed}")
        )


def plan(
    entry: Entry,
    scale: Scale,
    *,
    controls: bool = True,
    controlled_cells: tuple[str, ...] = (),
    chosen: tuple[str, ...] = (),
    seeds: tuple[int, ...] | None = None,
    options: tuple[str, ...] = (),
) -> Study:
    """Lay out an entry at a scale.

    Args:
        entry: The entry.
        scale: The scale.
        controls: Add the controls of every cell with memory.
        controlled_cells: Patterns of the cells that get them, or of the controls; empty for all.
        chosen: Patterns of cell names, such as ``maml*``; empty for all.
        seeds: Training seeds; those of the entry or the scale by default.
        options: Options of every run on top of everything else.
    """
    cells = [_checked(cell) for cell in entry.cells(scale)]
    if scale.base_rates:
        cells = _sharing(cells)
    cells = _chosen(cells, chosen, entry)
    remembering = [cell for cell in cells if cell.role == "emo"]
    extra = [
        control
        for cell in remembering
        if cell.missing is None
        for control in controls_of(cell, _resolved(cell, scale, {}, more=options))
        if _named(cell, controlled_cells) or _named(control, controlled_cells)
    ]
    if controlled_cells and not extra:
        raise ConfigError(
            f"none of the cells has controls and a name like {', '.join(controlled_cells)}.",
            hint=f"These have: {', '.join(cell.name for cell in remembering) or 'none'}.",
        )
    if not controls or entry.measure != "score":
        extra = []
    known = {cell.name for cell in cells if cell.missing is None}
    contrasts = [c for c in entry.contrasts(scale) if {c.cell, c.against} <= known]
    trained = usual_seeds(entry, scale) if seeds is None else seeds
    return Study(
        entry,
        scale,
        (*cells, *extra),
        (*contrasts, *control_contrasts(extra, cells)),
        trained if entry.measure == "score" else trained[:1],
        options,
        chosen,
        controlled_cells,
    )


def usual_seeds(entry: Entry, scale: Scale) -> tuple[int, ...]:
    """Return the training seeds of an entry where none are asked for."""
    return scale.seeds if entry.seeds is None else entry.seeds


LATER: tuple[tuple[str, ...], ...] = (
    ("emo", "retrieval", "trust"),
    ("emo", "memory", "afterwards"),
)
"""Options that were added when there were records, in that order; None, they change nothing."""


def run_id(config: RunConfig) -> str:
    """Name a run by everything that decides it; where its data lie on a disk does not."""
    return run_names(config)[0]


def run_names(config: RunConfig) -> tuple[str, ...]:
    """Return the name of a run, and those it may have been recorded with.

    A new option would give every run another name, and so part it from what was recorded of it. Those that
    are `LATER` are therefore left out where they are None; what was recorded meanwhile has the first ones in.
    """
    places = tuple(PurePath(source).name for source in config.data.source)
    plain = to_dict(replace(config, data=replace(config.data, source=places)))
    found = [_digest(plain)]
    for *parts, option in reversed(LATER):
        section = plain
        for part in parts:
            section = section[part]
        if section[option] == UNSET:
            del section[option]
        found.append(_digest(plain))
    return tuple(reversed(found))


def _digest(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(tomli_w.dumps(plain).encode()).hexdigest()[:16]


def minutes(study: Study, *, workers: int = 2) -> float:
    """Estimate how long a study takes when nothing of it has been run."""
    if study.entry.measure == "cost":
        return 1.0
    steps = scored = 0
    for cell in study.available:
        runs = len(study.seeds) + (0 if cell.of is not None else len(study.grid(cell)) - 1)
        config = _resolved(cell, study.scale, {}, more=study.options)
        steps += runs * config.train.iterations
        scored += len(study.seeds) * (1 + len(cell.tests))
    # A test task costs about a fifth of a step of four: no backward pass through the inner loop.
    steps += scored * study.scale.test_tasks // 5
    return steps * study.scale.seconds / workers / 60


def _chosen(cells: list[Cell], patterns: tuple[str, ...], entry: Entry) -> list[Cell]:
    found = [cell for cell in cells if _named(cell, patterns)]
    if not found:
        raise ConfigError(
            f"{entry.name} has no cell like {', '.join(patterns)}.",
            hint=f"It has: {', '.join(cell.name for cell in cells)}.",
        )
    of = {cell.name: cell.of for cell in cells if cell.of is not None}
    needed = {cell.name for cell in found}
    while more := {of[name] for name in needed if name in of} - needed:
        needed |= more  # they take the rates of these, which may take those of others
    return [cell for cell in cells if cell.name in needed]


def _named(cell: Cell, patterns: tuple[str, ...]) -> bool:
    """Whether a cell has such a name; all have where there are no patterns."""
    return not patterns or any(fnmatchcase(cell.name, pattern) for pattern in patterns)


def _sharing(cells: list[Cell]) -> list[Cell]:
    """Let learners with our memory take the rates chosen for the learner without, where that is a cell."""
    plain = [c for c in cells if c.role == "base" and not (c.of or c.options or c.missing)]
    base = {(f"{c.preset}-emo", c.world, c.n_shot): c.name for c in plain}
    return [
        replace(c, of=c.of or base.get((c.preset, c.world, c.n_shot)))
        if c.role == "emo" and not c.grid
        else c
        for c in cells
    ]


def _checked(cell: Cell) -> Cell:
    if cell.missing is None and cell.preset not in names():
        return replace(cell, missing=f"there is no preset '{cell.preset}' yet")
    return cell


def _resolved(
    cell: Cell, scale: Scale, sources: Sources, *, more: tuple[str, ...] = ()
) -> RunConfig:
    # What learns when is for a cell to say: only those of R7 let slots learn after the learner.
    start = at_once(preset(cell.preset, n_shot=cell.n_shot, regression=scale.regression))
    plain = to_dict(start)
    remembers = start.emo.memory.capacity > 0
    for option in (
        *scale.options,
        *(scale.memory_options if remembers else ()),
        *cell.options,
        *more,
    ):
        override(plain, option)
    config = from_dict(plain, RunConfig, where=f"cell {cell.name}")
    if config.emo.memory.capacity == 0:
        # Without slots nothing else about a memory matters: the base learner, and its run, are shared.
        config = replace(config, emo=RunConfig().emo)
    source = sources.get(cell.world, config.data.source)
    size = config.data.image_size if scale.regression else scale.image_size
    return replace(config, data=replace(config.data, source=source, image_size=size))
