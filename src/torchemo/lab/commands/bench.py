"""``torchemo bench``: speed against other packages, against the machine's limit, and against size."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, final

import tyro

from torchemo.config.machine import CPU_ALONE, Machine
from torchemo.core.errors import ConfigError
from torchemo.report.terminal import print_json, print_table, say


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
    slots: str | None = None
    """bench memory: simulate a memory of so many slots instead, such as 1e6."""
    value: str = "1kB"
    """Size of a value in such a simulation."""
    index: str = "ivfpq"
    """How its keys are searched: exact, approximate or ivfpq."""
    folder: Path | None = None
    """Where it makes its files, which are deleted afterwards; the system's temporary folder by default."""
    machine: Machine = CPU_ALONE
    """bench step: time steps there, against the CPU in float32, instead of other packages."""
    out: Path | None = None
    """Write the record, with its environment, to this file."""
    json: bool = False
    """Print the record as JSON."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.lab.bench.record import measure_all, read

        if self.machine != CPU_ALONE:
            self._check_machine()
        if self.slots is not None:
            return self._simulate(self.slots)
        there = self.cases and self.out is not None and self.out.is_file()
        earlier = read(self.out) if there and self.out is not None else None
        record = measure_all(
            self.what,
            quick=self.quick,
            machine=self.machine,
            chosen=self.cases,
            earlier=earlier,
            on_case=_tell,
        )
        return self._told(record)

    def _check_machine(self) -> None:
        from torchemo.training.device import place_of

        place_of(self.machine)
        if self.what != "step":
            raise ConfigError(
                f"--device and --precision are for bench step, got bench {self.what}.",
                hint="The others measure the processor, the disk and memory of this machine.",
            )

    def _simulate(self, slots: str) -> int:
        from torchemo.lab.bench.record import read, simulate
        from torchemo.lab.bench.sizes import asked

        if self.what != "memory":
            raise ConfigError(f"--slots is for bench memory, got bench {self.what}.")
        wanted = asked(slots, self.value, self.index, self.folder)
        earlier = read(self.out) if self.out is not None and self.out.is_file() else None
        return self._told(simulate(wanted, earlier=earlier, on_case=_tell))

    def _told(self, record: dict[str, Any]) -> int:
        from torchemo.lab.bench.record import write
        from torchemo.lab.bench.tables import tables

        if self.out is not None:
            write(record, self.out)
        if self.json:
            print_json(record)
            return 0
        for table in tables(record):
            print_table(table.title, table.columns, table.rows)
        for peer, reason in record["peers"]["left_out"].items():
            say(f"left out: {peer} ({reason})")
        return 0


def _tell(case: str) -> None:
    say(case, file=sys.stderr)
