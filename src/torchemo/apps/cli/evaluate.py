"""``torchemo eval`` and ``torchemo compare``: test tasks of a run; runs on the same tasks."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, final

import tyro

from torchemo.config.machine import CPU_ALONE, Machine
from torchemo.config.run import DataConfig
from torchemo.core.errors import ConfigError, ResourceError
from torchemo.report.terminal import counted, interval, print_json, print_table, say


@final
@dataclass(frozen=True)
class EvalCommand:
    """Score a run on fixed test tasks; its memory is only read, and proved unchanged."""

    run_folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    """Folder of the run."""
    protocol: Literal["standard", "paper"] = "standard"
    """standard: 15 queries per class. paper: K queries per class."""
    tasks: int | None = None
    """Test tasks; 600 by default, 1000 with the paper's protocol."""
    split: Literal["test", "val"] = "test"
    """Classes to draw tasks from."""
    statistics: Literal["inductive", "transductive"] = "inductive"
    """inductive: every query is answered by itself. transductive: all queries of a task together, normalised
    as the network says (model.bn), which is the habit of MAML's papers and often scores higher."""
    way: int | None = None
    """Classes of a task; as many as in training by default. See docs/any-way.md."""
    shot: int | None = None
    """Support images per class; as many as in training by default."""
    data: tuple[str, ...] = ()
    """Other data to draw tasks from, such as a domain the run has never seen; the run's own by default."""
    splits: Path | None = None
    """With --data: a file of class splits."""
    scheme: str | None = None
    """With --data: which splits to take, where the file holds several."""
    stream: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...")] = ()
    """Test tasks that come back: options of data.stream, such as pool=100 law=zipf; those of the run by
    default, and pool=0 draws every task anew."""
    allow_leak: bool = False
    """Accept test classes that a pretrained network was trained on, such as those of miniImageNet."""
    steps: int | None = None
    """Inner steps; those of training by default."""
    step: int | None = None
    """Checkpoint to evaluate; the best on validation tasks by default."""
    out: Path | None = None
    """File for the result; by default eval-....json in the run's folder."""
    machine: Machine = CPU_ALONE
    """Where to compute."""
    release_memory: bool = False
    """Give freed memory back to the system at once: slower, smaller between steps."""
    json: bool = False
    """Print the result as JSON, with every task."""

    def run(self) -> int:
        """Run the command."""
        record, path = self.scored()
        if path is None:
            return 0  # rank 0 speaks for all
        self._show(record)
        self.save(record, path)
        return 0

    def scored(self) -> tuple[dict[str, Any], Path | None]:
        """Return the result, and where it is kept; the latter in rank 0 alone."""
        from torchemo.runs.load import load_best
        from torchemo.runs.score import Protocol, result_file, scored
        from torchemo.training.device import joined, place_of, task_workers

        tasks = (
            {"standard": 600, "paper": 1000}[self.protocol] if self.tasks is None else self.tasks
        )
        protocol = Protocol(
            self.protocol,
            tasks,
            split=self.split,
            steps=self.steps,
            statistics=self.statistics,
            way=self.way,
            shot=self.shot,
        )
        workers = task_workers(release_memory=self.release_memory)
        on = "+".join([Path(name).stem for name in self.data] + list(self.stream)) or None
        size: dict[str, Any] = {"way": self.way, "shot": self.shot, "needed": (self.split,)}
        how = {**size, "step": self.step, "allow_leak": self.allow_leak}
        with joined(place_of(self.machine, workers=workers)) as place, counted("tasks") as progress:
            opened = place.team.together(
                lambda: load_best(self.run_folder, place=place, data=self._data(), **how)
            )
            place.team.agree("data", opened.source.fingerprint)
            record = scored(self.run_folder, opened, protocol, on=on, progress=progress)
        if place.team.rank:
            return record, None
        return record, self.out or result_file(self.run_folder, protocol, on=on)

    def _show(self, record: dict[str, Any]) -> None:
        if self.json:
            print_json(record)
            return
        _show_result(record)
        if record["step"] < record["outer_steps"]:
            say(f"at step {record['step']} of {record['outer_steps']}.")

    def save(self, record: dict[str, Any], path: Path) -> None:
        """Write the result, which was shown before: a run that may only be read loses nothing."""
        from torchemo.runs.score import save_result

        try:
            save_result(record, path)
        except ResourceError as error:
            raise ResourceError(
                f"the result was computed, but {error.message}",
                hint="Choose where it goes with: --out FILE.json",
            ) from error
        if not self.json:
            say(f"written: {path}")

    def _data(self) -> DataConfig | None:
        if not self.data and (self.splits is not None or self.scheme is not None):
            raise ConfigError("--splits and --scheme belong to --data.")
        if not self.data and not self.stream:
            return None
        from torchemo.runs.choices import with_stream
        from torchemo.runs.load import read_config

        own = read_config(self.run_folder).data
        if self.data:
            splits = None if self.splits is None else str(self.splits)
            own = replace(own, source=self.data, splits=splits, scheme=self.scheme)
        return with_stream(own, self.stream)


