"""What commands print: tables for people, JSON for machines, errors with their exit codes."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def print_json(value: Any) -> None:
    """Print one JSON document; open ends and missing values are null."""
    print(json.dumps(value, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is left-aligned, the others right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def interval(estimate: Mapping[str, Any], *, scale: float = 1.0, sign: bool = False) -> str:
    """Write an estimate as ``value [low, high]``."""
    form = "{:+.2f}" if sign else "{:.2f}"
    ends = ("-inf" if estimate["low"] is None else form.format(scale * estimate["low"]),
            "inf" if estimate["high"] is None else form.format(scale * estimate["high"]))  # fmt: skip
    return f"{form.format(scale * estimate['value'])} [{ends[0]}, {ends[1]}]"
