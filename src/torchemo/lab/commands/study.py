"""``torchemo study``: the paper's tables and figures, run and shown."""

import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, final

import tyro

from torchemo.core.errors import ConfigError, DataError
from torchemo.lab.commands.study_engine import Carried
from torchemo.lab.study.scales import TASKS, scale_of, tasks_of
from torchemo.report.terminal import print_json, print_table, say, told

if TYPE_CHECKING:
    from torchemo.lab.study.engines.engine import Engine
    from torchemo.lab.study.entry import Entry
    from torchemo.lab.study.job import Ended
    from torchemo.lab.study.plan import Study
    from torchemo.lab.study.run import StudyRun

OUT = Path("runs/studies")
RECORDS = Path("studies")

Name: TypeAlias = Annotated[str, tyro.conf.arg(metavar="NAME")]
Names: TypeAlias = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")]
Patterns: TypeAlias = Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATTERN ...")]
ScaleName: TypeAlias = Literal["smoke", "cpu", "paper"]
TasksName: TypeAlias = Annotated[
    str,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(TASKS)}}}",
        instance_from_str=lambda words: tasks_of(words[0]),
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    ),
]
"""Kind of tasks; the word for images that older commands have is understood too."""


@dataclass(frozen=True, kw_only=True)
class _Studies:
    """What the commands ask that deal with named studies at one scale."""

    names: tyro.conf.Positional[Names]
    """T1 .. T9, F1 .. F7; R, P and L are our own; several share the runs they have in common."""
    scale: ScaleName = "cpu"
    """smoke: seconds. cpu: hours on two cores. paper: the published sizes."""
    tasks: TasksName = "images"
    """Kind of tasks."""
    out: Path = OUT
    """Folder of all studies."""
    json: bool = False
    """Print the result as JSON."""

    def entries(self, action: str) -> list["Entry"]:
        """Return the named studies; refuse unknown names, and none."""
        from torchemo.lab.study.catalogue import entry_of

        if not self.names:
            raise ConfigError(f"study {action} needs a name.", hint="See: torchemo study list")
        return [entry_of(name) for name in self.names]


