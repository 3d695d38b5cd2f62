"""``torchemo study``: the paper's tables and figures, run and shown."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, final

import tyro

from torchemo.core.errors import ConfigError, DataError
from torchemo.report.terminal import print_json, print_table

if TYPE_CHECKING:
    from torchemo.lab.study.job import Ended
    from torchemo.lab.study.plan import Study
    from torchemo.lab.study.run import StudyRun

OUT = Path("runs/studies")
RECORDS = Path("studies")

Name: TypeAlias = Annotated[str, tyro.conf.arg(metavar="NAME")]


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
        from torchemo.lab.study.scales import scale_of

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
                *(_rounded(one["minutes"].get(f"cpu/{t}")) for t in ("regression", "pictures")),
            ]
            for one in found
        ]
        print_table("Studies: torchemo study run NAME --scale smoke | cpu | paper", columns, rows)
        return 0


@final
@dataclass(frozen=True)
class RunStudy:
    """Run a study; what is there is not run again, Ctrl-C saves and the same command resumes."""

    names: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")]]
    """T1 .. T9, F1 .. F7, R1 .. R7; several share the runs they have in common."""
    scale: Literal["smoke", "cpu", "paper"] = "cpu"
    """smoke: seconds. cpu: hours on two cores. paper: the published sizes."""
    tasks: Literal["pictures", "regression"] = "pictures"
    """Kind of tasks."""
    data: Path | None = None
    """Folder of image sets; TORCHEMO_DATA by default."""
    out: Path = OUT
    """Folder of all studies."""
    seeds: tuple[int, ...] = ()
    """Training seeds; those of the scale by default."""
    cells: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATTERN ...")] = ()
    """Only cells with such names, such as maml*; their controls go with them."""
    no_controls: bool = False
    """Leave out the controls."""
    controls_of: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATTERN ...")] = ()
    """Only the controls of cells with such names, or controls with such names: maml-offsets/one-slot."""
    jobs: int = 2
    """Runs at a time, each with one thread."""
    json: bool = False
    """Print the results as JSON."""
    options: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...")] = field(default=())
    """Options of every run whose parts have them, such as train.steps=500."""

    def run(self) -> int:
        """Run the command."""
        _refuse_no_name(self.names, "run")
        studies = [self._plan(name) for name in self.names]
        if self.jobs < 1:
            raise ConfigError(f"--jobs should be 1 or more, got {self.jobs}.")

        from torchemo.lab.commands.study_progress import StudyProgress
        from torchemo.lab.study.run import StudyRun, Watch
        from torchemo.runs.signals import GracefulStop
        from torchemo.training.device import task_workers

        task_workers()  # with --jobs 1 the runs are in this process
        results, failures = [], 0
        for study in studies:
            with GracefulStop() as stop, StudyProgress(study.entry.name) as shown:
                watch = Watch(
                    on_plan=shown.plan,
                    on_step=shown.step,
                    on_end=shown.end,
                    on_note=shown.note,
                    should_stop=lambda stop=stop: stop.requested is not None,  # type: ignore[misc]
                )
                run = StudyRun(
                    study,
                    self.out,
                    data=_data(self.data),
                    workers=self.jobs,
                    watch=watch,
                )
                result = run.run()
            if result is None:
                print("saved; resume with the same command.", file=sys.stderr)
                return stop.exit_code
            failures += len(run.failures)
            results.append(result)
            self._show(result, run.folder, run.failures)
        if self.json:
            print_json(results)
        return 1 if failures else 0

    def _plan(self, name: str) -> "Study":
        from torchemo.lab.study.catalogue import entry_of
        from torchemo.lab.study.plan import plan
        from torchemo.lab.study.scales import scale_of

        entry = entry_of(name)
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
            print(f"{folder}/report.html")
        for end in failures:
            print(f"run {end.run} failed: {end.why}", file=sys.stderr)


@final
@dataclass(frozen=True)
class ShowStudy:
    """Show what a study found: its tables beside the paper's numbers."""

    name: tyro.conf.Positional[Name]
    """T1 .. T9, F1 .. F7, R1 .. R7."""
    scale: Literal["smoke", "cpu", "paper"] | None = None
    """Only this scale."""
    tasks: Literal["pictures", "regression"] | None = None
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
@dataclass(frozen=True)
class RecordStudy:
    """Keep what studies found with the project, as small files."""

    names: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")]]
    """T1 .. T9, F1 .. F7, R1 .. R7."""
    scale: Literal["smoke", "cpu", "paper"] = "cpu"
    """Which scale."""
    tasks: Literal["pictures", "regression"] = "pictures"
    """Which tasks."""
    out: Path = OUT
    """Folder of all studies."""
    to: Path = RECORDS
    """Folder of records."""
    replace: bool = False
    """Replace a record also where it has cells or seeds that this result has not."""
    json: bool = False
    """Print the paths as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.lab.study.catalogue import entry_of
        from torchemo.lab.study.records import record

        _refuse_no_name(self.names, "record")
        kept = []
        for name in self.names:
            folder = self.out / f"{entry_of(name).name}-{self.scale}-{self.tasks}"
            kept += [str(path) for path in record(folder, self.to, replace=self.replace)]
        if self.json:
            print_json({"records": kept})
        else:
            print("\n".join(kept))
        return 0


@final
@dataclass(frozen=True)
class RestoreStudy:
    """Bring recorded runs back, so that a study continues from its record without training them again."""

    names: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")]]
    """T1 .. T9, F1 .. F7, R1 .. R7."""
    scale: Literal["smoke", "cpu", "paper"] = "cpu"
    """Which scale."""
    tasks: Literal["pictures", "regression"] = "pictures"
    """Which tasks."""
    data: Path | None = None
    """Folder of image sets; TORCHEMO_DATA by default."""
    out: Path = OUT
    """Folder of all studies."""
    records: Path = RECORDS
    """Folder of records."""
    json: bool = False
    """Print what came back as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.lab.study.catalogue import entry_of
        from torchemo.lab.study.records import read_result
        from torchemo.lab.study.restore import restore

        _refuse_no_name(self.names, "restore")
        found = {}
        for entry in (entry_of(name).name for name in self.names):
            path = self.records / f"{entry}-{self.scale}-{self.tasks}.json"
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
            print(f"{name}: {len(one.cells)} cells came back: {', '.join(one.cells)}")
            for cell, why in one.left.items():
                print(f"{name}: {cell} did not: {why}")
        return 0

    def _now(self, record: dict[str, Any]) -> "StudyRun":
        """Return the recorded study as it would be run now, with all its cells."""
        from torchemo.lab.study.catalogue import entry_of
        from torchemo.lab.study.plan import plan
        from torchemo.lab.study.run import StudyRun, Watch
        from torchemo.lab.study.scales import scale_of

        study = plan(
            entry_of(record["entry"]),
            scale_of(self.scale, self.tasks),
            seeds=tuple(record["seeds"]),
            options=tuple(record["options"]),
        )
        note = Watch(on_note=lambda text: print(text, file=sys.stderr, flush=True))
        return StudyRun(study, self.out, data=_data(self.data), watch=note)


@final
@dataclass(frozen=True)
class Reproducibility:
    """Write REPRODUCIBILITY.md: every claim, table and figure beside what was recorded."""

    records: Path = RECORDS
    """Folder of records."""
    out: Path = Path("REPRODUCIBILITY.md")
    """The file."""
    pages: tuple[Path, ...] = (Path("docs/findings.md"), Path("docs/results.md"), Path("README.md"))
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
        if self.json:
            print_json({"reproducibility": str(self.out), "pages": [str(p) for p in written][1:]})
        else:
            print("\n".join(str(path) for path in written))
        return 0


def _refuse_no_name(names: tuple[str, ...], action: str) -> None:
    if not names:
        raise ConfigError(f"study {action} needs a name.", hint="See: torchemo study list")


def _data(given: Path | None) -> Path | None:
    named = given or os.environ.get("TORCHEMO_DATA")
    return Path(named) if named else None


def _show_tables(result: dict[str, Any]) -> None:
    from torchemo.lab.study.pages.tables import about, tables

    print(f"{result['entry']}: {result['title']}. {about(result)}")
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
