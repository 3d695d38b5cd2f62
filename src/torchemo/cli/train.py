"""``torchemo train``: one run in a folder, from a preset, a file, or where it was left."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, final

import tyro

from torchemo.config import RunConfig
from torchemo.errors import ConfigError


@final
@dataclass(frozen=True)
class TrainCommand:
    """Train a learner, with or without memory; Ctrl-C saves and leaves."""

    out: Path | None = None
    """Folder of a new run."""
    resume: Path | None = None
    """Continue the run in this folder; its own configuration is used."""
    preset: str | None = None
    """Start from a preset: LEARNER, LEARNER-emo or LEARNER-emo-paper (maml, anil, meta-sgd, ...)."""
    config: Path | None = None
    """Start from a TOML file."""
    data: tuple[str, ...] = ()
    """Image sets (folders, zips, npz), ``procedural``, or ``regression:hsml4``; sets data.source."""
    accept_new_data: bool = False
    """Continue a run although its data have changed."""
    json: bool = False
    """Print one JSON object per event."""
    options: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")] = field(default=())
    """Any option of the configuration, such as train.iterations=500 emo.memory.capacity=16."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.runner import train_run
        from torchemo.runs.signals import GracefulStop

        config = None if self.resume is not None else self.resolved()
        root = self._root()
        printer = _Printer(self.json, total=None if config is None else config.train.iterations)
        with GracefulStop() as stop, printer:
            outcome = train_run(
                root,
                config,
                should_stop=lambda: stop.requested is not None,
                on_event=printer.event,
                accept_new_data=self.accept_new_data,
            )
        if outcome.ended == "stopped":
            print(
                f"saved step {outcome.iteration}; continue with: torchemo train --resume {root}",
                file=sys.stderr,
            )
            return stop.exit_code
        if not self.json:
            best = "" if outcome.best_score is None else f", best {outcome.best_score:.4f}"
            print(f"{outcome.ended} after {outcome.iteration} steps{best} at {outcome.best_step}")
            print(f"evaluate with: torchemo eval {root}")
        return 0

    def _root(self) -> Path:
        if (self.out is None) == (self.resume is None):
            raise ConfigError(
                "train needs either --out FOLDER (a new run) or --resume FOLDER (an old one)."
            )
        return self.out if self.out is not None else Path(str(self.resume))

    def resolved(self) -> RunConfig:
        """Return the configuration: defaults < preset < file < --data < KEY=VALUE."""
        from torchemo.presets import preset
        from torchemo.toml import from_dict, loads, override, to_dict

        regression = any(name.startswith("regression:") for name in self.data)
        config = RunConfig() if self.preset is None else preset(self.preset, regression=regression)
        if self.config is not None:
            if not self.config.is_file():
                raise ConfigError(f"{self.config}: there is no such file.")
            given = loads(self.config.read_text(), RunConfig, where=str(self.config), base=config)
            config = given
        if self.data:
            config = replace(config, data=replace(config.data, source=self.data))
        plain = to_dict(config)
        for option in self.options:
            override(plain, option)
        return from_dict(plain, RunConfig, where="command line")


class _Printer:
    """One live line on a terminal, a plain line now and then elsewhere."""

    def __init__(self, as_json: bool, *, total: int | None) -> None:
        self.as_json = as_json
        self.total = total
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> "_Printer":
        if not self.as_json and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.bar.start()
            self.task = self.bar.add_task("", total=self.total)
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def event(self, event: str, step: int, fields: Mapping[str, Any]) -> None:
        """Show an event."""
        if self.as_json:
            from torchemo.cli.output import print_json
            from torchemo.runs.events import plain

            print_json(plain({"event": event, "step": step, **fields}))
        elif self.bar is not None and event == "step":
            self.bar.update(self.task, completed=step, description=_words(fields))
        elif event == "validation" or (event == "step" and step % 100 == 0) or event == "skipped":
            print(f"step {step} {event}: {_words(fields)}", file=sys.stderr)


def _words(fields: Mapping[str, Any]) -> str:
    shown = ("loss", "accuracy", "filled", "age", "same_domain", "why")
    return "  ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in fields.items()
        if name in shown and value is not None
    )
