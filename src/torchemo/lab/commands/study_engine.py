"""What carries the runs of a study, as options of a command."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import tyro

from torchemo.config.machine import CPU_ALONE, Machine
from torchemo.core.errors import ConfigError

if TYPE_CHECKING:
    from torchemo.lab.study.engines.engine import Engine

HERE = ("local", "submitit-local")
"""Engines whose workers are on this machine."""
MOST_HERE, MOST_ELSEWHERE = 2, 16

EngineName: TypeAlias = Annotated[str, tyro.conf.arg(metavar="ENGINE")]
Pairs: TypeAlias = Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...")]


@dataclass(frozen=True, kw_only=True)
class Carried:
    """Where the runs of a study are done."""

    on: EngineName = "local"
    """What carries the runs: local, slurm, submitit-local, dask://HOST:PORT."""
    most: int | None = None
    """Runs at a time, running or waiting on the engine; 2 on this machine, 16 elsewhere by default."""
    on_options: Pairs = ()
    """Options of the engine, such as partition=gpu gpus_per_node=1 timeout_min=720."""
    jobs: int | None = None
    """The same as --most."""
    machine: Machine = CPU_ALONE
    """Where each run computes."""

    def at_a_time(self) -> int:
        """Return how many runs there may be at a time."""
        if self.most is not None and self.jobs is not None:
            raise ConfigError("--most and --jobs are the same: give one of them.")
        given = self.most if self.jobs is None else self.jobs
        if given is None:
            return MOST_HERE if self.on in HERE else MOST_ELSEWHERE
        if given < 1:
            name = "--most" if self.jobs is None else "--jobs"
            raise ConfigError(f"{name} should be 1 or more, got {given}.")
        return given

    @contextmanager
    def engine(self, out: Path) -> Iterator["Engine | None"]:
        """Open the engine, and refuse what cannot work; None for runs in this process.

        Args:
            out: Folder of all studies.
        """
        from torchemo.lab.study.engines import open_engine
        from torchemo.lab.study.engines.crew import STOP
        from torchemo.training.device import place_of

        most = self.at_a_time()
        if (out / STOP).exists():
            raise ConfigError(
                f"{out / STOP} asks all studies of this folder to stop.",
                hint="Delete it, then type the same again.",
            )
        if self.on in HERE:
            place_of(self.machine)  # refused here, and not in every run
        with open_engine(self.on, self.on_options, out) as engine:
            yield None if self.on == "local" and most == 1 else engine
