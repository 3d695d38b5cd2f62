"""``torchemo train``: one run in a folder, from a preset, a file, or where it was left."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, final

import tyro

from torchemo.config.machine import CPU_ALONE, Machine
from torchemo.config.presets import learners
from torchemo.config.run import RunConfig
from torchemo.core.errors import LEFT_OUT, ConfigError
from torchemo.report.terminal import LISTED, print_json, printable, say, silence_closed_pipes, size

if TYPE_CHECKING:
    from torchemo.training.progress import Outcome

_PRESETS = (
    f"Start from a preset: {', '.join(learners())} (each without memory), or one of these with an ending."
    " -emo: the paper's memory of gradients in its best faithful settings. -emo-paper: the same as the paper"
    " prints it. -offsets: our memory of offsets; on images it trains after the learner, which is then frozen"
    " (-offsets-joint: together with it). -published: published sizes. `torchemo presets` lists all."
)
_WITH_NEW_RUNS = (
    *("preset", "config", "data", "splits", "scheme", "model", "steps", "seed", "size", "way"),
    *("shot", "stream", "drop-duplicates", "allow-leak", "options"),
)


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
        tyro.conf.arg(help=_PRESETS),
    ] = None
    config: Path | None = None
    """A TOML file with options; those it does not name are the preset's."""
    data: tuple[str, ...] = ()
    """Image sets (folders, zips, npz), ``procedural``, or ``regression:hsml4``; sets data.source."""
    splits: Path | None = None
    """A file of class splits, or 64:16:20 to draw them; sets data.splits. By default the one with the data,
    or their own."""
    scheme: str | None = None
    """Which splits to take, where the file holds several; sets data.scheme."""
    model: str | None = None
    """The network: conv4, resnet12, or a pretrained one that sees images once: efficientnet-lite0,
    timm:NAME, torchvision:NAME, module:callable; sets model.name."""
    steps: int | None = None
    """Outer steps of the learner; sets train.steps."""
    seed: int | None = None
    """Seed of the initialisation and of the training tasks; sets train.seed."""
    size: int | None = None
    """Side of the images; sets data.image_size, or model.size of a pretrained network."""
    way: int | None = None
    """Classes of a task, N; sets data.n_way."""
    shot: int | None = None
    """Support examples per class, K; sets data.n_shot."""
    stream: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...")] = ()
    """Tasks that come back: options of data.stream, such as pool=100 law=zipf once=0.2."""
    drop_duplicates: bool = False
    """Keep one of images with the same pixels, that of test, else of val; sets data.drop_duplicates."""
    allow_leak: bool = False
    """Accept test classes that a pretrained network was trained on, such as those of miniImageNet; sets
    model.allow_leak."""
    strict: bool = False
    """Refuse data with images that cannot be read, instead of leaving these out (exit code 7)."""
    accept_new_data: bool = False
    """Continue a run although its data have changed."""
    log: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where else the numbers of the run go: TensorBoard curves in OUT/tensorboard, or Weights & Biases
    (project torchemo; it uses the network). Each needs the extra of its name."""
    machine: Machine = CPU_ALONE
    """Where to compute."""
    release_memory: bool = False
    """Give freed memory back to the system at once: slower, smaller between steps."""
    json: bool = False
    """Print one JSON object per event."""
    options: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...")] = field(default=())
    """Any options, such as train.tasks=8 memory.capacity=16; `torchemo options` lists them."""

    def run(self) -> int:
        """Run the command."""
        root = self._root()
        config = None if self.resume is not None else self._new_run(root)

        from torchemo.runs.signals import GracefulStop
        from torchemo.runs.train import train_run
        from torchemo.training.device import joined, place_of, task_workers

        printer = _Printer(self.json)
        workers = task_workers(release_memory=self.release_memory)
        alone = place_of(self.machine, workers=workers)
        with joined(alone) as place, GracefulStop() as stop, printer:
            outcome = train_run(
                root,
                config,
                should_stop=lambda: stop.requested is not None,
                on_event=printer.event,
                accept_new_data=self.accept_new_data,
                strict=self.strict,
                log=self.log,
                place=place,
            )
        if place.team.rank:
            return stop.exit_code  # rank 0 speaks for all
        if self.json:
            print_json({"event": "end", "step": outcome.iteration, **outcome._asdict()})
        if outcome.ended == "stopped":
            again = f"torchemo train --resume {root}"
            say(f"saved step {outcome.iteration}; continue with: {again}", file=sys.stderr)
            return stop.exit_code
        if not self.json:
            _show_end(outcome, root, none_helps=printer.none_helps)
        return LEFT_OUT if printer.left_out else 0

    def _new_run(self, root: Path) -> RunConfig | None:
        """Return the configuration of a new run; None where torchrun has started this one again."""
        config = self.resolved()
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
            return config
        from torchemo.runs.folder import RunFolder
        from torchemo.runs.load import config_hash, read_config

        begun = RunFolder(root).config.exists()
        return None if begun and config_hash(read_config(root)) == config_hash(config) else config

    def _root(self) -> Path:
        if self.out is not None and self.resume is None:
            return self.out
        if self.resume is None or self.out is not None:
            what = "not both" if self.out is not None else "got neither"
            raise ConfigError(
                f"train needs either --out FOLDER (a new run) or --resume FOLDER (an old one), {what}."
            )
        values = {name: getattr(self, name.replace("-", "_")) for name in _WITH_NEW_RUNS}
        given = [n for n, v in values.items() if v is not None and v is not False and v != ()]
        if given:
            raise ConfigError(
                f"--resume continues with the run's own configuration, got --{' --'.join(given)} too.",
                hint="Leave them out, or start a new run with --out.",
            )
        return self.resume

    def resolved(self) -> RunConfig:
        """Return the configuration: defaults < preset < file < flags (--data, --steps, ...) < KEY=VALUE."""
        from torchemo.runs.choices import SHORT, Choices, stream_options

        short = {name: getattr(self, name) for name in SHORT}
        short["splits"] = None if self.splits is None else str(self.splits)
        short["drop_duplicates"] = self.drop_duplicates or None
        short["allow_leak"] = self.allow_leak or None
        options = (*stream_options(self.stream), *self.options)
        return Choices(self.preset, self.config, self.data, short, options).resolved()


def _show_end(outcome: "Outcome", root: Path, *, none_helps: bool) -> None:
    score = outcome.best_score
    best = "" if score is None else f", best {score:.4f} at {outcome.best_step}"
    say(f"{outcome.ended} after {outcome.iteration} steps{best}")
    if none_helps:
        say("no slot of the memory helps on validation tasks: they are not used")
    say(f"evaluate with: torchemo eval {root}")


class _Printer:
    """One live line on a terminal, a plain line now and then elsewhere."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.bar: Any = None
        self.task: Any = None
        self.began = (0, 0.0)
        self.validation = ""
        self.left_out: Sequence[Mapping[str, str]] = ()
        self.none_helps = False

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
        """Show an event; training continues when nobody reads any more."""
        self.left_out = fields.get("left_out", self.left_out)
        self.none_helps = fields.get("none_helps", self.none_helps)
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
                self.bar.update(self.task, completed=step, total=fields["steps"])
            say(_size(fields), file=sys.stderr)
            for line in _left_out(fields):
                say(line, file=sys.stderr)
        elif event == "step":
            self._step(step, fields)
        elif event in ("validation", "skipped", "damaged", "environment", "slots stopped"):
            say(f"step {step}, {event}: {_words(fields)}", file=sys.stderr)
            if event == "validation" and fields.get("accuracy") is not None:
                self.validation = f"  val {100 * fields['accuracy']:.1f} %"

    def _step(self, step: int, fields: Mapping[str, Any]) -> None:
        rate = (step - self.began[0]) / max(time.monotonic() - self.began[1], 1e-9)
        line = f"{rate:.3g} steps/s  {_words(fields)}{self.validation}"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=line)
        elif step % 100 == 0:
            say(f"step {step}: {line}", file=sys.stderr)