@final
@dataclass(frozen=True)
class ListStudies:
    """List the studies with what the paper says and how long each takes on two cores."""

    json: bool = False
    """Print the list as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.lab.study.catalogue import ENTRIES
        from torchemo.lab.study.plan import minutes, plan

        found: list[dict[str, Any]] = []
        for entry in ENTRIES.values():
            at = {name: plan(entry, scale_of(*name.split("/"))) for name in entry.scales}
            found.append(
                {
                    "name": entry.name,
                    "title": entry.title,
                    "says": entry.says,
                    "minutes": {name: round(minutes(study), 1) for name, study in at.items()},
                    "cells": {name: len(study.available) for name, study in at.items()},
                }
            )
        if self.json:
            print_json(found)
            return 0
        columns = ["study", "what", "cells", "minutes, cpu regression", "cpu images"]
        rows = [
            [
                one["name"],
                one["title"],
                str(max(one["cells"].values())),
                *(_rounded(one["minutes"].get(f"cpu/{t}")) for t in ("regression", "images")),
            ]
            for one in found
        ]
        print_table("Studies: torchemo study run NAME --scale smoke | cpu | paper", columns, rows)
        return 0


@final
@dataclass(frozen=True, kw_only=True)
class RunStudy(_Studies, Carried):
    """Run a study; what is there is not run again, Ctrl-C saves and the same command resumes."""

    data: Path | None = None
    """Folder of image sets; TORCHEMO_DATA by default."""
    seeds: tuple[int, ...] = ()
    """Training seeds; those of the scale by default."""
    cells: Patterns = ()
    """Only cells with such names, such as maml*; their controls go with them."""
    no_controls: bool = False
    """Leave out the controls."""
    controls_of: Patterns = ()
    """Only the controls of cells with such names, or controls with such names: maml-offsets/one-slot."""
    options: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...")] = field(default=())
    """Options of every run whose parts have them, such as train.steps=500."""

    def run(self) -> int:
        """Run the command."""
        studies = [self._plan(entry) for entry in self.entries("run")]
        self.at_a_time()  # refused before anything is opened

        from torchemo.training.device import task_workers

        task_workers()  # with --most 1 the runs are in this process
        results, failures = [], 0
        with self.engine(self.out) as engine:
            for study in studies:
                run, result, code = self._run(study, engine)
                if result is None:
                    say("saved; resume with the same command.", file=sys.stderr)
                    return code
                failures += len(run.failures)
                results.append(result)
                self._show(result, run.folder, run.failures)
        if self.json:
            print_json(results)
        return 1 if failures else 0

    def _run(
        self, study: "Study", engine: "Engine | None"
    ) -> tuple["StudyRun", dict[str, Any] | None, int]:
        """Run one study; return it, its result, and the exit code where it was stopped."""
        from torchemo.lab.commands.study_progress import StudyProgress
        from torchemo.lab.study.run import StudyRun, Watch
        from torchemo.runs.signals import GracefulStop

        with GracefulStop() as stop, StudyProgress(study.entry.name) as shown:
            watch = Watch(
                on_plan=shown.plan,
                on_step=shown.step,
                on_end=shown.end,
                on_note=shown.note,
                should_stop=lambda: stop.requested is not None,
            )
            where: dict[str, Any] = {"machine": self.machine, "engine": engine}
            where |= {"workers": self.at_a_time(), "data": _data(self.data)}
            run = StudyRun(study, self.out, watch=watch, **where)
            # A stop file stands for the signal that a scheduler would have sent.
            return run, run.run(), stop.exit_code or 128 + signal.SIGTERM

    def _plan(self, entry: "Entry") -> "Study":
        from torchemo.lab.study.plan import plan

        where = f"{self.scale}/{self.tasks}"
        if where not in entry.scales:
            raise ConfigError(
                f"{entry.name} cannot be run at scale '{self.scale}' with {self.tasks}.",
                hint=f"It can at: {', '.join(entry.scales)}.",
            )
        return plan(
            entry,
            scale_of(self.scale, self.tasks),
            controls=not self.no_controls,
            controlled_cells=self.controls_of,
            chosen=self.cells,
            seeds=self.seeds or None,
            options=self.options,
        )

    def _show(self, result: dict[str, Any], folder: Path, failures: "list[Ended]") -> None:
        if not self.json:
            _show_tables(result)
            say(f"{folder}/report.html")
        for end in failures:
            say(f"run {end.run} failed: {end.why}", file=sys.stderr)


@final
@dataclass(frozen=True)
class ShowStudy:
    """Show what a study found: its tables beside the paper's numbers."""

    name: tyro.conf.Positional[Name]
    """T1 .. T9, F1 .. F7; R, P and L are our own."""
    scale: ScaleName | None = None
    """Only this scale."""
    tasks: TasksName | None = None
    """Only these tasks."""
    out: Path = OUT
    """Folder of all studies."""
    json: bool = False
    """Print the results as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.lab.study.catalogue import entry_of
        from torchemo.lab.study.records import read_results

        entry = entry_of(self.name)
        found = read_results(self.out, entry.name, scale=self.scale, tasks=self.tasks)
        if not found:
            raise DataError(
                f"{self.out} has no result of {entry.name}.",
                hint=f"Make one with: torchemo study run {entry.name} --scale smoke",
            )
        if self.json:
            print_json(found)
        else:
            for result in found:
                _show_tables(result)
        return 0


@final
@dataclass(frozen=True, kw_only=True)
class RecordStudy(_Studies):
    """Keep what studies found with the project, as small files."""

    to: Path = RECORDS
    """Folder of records."""
    replace: bool = False
    """Replace a record also where it has cells or seeds that this result has not."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.lab.study.records import path_of, record

        kept = []
        for entry in self.entries("record"):
            folder = path_of(self.out, entry.name, self.scale, self.tasks)
            kept += [str(path) for path in record(folder, self.to, replace=self.replace)]
        return told(self.json, "\n".join(kept), records=kept)


