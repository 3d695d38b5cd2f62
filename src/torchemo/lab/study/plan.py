"""From an entry and a scale to runs: who is trained with what, and how a run is named."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import PurePath
from typing import Any, TypeAlias, final

import tomli_w

from torchemo.config.presets import names, preset
from torchemo.config.registry import Registry
from torchemo.config.run import RunConfig
from torchemo.config.toml import from_dict, override, to_dict
from torchemo.core.errors import ConfigError
from torchemo.lab.study.controls import control_contrasts, controls_of
from torchemo.lab.study.entry import Cell, Contrast, Entry
from torchemo.lab.study.scales import Scale
from torchemo.runs.experiment import PARTS, reduced

Sources: TypeAlias = Mapping[str, tuple[str, ...]]
"""Task set -> what stands in ``data.source``."""


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
        remembering = any(cell.role == "memory" for cell in self.available)
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
        own = (*self.options, f"train.seed={seed}")
        return _resolved(cell, self.scale, sources, rates=rates, options=own)


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
        options: Options of every run whose parts have them, on top of everything else.
    """
    cells = _chosen(_cells(entry, scale), chosen, entry)
    _refuse_strangers(options, cells, scale)
    extra = _controls(cells, scale, controlled_cells, options)
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


def _cells(entry: Entry, scale: Scale) -> list[Cell]:
    presets = set(names())
    cells = [_checked(cell, presets) for cell in entry.cells(scale)]
    return _sharing(cells) if scale.base_rates else cells


def _controls(
    cells: list[Cell], scale: Scale, patterns: tuple[str, ...], options: tuple[str, ...]
) -> list[Cell]:
    """Return the controls of the cells with memory, those with such names."""
    remembering = [cell for cell in cells if cell.role == "memory"]
    found = [
        control
        for cell in remembering
        if cell.missing is None
        for control in controls_of(cell, _resolved(cell, scale, {}, options=options))
        if _named(cell, patterns) or _named(control, patterns)
    ]
    if patterns and not found:
        raise ConfigError(
            f"none of the cells has controls and a name like {', '.join(patterns)}.",
            hint=f"These have: {', '.join(cell.name for cell in remembering) or 'none'}.",
        )
    return found


def usual_seeds(entry: Entry, scale: Scale) -> tuple[int, ...]:
    """Return the training seeds of an entry where none are asked for."""
    return scale.seeds if entry.seeds is None else entry.seeds


SCHEMA = 2
"""Part of every run's name. Raise it when a default changes: the same options then decide another run."""


