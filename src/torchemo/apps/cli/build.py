"""``torchemo memory build``: a large memory, filled offline from many runs."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, final

import tyro

from torchemo.config.machine import CPU_ALONE, Machine
from torchemo.report.terminal import print_json, say


@final
@dataclass(frozen=True)
class BuildMemory:
    """Fill a large memory from many runs, offline; it can be stopped and continued at any time.

    The first run gives learner, weights and key network, which stay as they are. By default every run gives
    tasks of its training data, and what is remembered of them is computed anew with these weights. The
    result is a run: `eval`, `adapt`, `serve` and `train --resume` take it. The same command continues a
    build that was left.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.arg(name="from", metavar="RUN ...")]
    """Folders of the runs."""
    out: Annotated[Path, tyro.conf.arg(metavar="STORE")]
    """Folder of the memory, a run when it is done; its values are in STORE/values."""
    take: Literal["tasks", "slots"] = "tasks"
    """tasks: drawn from the training data of each run. slots: what their memories hold, where all runs have
    the same weights."""
    slots: str | None = None
    """Slots of the memory, such as 1e6; by default as many as are written."""
    tasks: str | None = None
    """Tasks of each run; by default they fill the memory once, in equal parts."""
    machine: Machine = CPU_ALONE
    """Where to compute."""
    json: bool = False
    """Print what was done as JSON."""
    options: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...")] = field(default=())
    """Options of the memory that differ: memory.index=ivfpq memory.controller.name=fifo
    memory.value_dtype=bfloat16 memory.values_dir=FOLDER."""

    def run(self) -> int:
        """Run the command."""
        from torchemo.runs.building.build import build
        from torchemo.runs.building.plan import make_plan, whole_number
        from torchemo.runs.signals import GracefulStop
        from torchemo.training.device import place_of, task_workers

        place = place_of(self.machine, workers=task_workers())
        plan = make_plan(
            self.runs,
            out=self.out,
            take=self.take,
            slots=None if self.slots is None else whole_number(self.slots, "--slots"),
            tasks=None if self.tasks is None else whole_number(self.tasks, "--tasks"),
            options=self.options,
        )
        if not self.json:
            what = f"{plan.total:,} {self.take} of {', '.join(str(run) for run in self.runs)}"
            say(f"{what}; weights of {self.runs[0]}, step {plan.givers[0].saved.step}")
        with GracefulStop() as stop:
            found = build(
                plan,
                self.out,
                place=place,
                should_stop=lambda: stop.requested is not None,
                on_progress=_tell,
            )
        if self.json:
            print_json(found._asdict())
        elif found.done < found.total:
            say(f"saved after {found.done:,} of {found.total:,}; the same command continues")
        else:
            left = f", {found.left_out} without a finite gradient" if found.left_out else ""
            say(f"{found.filled:,} slots filled{left}; evaluate with: torchemo eval {self.out}")
        return stop.exit_code if found.done < found.total else 0


def _tell(done: int, total: int) -> None:
    """Say about a hundred times how far it is."""
    if total >= 100 and done * 100 // total > (done - 1) * 100 // total and done % 100 == 0:
        say(f"{done:,} of {total:,}", file=sys.stderr)
