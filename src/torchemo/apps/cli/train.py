"""``torchemo train``: one run in a folder, from a preset, a file, or where it was left."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, final

import tyro

from torchemo.config.presets import names, preset
from torchemo.config.run import RunConfig
from torchemo.core.errors import ConfigError
from torchemo.report.terminal import print_json, silence_closed_pipes, size

_LEARNERS = ", ".join(name for name in names() if not name.endswith(("-emo", "-emo-paper")))


@final
@dataclass(frozen=True)
class TrainCommand:
    """Train a learner, with or without memory; Ctrl-C saves and leaves."""

    out: Path | None = None
    """Folder of a new run."""
    resume: Path | None = None
    """Continue the run in this folder; its own configuration is used."""
    preset: Annotated[
        str | None,
        tyro.conf.arg(
            help=f"Start from a preset of torchemo.config.presets: {_LEARNERS}; each alone, with -emo"
            " (memory, the reading we use ourselves) or with -emo-paper (the paper's, with its rates)."
        ),
    ] = None
    config: Path | None = None
    """Start from a TOML file."""
    data: tuple[str, ...] = ()
    """Image sets (folders, zips, npz), ``procedural``, or ``regression:hsml4``; sets data.source."""
    splits: Path | None = None
    """A file of class splits; sets data.splits. By default the one that lies with the data, or its own."""
    scheme: str | None = None
    """Which splits to take, where the file holds several; sets data.scheme."""
    accept_new_data: bool = False
    """Continue a run although its data have changed."""
    release_memory: bool = False
    """Give freed memory back to the system at once: slower, smaller between steps."""
    json: bool = False
    """Print one JSON object per event."""
    options: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...")] = field(default=())
    """Any option of the configuration, such as train.iterations=500 emo.memory.capacity=16."""

    def run(self) -> int:
        """Run the command."""
        root = self._root()
        config = None if self.resume is not None else self.resolved()

        from torchemo.runs.signals import GracefulStop
        from torchemo.runs.train import train_run
        from torchemo.training.device import task_workers

        printer = _Printer(self.json)
        with GracefulStop() as stop, printer:
            outcome = train_run(
                root,
                config,
                should_stop=lambda: stop.requested is not None,
                on_event=printer.event,
                accept_new_data=self.accept_new_data,
                workers=task_workers(release_memory=self.release_memory),
            )
        if self.json:
            print_json({"event": "end", "step": outcome.iteration, **outcome._asdict()})
        if outcome.ended == "stopped":
            print(
                f"saved step {outcome.iteration}; continue with: torchemo train --resume {root}",
                file=sys.stderr,
            )
            return stop.exit_code
        if not self.json:
            score = outcome.best_score
            best = "" if score is None else f", best {score:.4f} at {outcome.best_step}"
            print(f"{outcome.ended} after {outcome.iteration} steps{best}")
            print(f"evaluate with: torchemo eval {root}")
        return 0

    def _root(self) -> Path:
        if self.out is not None and self.resume is None:
            return self.out
        if self.resume is None or self.out is not None:
            raise ConfigError(
                "train needs either --out FOLDER (a new run) or --resume FOLDER (an old one)."
            )
        given = [
            name
            for name in ("preset", "config", "data", "splits", "scheme", "options")
            if getattr(self, name)
        ]
        if given:
            raise ConfigError(
                f"--resume goes on with the run's own configuration, got --{' --'.join(given)} too.",
                hint="Leave them out, or start a new run with --out.",
            )
        return self.resume

    def resolved(self) -> RunConfig:
        """Return the configuration: defaults < preset < file < --data, --splits, --scheme < KEY=VALUE."""
        if self.preset is None:
            return self._over(RunConfig())
        # A preset depends on the tasks, and these may be set by anything that comes after it.
        config = self._over(preset(self.preset))
        regression = any(name.startswith("regression:") for name in config.data.source)
        return self._over(preset(self.preset, n_shot=config.data.n_shot, regression=regression))

    def _over(self, config: RunConfig) -> RunConfig:
        from torchemo.config.toml import from_dict, load, override, to_dict

        if self.config is not None:
            config = load(self.config, RunConfig, base=config)
        plain = to_dict(config)
        if self.data:
            plain["data"]["source"] = list(self.data)
        if self.splits is not None:
            plain["data"]["splits"] = str(self.splits)
        if self.scheme is not None:
            plain["data"]["scheme"] = self.scheme
        for option in self.options:
            override(plain, option)
        return from_dict(plain, RunConfig, where="command line")


class _Printer:
    """One live line on a terminal, a plain line now and then elsewhere."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.bar: Any = None
        self.task: Any = None
        self.began = (0, 0.0)
        self.validation = ""

    def __enter__(self) -> "_Printer":
        if not self.as_json and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(bar_width=12),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.description}"),
                console=Console(stderr=True),
            )
            self.bar.start()
            self.task = self.bar.add_task("", total=None)
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def event(self, event: str, step: int, fields: Mapping[str, Any]) -> None:
        """Show an event; training goes on when nobody reads any more."""
        try:
            self._show(event, step, fields)
            sys.stdout.flush()
        except BrokenPipeError:
            silence_closed_pipes()

    def _show(self, event: str, step: int, fields: Mapping[str, Any]) -> None:
        if self.as_json:
            from torchemo.runs.events import plain

            print_json(plain({"event": event, "step": step, **fields}))
        elif event == "start":
            self.began = (step, time.monotonic())
            if self.bar is not None:
                self.bar.update(self.task, completed=step, total=fields["iterations"])
            print(_size(fields), file=sys.stderr)
        elif event == "step":
            self._step(step, fields)
        elif event in ("validation", "skipped", "damaged", "environment"):
            print(f"step {step}, {event}: {_words(fields)}", file=sys.stderr)
            if event == "validation" and fields.get("accuracy") is not None:
                self.validation = f"  val {100 * fields['accuracy']:.1f} %"

    def _step(self, step: int, fields: Mapping[str, Any]) -> None:
        rate = (step - self.began[0]) / max(time.monotonic() - self.began[1], 1e-9)
        line = f"{rate:.3g} steps/s  {_words(fields)}{self.validation}"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=line)
        elif step % 100 == 0:
            print(f"step {step}: {line}", file=sys.stderr)


def _size(fields: Mapping[str, Any]) -> str:
    """Say how large a run is."""
    line = f"{fields['parameters']:,} parameters"
    if fields["slots"]:
        line += (
            f", {fields['emo_parameters']:,} of key network and aggregator; memory of"
            f" {fields['slots']} slots x {size(fields['slot_bytes'])}"
            f" = {size(fields['memory_bytes'])}"
        )
    if "turn" in fields:
        line += f"\nto step {fields['turn']:,} the learner learns, then its slots"
    return line


def _words(fields: Mapping[str, Any]) -> str:
    shown = {"loss": "loss", "accuracy": "accuracy", "filled": "slots", "age": "age",
             "same_domain": "same domain"}  # fmt: skip
    found = [
        f"{word} {fields[name]:.3g}" for name, word in shown.items() if fields.get(name) is not None
    ]
    return "  ".join([*found, *(fields[name] for name in ("path", "why") if name in fields)])
