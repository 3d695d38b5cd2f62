"""Running a study: choose rates on validation tasks, train every cell and seed, score once, put together."""

import hashlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, final

from torchemo.config.machine import CPU_ALONE, Machine
from torchemo.config.run import RunConfig
from torchemo.config.toml import dumps
from torchemo.core.types import Statistics
from torchemo.lab.study.datasets import prepare, scheme_of
from torchemo.lab.study.engines.crew import STOP, Crew, Doing, Here, OnStep
from torchemo.lab.study.engines.engine import Engine, StopFiles
from torchemo.lab.study.engines.local import Local
from torchemo.lab.study.entry import Cell
from torchemo.lab.study.job import Ended, Job, Scoring, is_done, read_json, unite
from torchemo.lab.study.pages.pages import write_pages
from torchemo.lab.study.plan import Sources, Study, run_id, usual_seeds
from torchemo.lab.study.result import (
    CellRuns,
    TaskScores,
    describe_cell,
    describe_contrast,
    describe_diverged,
    diverged,
    read_scores,
    save_scores,
    write_json,
)
from torchemo.lab.study.scales import ONCE, SEEN
from torchemo.lab.study.streams.visits import Asked
from torchemo.lab.study.verdict import RULE
from torchemo.runs.environment import versions
from torchemo.runs.score import Protocol

Tried: TypeAlias = tuple[tuple[tuple[str, ...], float | None], ...]
"""Rates with their validation scores; None where they diverged."""
Choice: TypeAlias = tuple[tuple[str, ...], Tried]
"""Chosen rates, and all that were tried."""

FORMAT = 2
"""Version of result.json."""
UNNAMED: Statistics = "transductive"
"""Statistics of the studies whose files of scores were named before protocols had any."""

SEEN_SEED = 1000
"""Other tasks of the seen classes than those of training, whose seeds are small."""


@final
@dataclass(frozen=True)
class Watch:
    """Functions that are called while a study runs.

    Attributes:
        on_plan: How many outer steps there are in all, and how many of them are done.
        on_step: A run and its steps.
        on_end: A job has ended.
        on_note: Something worth a line.
        should_stop: Asked now and then.
    """

    on_plan: Callable[[int, int], None] = lambda total, done: None
    on_step: OnStep = lambda run, step: None
    on_end: Callable[[Ended], None] = lambda ended: None
    on_note: Callable[[str], None] = lambda note: None
    should_stop: Callable[[], bool] = lambda: False


