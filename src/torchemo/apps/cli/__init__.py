"""The ``torchemo`` command. Options are parsed before torch is imported, so that help is quick."""

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import tyro

import torchemo
from torchemo.core.errors import ConfigError, ResourceError, TorchemoError
from torchemo.report.terminal import silence_closed_pipes

COMMANDS = {
    "demo": "torchemo.lab.commands.demo:DemoCommand",
    "train": "torchemo.apps.cli.train:TrainCommand",
    "eval": "torchemo.apps.cli.evaluate:EvalCommand",
    "compare": "torchemo.apps.cli.evaluate:CompareCommand",
    "report": "torchemo.apps.cli.report:ReportCommand",
    "study": "torchemo.lab.commands.study:StudyCommand",
    "data": "torchemo.apps.cli.data:DataCommand",
    "memory": "torchemo.apps.cli.memory:MemoryCommand",
    "checkpoint": "torchemo.apps.cli.checkpoint:CheckpointCommand",
    "adapt": "torchemo.apps.cli.adapt:AdaptCommand",
    "bench": "torchemo.lab.commands.bench:BenchCommand",
    "doctor": "torchemo.lab.commands.doctor:DoctorCommand",
}
"""Where each command is defined; only the one that is called is imported."""

_STYLE = (
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.DisallowNone,
    tyro.conf.OmitArgPrefixes,
    tyro.conf.OmitSubcommandPrefixes,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, run the command, and exit with its code."""
    try:
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
        _leave(str(known), known.exit_code)


def _parse(words: Sequence[str]) -> Any:
    name = words[0] if words else "--help"
    if name in ("--version", "-V"):
        print(f"torchemo {torchemo.__version__}")
        sys.exit(0)
    if name in COMMANDS:  # one parser is built sooner than all of them
        return tyro.cli(
            _command(name), prog=f"torchemo {name}", args=list(words[1:]), config=_STYLE
        )
    if not name.startswith("-"):
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean '{near[0]}'?" if near else f"There are: {', '.join(COMMANDS)}."
        raise ConfigError(f"there is no command '{name}'.", hint=hint)
    return tyro.extras.subcommand_cli_from_dict(
        {known: _command(known) for known in COMMANDS},
        prog="torchemo",
        description="Episodic Memory Optimization for few-shot meta-learning.",
        args=list(words) or ["--help"],
        config=_STYLE,
    )


def _command(name: str) -> Callable[..., Any]:
    module, _, command = COMMANDS[name].partition(":")
    found: Callable[..., Any] = getattr(import_module(module), command)
    return found


def _known(error: Exception) -> TorchemoError | None:
    """Return an error that has words and an exit code; None if we do not understand it."""
    if isinstance(error, TorchemoError):
        return error
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return ResourceError(
            "there is not enough memory.",
            hint="Use fewer tasks per step, smaller pictures, or fewer slots (emo.memory.capacity).",
        )
    if isinstance(error, OSError):
        return ResourceError(f"{error.filename or 'a file'}: {error.strerror or error}.")
    return None


def _leave(message: str, code: int) -> None:
    print(f"torchemo: {message}", file=sys.stderr)
    sys.exit(code)