@final
@dataclass(frozen=True, kw_only=True)
class RestoreStudy(_Studies):
    """Bring recorded runs back, so that a study continues from its record without training them again."""

    data: Path | None = None
    """Folder of image sets; TORCHEMO_DATA by default."""
    records: Path = RECORDS
    """Folder of records."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.lab.study.records import path_of, read_result
        from torchemo.lab.study.restore import restore

        found = {}
        for entry in (one.name for one in self.entries("restore")):
            path = path_of(self.records, entry, self.scale, self.tasks, ".json")
            if not path.is_file():
                there = ", ".join(sorted(one.stem for one in self.records.glob("*.json")))
                raise DataError(
                    f"there is no record {path}.", hint=f"There are: {there or 'none'}."
                )
            record = read_result(path)
            found[entry] = restore(self._now(record), record, path.with_suffix(".npz"))
        if self.json:
            print_json({name: one._asdict() for name, one in found.items()})
            return 0
        for name, one in found.items():
            say(f"{name}: {len(one.cells)} cells came back: {', '.join(one.cells)}")
            for cell, why in one.left.items():
                say(f"{name}: {cell} did not: {why}")
        return 0

    def _now(self, record: dict[str, Any]) -> "StudyRun":
        """Return the recorded study as it would be run now, with all its cells."""
        from torchemo.lab.study.catalogue import entry_of
        from torchemo.lab.study.plan import plan
        from torchemo.lab.study.run import StudyRun, Watch

        study = plan(
            entry_of(record["entry"]),
            scale_of(self.scale, self.tasks),
            seeds=tuple(record["seeds"]),
            options=tuple(record["options"]),
        )
        note = Watch(on_note=lambda text: say(text, file=sys.stderr))
        return StudyRun(study, self.out, data=_data(self.data), watch=note)


@final
@dataclass(frozen=True)
class Reproducibility:
    """Write docs/reproducibility.md: every claim, table and figure beside what was recorded."""

    records: Path = RECORDS
    """Folder of records."""
    out: Path = Path("docs/reproducibility.md")
    """The file."""
    pages: tuple[Path, ...] = (
        Path("docs/findings.md"),
        Path("docs/results.md"),
        Path("docs/lifelong.md"),
        Path("docs/pretrained.md"),
        Path("docs/which-method.md"),
        Path("README.md"),
    )
    """Pages whose tables and figures are made anew, where they are there."""
    json: bool = False
    """Print its path as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.lab.study.pages.inserts import with_tables
        from torchemo.lab.study.pages.linked import linked_figures
        from torchemo.lab.study.pages.reproducibility import reproducibility

        written = {self.out: reproducibility(self.records)}
        figures: dict[Path, str] = {}
        for page in self.pages:
            if page.is_file():
                written[page] = with_tables(page.read_text(encoding="utf-8"), self.records)
                figures |= linked_figures(written[page], page.parent, self.records)
        written |= figures
        for path, text in written.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        names = [str(path) for path in written]
        return told(self.json, "\n".join(names), reproducibility=names[0], pages=names[1:])


def _data(given: Path | None) -> Path | None:
    named = given or os.environ.get("TORCHEMO_DATA")
    return Path(named) if named else None


def _show_tables(result: dict[str, Any]) -> None:
    from torchemo.lab.study.pages.tables import about, tables

    say(f"{result['entry']}: {result['title']}. {about(result)}")
    for table in tables(result):
        print_table(table.title, table.columns, table.rows)


def _rounded(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


@final
@dataclass(frozen=True)
class StudyCommand:
    """Every table and figure of the paper as a study: list them, run one, show what it found."""

    action: (
        Annotated[ListStudies, tyro.conf.subcommand("list")]
        | Annotated[RunStudy, tyro.conf.subcommand("run")]
        | Annotated[ShowStudy, tyro.conf.subcommand("show")]
        | Annotated[RecordStudy, tyro.conf.subcommand("record")]
        | Annotated[RestoreStudy, tyro.conf.subcommand("restore")]
        | Annotated[Reproducibility, tyro.conf.subcommand("reproducibility")]
    )

    def run(self) -> int:
        """Run the command."""
        return self.action.run()