def run_id(config: RunConfig) -> str:
    """Name a run by the options that differ from their defaults; where its data lie does not matter.

    A new option renames nothing, as long as its default is what runs did before.
    """
    places = tuple(PurePath(source).name for source in config.data.source)
    kept = to_dict(reduced(replace(config, data=replace(config.data, source=places))))
    usual = to_dict(RunConfig())
    for section in kept.keys() - PARTS.keys():
        kept[section] = {n: v for n, v in kept[section].items() if v != usual[section][n]}
    text = tomli_w.dumps(_sorted({"schema": SCHEMA, **kept}))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sorted(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {n: _sorted(v) if isinstance(v, Mapping) else v for n, v in sorted(plain.items())}


def minutes(study: Study, *, workers: int = 2) -> float:
    """Estimate how long a study takes when nothing of it has been run."""
    if study.entry.measure == "cost":
        return 1.0
    steps = scored = 0
    for cell in study.available:
        if cell.visits is not None and cell.of is not None:
            continue  # it shares the runs of the learner without memory
        runs = len(study.seeds) + (0 if cell.of is not None else len(study.grid(cell)) - 1)
        config = _resolved(cell, study.scale, {}, options=study.options)
        steps += runs * config.outer_steps
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
    """Return whether a cell has such a name; all have where there are no patterns."""
    return not patterns or any(fnmatchcase(cell.name, pattern) for pattern in patterns)


AT_BASE_RATES = ("-offsets-joint", "-emo")
"""Endings of presets that are made for the rates of the learner without memory."""


def _sharing(cells: list[Cell]) -> list[Cell]:
    """Let learners with memory take the rates chosen for the learner without, where that is a cell."""
    plain = [c for c in cells if c.role == "base" and not (c.of or c.options or c.missing)]
    base = {
        (f"{c.preset}{ending}", c.world, c.n_shot): c.name
        for c in plain
        for ending in AT_BASE_RATES
    }
    return [
        replace(c, of=c.of or base.get((c.preset, c.world, c.n_shot)))
        if c.role == "memory" and not c.grid
        else c
        for c in cells
    ]


def _checked(cell: Cell, presets: set[str]) -> Cell:
    if cell.missing is None and cell.preset not in presets:
        return replace(cell, missing=f"there is no preset '{cell.preset}' yet")
    return cell


def _resolved(
    cell: Cell,
    scale: Scale,
    sources: Sources,
    *,
    rates: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> RunConfig:
    """Return the configuration of a cell: preset < scale < cell < rates < options.

    Those of a cell must be options of its parts. All others are for many cells, and apply where the parts
    of this one have them.
    """
    plain = to_dict(
        _preset(
            cell.preset,
            n_shot=cell.n_shot,
            regression=scale.regression,
            pretrained=cell.network or scale.network,
        )
    )
    for option in cell.options:
        override(plain, option)
    # After the cell, so that they reach the parts it chooses, but for what it sets itself.
    own = {option.partition("=")[0] for option in cell.options}
    # Recorded studies normalise queries together, whatever presets do today.
    given = ("model.bn=transductive", *scale.options, *scale.memory_options)
    given = () if cell.network else given
    _set_where_known(plain, (o for o in given if o.partition("=")[0] not in own))
    _set_where_known(plain, (*rates, *options))
    config = reduced(from_dict(plain, RunConfig, where=f"cell {cell.name}"))
    source = sources.get(cell.world, config.data.source)
    size = config.data.image_size if scale.regression else scale.image_size
    return replace(config, data=replace(config.data, source=source, image_size=size))


_preset = cache(preset)
"""Studies have many cells of few presets."""


def _set_where_known(plain: dict[str, Any], options: Iterable[str]) -> None:
    """Set options in plain values, those that the parts named there have."""
    for option in options:
        place = _place(plain, option)
        if place is not None:
            override(plain, place)


def _place(plain: Mapping[str, Any], option: str) -> str | None:
    """Return an option with its path in a configuration; None if it is one of parts that are not there."""
    path, equals, value = option.partition("=")
    section, *within = path.split(".")
    if section not in PARTS or not within:
        return option
    found = _path_in(PARTS[section], plain[section], within)
    return None if found is None else f"{'.'.join((section, *found))}{equals}{value}"


def _path_in(registry: Registry, part: Mapping[str, Any], path: list[str]) -> list[str] | None:
    """Return where a part has an option: itself, a part of it, or the learner underneath (BMG)."""
    kind = registry.options_of(part["name"])
    nested: Mapping[str, Registry] = getattr(kind, "PARTS", {})
    first, *others = path
    if first in nested and others:
        inside = {first: others}
    elif first == "name" or first in {option.name for option in fields(kind)}:
        return path
    else:
        inside = {name: path for name, inner in nested.items() if inner is registry}
    for name, rest in inside.items():
        given = {"name": getattr(kind(), name).name, **part.get(name, {})}
        found = _path_in(nested[name], given, rest)
        if found is not None:
            return [name, *found]
    return None


def _refuse_strangers(options: tuple[str, ...], cells: list[Cell], scale: Scale) -> None:
    """Refuse options that no cell has; what one has, the others may do without."""
    known = [cell for cell in cells if cell.missing is None and options]
    configs = [to_dict(_resolved(cell, scale, {})) for cell in known]
    for option in options:
        if configs and all(_place(config, option) is None for config in configs):
            override(configs[-1], option)
            reduced(from_dict(configs[-1], RunConfig, where="options of the study"))
        for config in configs:
            _set_where_known(config, (option,))
