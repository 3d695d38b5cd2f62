"""The ``torchemo`` command. Options are parsed before torch is imported, so that help is quick."""

import sys

import tyro

from torchemo.cli.demo import DemoCommand
from torchemo.errors import TorchemoError


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, run the command, and exit with its code."""
    command = tyro.extras.subcommand_cli_from_dict(
        {"demo": DemoCommand},
        prog="torchemo",
        description="Episodic Memory Optimization for few-shot meta-learning.",
        args=arguments,
    )
    try:
        sys.exit(command.run())
    except TorchemoError as error:
        print(f"torchemo: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("torchemo: interrupted.", file=sys.stderr)
        sys.exit(130)