@final
@dataclass(frozen=True)
class CompareCommand:
    """Compare runs, paired on the same tasks; the first run is the base."""

    runs: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN ...")]]
    """Run folders: the base first. With --against, one per training seed of the base method."""
    against: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN ...")] = ()
    """Runs of the other method, one per seed, in the same order."""
    protocol: Literal["standard", "paper"] = "standard"
    """Which results to compare."""
    split: Literal["test", "val"] = "test"
    """Which results to compare."""
    statistics: Literal["inductive", "transductive"] = "inductive"
    """Which results to compare; those of earlier versions are transductive."""
    evaluate: bool = False
    """Evaluate runs that have no such result first."""
    machine: Machine = CPU_ALONE
    """With --evaluate: where to compute."""
    json: bool = False
    """Print the comparison as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.runs.compare import compare, has_result, read_result

        if self.machine != CPU_ALONE:
            self._check_machine()
        which: dict[str, Any] = {"split": self.split, "protocol": self.protocol}
        which["statistics"] = self.statistics

        def read(path: Path) -> dict[str, Any]:
            if self.evaluate and not has_result(path, **which):
                command = EvalCommand(path, **which, machine=self.machine, json=self.json)
                record, file = command.scored()
                if file is not None:
                    command.save(record, file)
            return read_result(path, **which)

        if self.against:
            found = [compare([read(p) for p in self.runs], [read(p) for p in self.against])]
        elif len(self.runs) < 2:
            raise ConfigError("compare needs two runs or more, the base first.")
        else:
            base = read(self.runs[0])
            found = [compare([base], [read(other)]) for other in self.runs[1:]]
        if self.json:
            print_json(found)
        else:
            for one in found:
                _show_comparison(one)
        return 0

    def _check_machine(self) -> None:
        """Refuse a device that is not there, or that nothing would be computed on."""
        from torchemo.training.device import place_of

        place_of(self.machine)
        if not self.evaluate:
            raise ConfigError(
                "--device and --precision say where runs are evaluated, and compare only reads results.",
                hint="Add --evaluate, or leave them out.",
            )


def _show_result(record: dict[str, Any]) -> None:
    scale = 100.0 if record["metric"] == "accuracy" else 1.0
    unit = "accuracy, %" if record["metric"] == "accuracy" else "mean squared error"
    summary = record["summary"]
    rows = [["all", interval(summary["last"], scale=scale), str(summary["last"]["n"])]]
    domains = summary["per_domain"].get("groups", {})
    for name, row in domains.items() if len(domains) > 1 else ():
        rows.append([name, interval(row["mean"], scale=scale), str(row["mean"]["n"])])
    protocol = record["protocol"]
    where = "" if record["on"] is None else f" of {record['on']}"
    how = ", ".join([protocol["name"], *_size(protocol), protocol["statistics"]])
    title = f"{record['method']}: {unit} on {protocol['split']} tasks{where} ({how})"
    print_table(title, ["domain", "mean [95 %]", "tasks"], rows)
    if len(summary["per_step"]) > 1:
        steps = "  ".join(f"{s}: {scale * v:.2f}" for s, v in enumerate(summary["per_step"]))
        say(f"after inner step  {steps}")
    if record["recalled"] is not None and record["recalled"] < 1:
        skipped = 100 * (1 - record["recalled"])
        skips = record["skips"] or {}
        by = ", ".join(f"{name} {100 * share:.0f} %" for name, share in skips.items())
        failed = ", or recall slots that failed validation" if record["failed"] else ""
        say(
            f"{skipped:.1f} % of the tasks skip recall{f' ({by})' if len(skips) > 1 else ''}:"
            f" they are unlike those of training{failed}."
        )


def _size(protocol: dict[str, Any]) -> list[str]:
    """Say how many classes and shots tasks have, where these are not those of training."""
    return [f"{protocol[name]}-{name}" for name in ("way", "shot") if name in protocol]


def _show_comparison(found: dict[str, Any]) -> None:
    from torchemo.report.format import NOT_NOTED, cost_of, side_names, unequal_steps

    scale = 100.0 if found["metric"] == "accuracy" else 1.0
    base, other = side_names([found])
    title = f"{other} minus {base} ({found['metric']}, {found['statistics']}, paired)"
    rows = [["all", _row(found["difference"], scale), f"{found['difference']['p_value']:.4f}"]]
    if len(found["per_domain"]) > 1:
        rows += [
            [name, _row(row, scale), f"{row['p_value']:.4f}"]
            for name, row in found["per_domain"].items()
        ]
    print_table(title, ["domain", "difference [95 %]", "p"], rows)
    names = {"base": base, "other": other}
    means = ", ".join(f"{names[s]} {scale * found[s]['mean']:.2f}" for s in names)
    say(f"{means}; {found['tasks']} tasks, {found['seeds']} seed(s)")
    sides = {name: cost_of(found[side]) for side, name in names.items()}
    # Results of earlier versions do not note them.
    if all(cost["outer_steps"] != NOT_NOTED for cost in sides.values()):
        costs = [f"{n} {c['outer_steps']} and {c['cpu_seconds']}" for n, c in sides.items()]
        say(f"outer steps and CPU seconds of a training: {', '.join(costs)}")
    unequal = unequal_steps(found, **names)
    if unequal is not None:
        say(unequal)
    if "over_seeds" in found:
        say(
            f"over seeds and tasks: {interval(found['over_seeds']['both'], scale=scale, sign=True)}"
        )


def _row(found: dict[str, Any], scale: float) -> str:
    return interval(found["difference"], scale=scale, sign=True)