@final
@dataclass
class StudyRun:
    """A study on a disk.

    Attributes:
        study: Which.
        out: Folder of all studies.
        data: Folder of image sets.
        workers: Runs at a time; one alone, without an engine, is in this process.
        engine: What carries runs to other machines; processes of this one where there is none.
        machine: Where each run computes.
        watch: Functions that are called.
        sources: Where the data are.
        failures: Jobs that failed.
    """

    study: Study
    out: Path
    data: Path | None = None
    workers: int = 2
    engine: Engine | None = None
    machine: Machine = CPU_ALONE
    watch: Watch = field(default_factory=Watch)
    sources: Sources = field(default_factory=dict)
    failures: list[Ended] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Where the results of this study are."""
        scale = self.study.scale
        return self.out / f"{self.study.entry.name}-{scale.name}-{scale.tasks}"

    def run(self) -> dict[str, Any] | None:
        """Run everything that is not there yet; return the result, or None if asked to stop before."""
        self.open_data()
        tuning = {cell.name: self._grid_jobs(cell) for cell in self.study.available}
        with self._crew() as crew:
            if not self._do(crew, [job for jobs in tuning.values() for job in jobs]):
                return None
            chosen: dict[str, Choice] = {}
            cells: list[CellRuns] = []
            # Rates that turn out to diverge with another seed are given up for the next best.
            while chosen != (
                now := {c.name: self._choose(c, tuning) for c in self.study.available}
            ):
                chosen = now
                cells = [
                    self.runs_of(cell, *chosen[self.study.chooser(cell).name])
                    for cell in self.study.available
                ]
                if not self._do(crew, [job for runs in cells for job in self._final_jobs(runs)]):
                    return None
        return self._assemble(cells)

    @contextmanager
    def _crew(self) -> Iterator[Doing]:
        """Give those who do the jobs."""
        if self.engine is None and self.workers == 1:
            yield Here()
        elif self.engine is None:
            with Local() as engine:
                yield Crew(engine, most=self.workers, folder=self.out)
        else:
            yield Crew(self.engine, most=self.workers, folder=self.out)

    def open_data(self) -> None:
        """Find the data of all cells, and pack those that are not packed yet."""
        worlds = {cell.world for cell in self.study.available}
        worlds |= {test for cell in self.study.available for test in cell.tests} - {SEEN, ONCE}
        scale = self.study.scale
        names = [name for world in sorted(worlds) for name in scale.worlds[world]]
        places = prepare(
            names,
            data=self.data,
            out=self.out / "data",
            image_size=scale.image_size,
            packed=scale.network is None and not any(c.network for c in self.study.available),
            progress=lambda name: self.watch.on_note(f"packing {name}"),
        )
        self.sources = {
            world: tuple(places[name] for name in scale.worlds[world]) for world in sorted(worlds)
        }

    def _do(self, crew: Doing, jobs: Sequence[Job]) -> bool:
        """Do jobs that are not done; False if asked to stop before the end."""
        unique = unite(jobs)
        waiting = [job for job in unique if not is_done(job)]
        done = sum(job.steps for job in unique) - sum(job.steps for job in waiting)
        self.watch.on_plan(sum(job.steps for job in unique), done)
        stops = StopFiles((self.out / STOP,))
        ended = crew.do(
            waiting,
            on_step=self.watch.on_step,
            on_end=self.watch.on_end,
            on_note=self.watch.on_note,
            should_stop=lambda: self.watch.should_stop() or stops.asked(),
        )
        self.failures += [end for end in ended if end.how == "failed"]
        return len(ended) == len(waiting) and not any(end.how == "stopped" for end in ended)

    def _grid_jobs(self, cell: Cell) -> list[Job]:
        """Return one run per point of the grid, with the first seed; a grid of one needs no choice."""
        grid = self.study.grid(cell)
        if cell.of is not None or len(grid) < 2:
            return []
        configs = [self._config(cell, rates, self.study.seeds[0]) for rates in grid]
        return [self._job(config) for config in configs]

    def _choose(self, cell: Cell, tuning: dict[str, list[Job]]) -> Choice:
        """Return the rates with the best validation score, and all that were tried.

        Rates at which a run of any seed diverged are left out, as long as there are others.
        """
        grid = self.study.grid(cell)
        jobs = tuning[cell.name]
        if not jobs:
            return grid[0], ()
        scores = [(read_json(job.root / "done.json") or {}).get("best_score") for job in jobs]
        tried = tuple(zip(grid, scores, strict=True))
        known = [(score, -i) for i, score in enumerate(scores) if score is not None]
        sound = [(score, i) for score, i in known if not self._diverged(cell, grid[-i])]
        best = -max(sound or known)[1] if known else 0
        return grid[best], tried

    def _diverged(self, cell: Cell, rates: tuple[str, ...]) -> bool:
        """Return whether a run of this cell at these rates is known to have diverged, whatever its seed."""
        roots = (
            self.out / "runs" / run_id(self._config(cell, rates, seed)) for seed in self.study.seeds
        )
        return any(
            (read_json(root / "done.json") or {}).get("ended") == "diverged" for root in roots
        )

    def runs_of(
        self,
        cell: Cell,
        rates: tuple[str, ...],
        tried: Tried = (),
        *,
        seeds: tuple[int, ...] | None = None,
    ) -> CellRuns:
        """Return the runs of a cell at these rates, those of all seeds unless some are named."""
        trained = self.study.seeds if seeds is None else seeds
        worlds = (cell.world, *cell.tests)
        folders = [self.out / "runs" / run_id(self._config(cell, rates, seed)) for seed in trained]
        files = {world: self._scoring(cell, world).file for world in worlds}
        shown = tried if cell.of is None else ()
        return CellRuns(cell, trained, tuple(folders), files, rates, shown)

    def _final_jobs(self, runs: CellRuns) -> list[Job]:
        cell = runs.cell
        if self.study.entry.measure == "cost":
            return [self._job(self._config(cell, runs.rates, self.study.seeds[0]), cost=True)]
        scorings = tuple(self._scoring(cell, world) for world in (cell.world, *cell.tests))
        looked_at = cell.role != "base" and cell.visits is None
        diagnosed = self.study.scale.diagnosed if looked_at else 0
        return [
            self._job(self._config(cell, runs.rates, seed), scorings=scorings, diagnosed=diagnosed)
            for seed in self.study.seeds
        ]

    def _config(self, cell: Cell, rates: tuple[str, ...], seed: int) -> RunConfig:
        return self.study.config(cell, self.sources, rates=rates, seed=seed)

    def _job(self, config: RunConfig, **more: Any) -> Job:
        name = run_id(config)
        root = self.out / "runs" / name
        return Job(
            name, root, dumps(config), steps=config.outer_steps, machine=self.machine, **more
        )

    def _scoring(self, cell: Cell, world: str) -> Scoring:
        scale = self.study.scale
        seed = self.study.entry.test_seed
        if cell.visits is not None:
            asked = Asked(cell.visits, "once" if world == ONCE else cell.report)
            digest = hashlib.sha256(repr(asked).encode()).hexdigest()[:10]
            return Scoring(f"visits-{digest}.json", Protocol(), asked=asked)
        how = self.study.entry.statistics
        count = self.study.entry.test_tasks.get(f"{scale.name}/{scale.tasks}", scale.test_tasks)
        protocol = Protocol(scale.protocol, count, seed=seed, statistics=how)
        if world == SEEN:
            protocol = replace(protocol, split="train", seed=SEEN_SEED)
        own = world in (cell.world, SEEN)
        names = scale.worlds[cell.world if own else world]
        # Files of scores were named before protocols had statistics, way and shot.
        named = repr(protocol).replace(f", statistics={UNNAMED!r}", "")
        named = named.replace(", way=None, shot=None", "")
        text = f"({named}, {names!r}, {scale.image_size!r})"
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        source = None if own else self.sources[world]
        every_step = world == cell.world
        scheme = scheme_of(names[0]) if cell.network and not own else None
        return Scoring(f"score-{digest}.json", protocol, source, every_step, scheme=scheme)

    def _assemble(self, cells: list[CellRuns]) -> dict[str, Any]:
        scores: dict[str, TaskScores] = {}
        failed: set[str] = set()
        described = []
        for runs in cells:
            name = runs.cell.name
            worlds = runs.files if self.study.entry.measure == "score" else {}
            found = {world: read_scores(runs, world) for world in worlds}
            known = {world: one for world, one in found.items() if one is not None}
            scores |= {f"{name}|{world}": one for world, one in known.items()}
            failed |= {f"{name}|{world}" for world in worlds if diverged(runs, world)}
            described.append(describe_cell(runs, known))
        contrasts = self._contrasts(scores, failed)
        result = {**self._about(), "cells": described, "contrasts": contrasts}
        write_json(self.folder / "result.json", result)
        save_scores(self.folder / "scores.npz", scores)
        write_pages(self.folder, result)
        return result

    def _contrasts(
        self, scores: Mapping[str, TaskScores], failed: set[str]
    ) -> list[dict[str, Any]]:
        """Draw every contrast that has numbers; one whose cell diverged says so instead."""
        world = {cell.name: cell.world for cell in self.study.cells}
        found = []
        for contrast in self.study.contrasts:
            names = [
                f"{name}|{contrast.test or world[name]}"
                for name in (contrast.cell, contrast.against)
            ]
            if all(name in scores for name in names):
                found.append(describe_contrast(contrast, *(scores[name] for name in names)))
            elif failed & set(names):
                who = [name.split("|")[0] for name in names if name in failed]
                home = [name for name in who if f"{name}|{world[name]}" in failed]
                found.append(describe_diverged(contrast, who, at_home=home))
        return found

    def _about(self) -> dict[str, Any]:
        study = self.study
        return {
            "format": FORMAT,
            "entry": study.entry.name,
            "title": study.entry.title,
            "scale": study.scale.name,
            "tasks": study.scale.tasks,
            "worlds": {world: list(study.scale.worlds[world]) for world in self.sources},
            "scale_options": list(study.scale.options),
            "options": list(study.options),
            "seeds": list(study.seeds),
            "command": self._command(),
            "rule": RULE,
            "versions": versions(),
            "missing": {c.name: c.missing for c in study.cells if c.missing is not None},
            "failed": {end.run: end.why for end in self.failures},
        }

    def _command(self) -> str:
        scale, study = self.study.scale, self.study
        words = [
            f"torchemo study run {study.entry.name} --scale {scale.name} --tasks {scale.tasks}"
        ]
        if study.seeds != usual_seeds(study.entry, scale) and study.entry.measure == "score":
            words.append(f"--seeds {' '.join(map(str, study.seeds))}")
        if study.chosen:
            words.append(f"--cells {' '.join(map(shlex.quote, study.chosen))}")
        if study.entry.measure == "score" and not study.controlled:
            words.append("--no-controls")
        elif study.controlled_cells:
            words.append(f"--controls-of {' '.join(map(shlex.quote, study.controlled_cells))}")
        if study.options:
            words.append(f"--options {' '.join(map(shlex.quote, study.options))}")
        return " ".join(words)
