"""What commands print: tables for people, JSON for machines, progress beside both."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

PLAIN_EVERY = 10.0
"""Seconds between lines of progress where there is no terminal."""
LISTED = 20
"""Lines of one kind of trouble shown to people; --json lists all."""


def silence_closed_pipes() -> None:
    """Send further output nowhere: whoever read it has gone, which is no reason to fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def say(text: object = "", *, file: TextIO | None = None, end: str = "\n") -> None:
    """Print text, whatever files and strangers put into it: only its ends of lines are obeyed.

    All commands print through here, so that no name, key or message reaches the terminal as a command.
    """
    stream = sys.stdout if file is None else file
    shown = "\n".join(printable(line) for line in str(text).split("\n"))
    # What the terminal has no letters for is spelt out, too.
    letters = getattr(stream, "encoding", None) or "utf-8"
    print(
        shown.encode(letters, "backslashreplace").decode(letters), file=stream, end=end, flush=True
    )


def print_json(value: Any) -> None:
    """Print one JSON document; open ends and missing values are null."""
    say(json.dumps(value, allow_nan=False))


def told(as_json: bool, text: object, **fields: Any) -> int:
    """Say what was done, in words or as JSON; return the exit code of success."""
    if as_json:
        print_json(fields)
    else:
        say(text)
    return 0


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; columns of numbers are right-aligned, except the first."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Names come from files: as texts they are shown as they are, and no markup is read into them.
    table = Table()
    for i, column in enumerate(columns):
        numbers = i > 0 and all(_begins_with_number(row[i]) for row in rows)
        table.add_column(Text(column), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich itself would leave with exit code 1

    console = Output(width=None if sys.stdout.isatty() else 120)
    # Not as the table's own title, which is broken at the width of a table that may be narrow.
    console.print(Text(printable(title), style="italic"), soft_wrap=True)
    console.print(table)


def say_left_out(bad: Sequence[tuple[str, str]]) -> None:
    """Print which files could not be read, and why."""
    for name, reason in bad[:LISTED]:
        say(f"left out: {printable(name)}: {printable(reason)}")
    if len(bad) > LISTED:
        say(f"left out: and {len(bad) - LISTED} more (--json lists all)")


def _begins_with_number(cell: str) -> bool:
    first = cell.split()[:1]
    try:
        return not first or math.isfinite(float(first[0].replace(",", "")))
    except ValueError:
        return False


def printable(text: str) -> str:
    """Spell out what a terminal would obey instead of show, such as escape codes in a file name."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def interval(estimate: Mapping[str, Any], *, scale: float = 1.0, sign: bool = False) -> str:
    """Write an estimate as ``value [low, high]``."""
    form = "{:+.2f}" if sign else "{:.2f}"
    ends = ("-inf" if estimate["low"] is None else form.format(scale * estimate["low"]),
            "inf" if estimate["high"] is None else form.format(scale * estimate["high"]))  # fmt: skip
    return f"{form.format(scale * estimate['value'])} [{ends[0]}, {ends[1]}]"


def size(count: int) -> str:
    """Write a number of bytes for people.

    Example:
        >>> size(129_000)
        '129 kB'
    """
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= least:
            return f"{count / least:.3g} {unit}"
    return f"{count} bytes"


@contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function ``(done, total)`` that shows progress on stderr.

    One live line on a terminal, a plain line now and then elsewhere.
    """
    if not sys.stderr.isatty():
        yield _plain_lines(what)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _plain_lines(what: str) -> Callable[[int, int], None]:
    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_EVERY:
            last = time.monotonic()
            say(f"{what}: {done}/{total}", file=sys.stderr)

    return show
