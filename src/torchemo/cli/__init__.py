"""The ``torchemo`` command. Options are parsed before torch is imported, so that help is quick."""

import os
import sys
from collections.abc import Callable
from typing import Any

import tyro

from torchemo.cli.demo import DemoCommand
from torchemo.cli.evaluate import CompareCommand, EvalCommand
from torchemo.cli.train import TrainCommand
from torchemo.errors import TorchemoError

COMMANDS: dict[str, Callable[..., Any]] = {
    "demo": DemoCommand,
    "train": TrainCommand,
    "eval": EvalCommand,
    "compare": CompareCommand,
}


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, run the command, and exit with its code."""
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="torchemo",
        description="Episodic Memory Optimization for few-shot meta-learning.",
        args=arguments,
    )
    try:
        sys.exit(command.run())
    except TorchemoError as error:
        if os.environ.get("TORCHEMO_DEBUG"):
            raise
        print(f"torchemo: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("torchemo: interrupted.", file=sys.stderr)
        sys.exit(130)