def _size(fields: Mapping[str, Any]) -> str:
    """Say how large a run is, and who trains when."""
    line = f"{fields['method']} on {fields['data']}, {fields['steps']:,} outer steps\n"
    line += f"{fields['parameters']:,} parameters"
    if fields["slots"]:
        line += (
            f", and {fields['memory_parameters']:,} of the memory's networks; memory of"
            f" {fields['slots']} slots x {size(fields['slot_bytes'])}"
            f" = {size(fields['memory_bytes'])}"
        )
    if "turn" in fields:
        learner, memory = fields["turn"], fields["steps"] - fields["turn"]
        line += (
            f"\n{learner:,} steps of the learner, then {memory:,} of its memory (learner frozen)"
        )
    if (fields.get("seeded_at") or 0) >= fields["steps"]:
        line += (
            f"\nthe memory stays empty: its slots are seeded at step {fields['seeded_at']}"
            " (lower memory.warmup, or train longer)"
        )
    return line


def _left_out(fields: Mapping[str, Any]) -> list[str]:
    """Name the images that are left out, and count the copies that are dropped."""
    bad = fields.get("left_out", ())
    lines = [f"left out: {printable(one['name'])}: {printable(one['reason'])}" for one in bad]
    more = [f"left out: and {len(bad) - LISTED} more (--json lists all)"]
    lines = lines[:LISTED] + (more if len(bad) > LISTED else [])
    if fields.get("dropped"):
        lines.append(f"{fields['dropped']} copies of other images are dropped")
    return lines


def _words(fields: Mapping[str, Any]) -> str:
    shown = {"loss": "loss", "accuracy": "accuracy", "filled": "slots", "age": "age",
             "same_domain": "same domain"}  # fmt: skip
    found = [
        f"{word} {fields[name]:.3g}" for name, word in shown.items() if fields.get(name) is not None
    ]
    return "  ".join([*found, *(fields[name] for name in ("path", "why") if name in fields)])
