"""``torchemo bench``: speed against other packages, against the machine's limit, and against size."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, final

import tyro

from torchemo.report.terminal import print_json, print_table


@final
@dataclass(frozen=True)
class BenchCommand:
    """Measure speed and memory; run it on an idle machine."""

    what: tyro.conf.Positional[
        Annotated[
            Literal["step", "memory", "data", "limit", "growth"],
            tyro.conf.arg(
                help="step: the outer step against other packages (8 minutes). memory: recall, combine,"
                " remember (3). data: episodes per second, their share of a step, packing."
                " limit: share of the processor's peak."
                " growth: resident memory over 10 000 steps."
            ),
        ]
    ]
    quick: bool = False
    """Small cases, few repeats: shows that it works, not how fast it is."""
    cases: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="PATTERN ...",
            help="Only cases with such names, such as 'peak*'; the others in the file of --out stay.",
        ),
    ] = ()
    out: Path | None = None
    """Write the record, with its environment, to this file."""
    json: bool = False
    """Print the record as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.lab.bench.record import measure_all, read, write
        from torchemo.lab.bench.tables import tables

        there = self.cases and self.out is not None and self.out.is_file()
        earlier = read(self.out) if there and self.out is not None else None
        record = measure_all(
            self.what, quick=self.quick, chosen=self.cases, earlier=earlier, on_case=_tell
        )
        if self.out is not None:
            write(record, self.out)
        if self.json:
            print_json(record)
            return 0
        for table in tables(record):
            print_table(table.title, table.columns, table.rows)
        for peer, reason in record["peers"]["left_out"].items():
            print(f"left out: {peer} ({reason})")
        return 0


def _tell(case: str) -> None:
    print(case, file=sys.stderr, flush=True)
