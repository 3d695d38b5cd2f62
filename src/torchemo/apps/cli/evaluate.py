"""``torchemo eval`` and ``torchemo compare``: test tasks of a run; runs on the same tasks."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, final

import tyro

from torchemo.config.run import DataConfig
from torchemo.core.errors import ConfigError
from torchemo.report.terminal import counted, interval, print_json, print_table


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
    data: tuple[str, ...] = ()
    """Other data to draw tasks from, such as a domain the run has never seen; the run's own by default."""
    splits: Path | None = None
    """With --data: a file of class splits."""
    scheme: str | None = None
    """With --data: which splits to take, where the file holds several."""
    stream: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...")] = ()
    """Test tasks that come back: options of data.stream, such as pool=100 law=zipf; those of the run by
    default, and pool=0 draws every task anew."""
    steps: int | None = None
    """Inner steps; those of training by default."""
    step: int | None = None
    """Checkpoint to evaluate; the best on validation tasks by default."""
    release_memory: bool = False
    """Give freed memory back to the system at once: slower, smaller between steps."""
    json: bool = False
    """Print the result as JSON, with every task."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.runs.load import load_best
        from torchemo.runs.score import Protocol, result_file, score_run
        from torchemo.training.device import task_workers

        tasks = (
            {"standard": 600, "paper": 1000}[self.protocol] if self.tasks is None else self.tasks
        )
        protocol = Protocol(
            self.protocol,
            tasks,
            split=self.split,
            steps=self.steps,
            statistics=self.statistics,
        )
        opened = load_best(
            self.run_folder,
            step=self.step,
            workers=task_workers(release_memory=self.release_memory),
            data=self._data(),
            needed=(self.split,),
        )
        on = "+".join([Path(name).stem for name in self.data] + list(self.stream)) or None
        with counted("tasks") as progress:
            record = score_run(self.run_folder, opened, protocol, on=on, progress=progress)
        if self.json:
            print_json(record)
            return 0
        _show_result(record)
        done, planned = opened.system.iteration, opened.config.outer_steps
        if done < planned:
            print(f"at step {done} of {planned}.")
        print(f"written: {result_file(self.run_folder, protocol, on=on)}")
        return 0

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
    json: bool = False
    """Print the comparison as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.runs.compare import compare, read_result

        def read(path: Path) -> dict[str, Any]:
            which = {"split": self.split, "protocol": self.protocol}
            return read_result(path, **which, statistics=self.statistics)

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
    how = f"{protocol['name']}, {protocol['statistics']}"
    title = f"{record['method']}: {unit} on {protocol['split']} tasks{where} ({how})"
    print_table(title, ["domain", "mean [95 %]", "tasks"], rows)
    if len(summary["per_step"]) > 1:
        steps = "  ".join(f"{s}: {scale * v:.2f}" for s, v in enumerate(summary["per_step"]))
        print(f"after inner step  {steps}")
    if record["recalled"] is not None and record["recalled"] < 1:
        skipped = 100 * (1 - record["recalled"])
        failed = ", or recall slots that failed validation" if record["failed"] else ""
        print(
            f"{skipped:.1f} % of the tasks skip recall: they are unlike those of training{failed}."
        )


def _show_comparison(found: dict[str, Any]) -> None:
    from torchemo.report.format import unequal_steps

    scale = 100.0 if found["metric"] == "accuracy" else 1.0
    title = (
        f"{found['other']['method']} minus {found['base']['method']}"
        f" ({found['metric']}, {found['statistics']}, paired)"
    )
    rows = [["all", _row(found["difference"], scale), f"{found['difference']['p_value']:.4f}"]]
    if len(found["per_domain"]) > 1:
        rows += [
            [name, _row(row, scale), f"{row['p_value']:.4f}"]
            for name, row in found["per_domain"].items()
        ]
    print_table(title, ["domain", "difference [95 %]", "p"], rows)
    means = ", ".join(
        f"{found[s]['method']} {scale * found[s]['mean']:.2f}" for s in ("base", "other")
    )
    print(f"{means}; {found['tasks']} tasks, {found['seeds']} seed(s)")
    names = {side: found[side]["method"] for side in ("base", "other")}
    unequal = unequal_steps(found, **names)
    if unequal is not None:
        print(unequal)
    if "over_seeds" in found:
        print(
            f"over seeds and tasks: {interval(found['over_seeds']['both'], scale=scale, sign=True)}"
        )


def _row(found: dict[str, Any], scale: float) -> str:
    return interval(found["difference"], scale=scale, sign=True)
