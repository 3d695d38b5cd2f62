"""The ``torchemo`` command. Options are parsed before torch is imported, so that help is quick."""

import difflib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import make_dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TextIO

import tyro

import torchemo
from torchemo.core.errors import ConfigError, ResourceError, TorchemoError
from torchemo.report.terminal import say, silence_closed_pipes

COMMANDS = {
    "demo": "torchemo.lab.commands.demo:DemoCommand",
    "train": "torchemo.apps.cli.train:TrainCommand",
    "eval": "torchemo.apps.cli.evaluate:EvalCommand",
    "compare": "torchemo.apps.cli.evaluate:CompareCommand",
    "report": "torchemo.apps.cli.report:ReportCommand",
    "study": "torchemo.lab.commands.study:StudyCommand",
    "presets": "torchemo.apps.cli.presets:PresetsCommand",
    "options": "torchemo.apps.cli.options:OptionsCommand",
    "data": "torchemo.apps.cli.data:DataCommand",
    "memory": "torchemo.apps.cli.memory:MemoryCommand",
    "checkpoint": "torchemo.apps.cli.checkpoint:CheckpointCommand",
    "adapt": "torchemo.apps.cli.adapt:AdaptCommand",
    "serve": "torchemo.apps.cli.serve:ServeCommand",
    "export": "torchemo.apps.cli.export:ExportCommand",
    "bench": "torchemo.lab.commands.bench:BenchCommand",
    "doctor": "torchemo.lab.commands.doctor:DoctorCommand",
}
"""Where each command is defined; only the one that is called is imported."""
GROUP = "torchemo.commands"
"""Entry points of this group are further commands: a tyro dataclass with a method ``run``."""

_STYLE = (
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.DisallowNone,
    tyro.conf.OmitArgPrefixes,
    tyro.conf.OmitSubcommandPrefixes,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, run the command, and exit with its code."""
    try:
        with _notes():
            code = _parse(sys.argv[1:] if arguments is None else arguments).run()
        sys.stdout.flush()
        sys.exit(code)
    except KeyboardInterrupt:
        _leave("interrupted.", 130)
    except BrokenPipeError:
        # Whoever read our output has gone: nothing is wrong, and nothing more can be said there.
        silence_closed_pipes()
        sys.exit(0)
    except Exception as error:
        known = _known(error)
        if known is None or os.environ.get("TORCHEMO_DEBUG"):
            raise
        if getattr(error, "shared", False) and os.environ.get("RANK", "0") != "0":
            sys.exit(known.exit_code)  # rank 0 says it for all
        _leave(str(known), known.exit_code)


def _parse(words: Sequence[str]) -> Any:
    name = words[0] if words else "--help"
    if name in ("--version", "-V"):
        say(f"torchemo {torchemo.__version__}")
        sys.exit(0)
    if not name.startswith("-"):  # one parser is built sooner than all of them
        return tyro.cli(
            _command(name), prog=f"torchemo {name}", args=list(words[1:]), config=_STYLE
        )
    return tyro.extras.subcommand_cli_from_dict(
        {
            **{known: _command(known) for known in COMMANDS},
            **{known: _stand_in(point) for known, point in _foreign().items()},
        },
        prog="torchemo",
        description="Episodic Memory Optimization for few-shot meta-learning.",
        args=list(words) or ["--help"],
        config=_STYLE,
    )


def _command(name: str) -> Callable[..., Any]:
    found: Callable[..., Any]
    if name in COMMANDS:
        module, _, command = COMMANDS[name].partition(":")
        found = getattr(import_module(module), command)
        return found
    foreign = _foreign()
    if name not in foreign:
        known = [*COMMANDS, *foreign]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean '{near[0]}'?" if near else f"There are: {', '.join(known)}."
        raise ConfigError(f"there is no command '{name}'.", hint=hint)
    try:
        found = foreign[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"command '{name}' cannot be imported from {foreign[name].value} ({error}).",
            hint=f"Repair or remove the distribution {_origin(foreign[name])}.",
        ) from error
    return found


def _foreign() -> dict[str, EntryPoint]:
    """Return the commands of other distributions; ours win."""
    return {p.name: p for p in entry_points(group=GROUP) if p.name not in COMMANDS}


def _stand_in(point: EntryPoint) -> Callable[..., Any]:
    """Return what the list of commands shows of one of another distribution, without importing it."""
    found = make_dataclass("Foreign", [])
    found.__doc__ = f"A command of {_origin(point)}."
    return found


def _origin(point: EntryPoint) -> str:
    return "another distribution" if point.dist is None else point.dist.name


@contextmanager
def _notes() -> Iterator[None]:
    """Show warnings of torchemo for users as one line each, and each of them once."""
    package, told = str(Path(torchemo.__file__).parent) + os.sep, set()

    with warnings.catch_warnings():
        plain = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not issubclass(category, UserWarning) or not filename.startswith(package):
                plain(message, category, filename, lineno, file, line)
            elif str(message) not in told:
                told.add(str(message))
                say(f"torchemo: note: {' '.join(str(message).split())}", file=sys.stderr)

        warnings.showwarning = show
        yield


_OUT_OF_MEMORY = ("allocate memory", "out of memory")
"""What torch says where the machine or a device has no room left."""


def _known(error: Exception) -> TorchemoError | None:
    """Return an error that has words and an exit code; None if we do not understand it."""
    if isinstance(error, TorchemoError):
        return error
    if isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY):
        return ResourceError(
            "there is not enough memory.",
            hint="Use fewer tasks per step (train.tasks), smaller images (data.image_size), or fewer slots"
            " (memory.capacity).",
        )
    if isinstance(error, OSError):
        return ResourceError(f"{error.filename or 'a file'}: {error.strerror or error}.")
    return None


def _leave(message: str, code: int) -> None:
    say(f"torchemo: {message}", file=sys.stderr)
    sys.exit(code)
