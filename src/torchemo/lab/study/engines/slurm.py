"""Slurm, by way of submitit (extra ``slurm``); each job of a study is a job of the cluster."""

import os
import signal
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torchemo.core.errors import ConfigError, ResourceError
from torchemo.lab.study.engines.crew import JOBS
from torchemo.lab.study.engines.engine import Errand, Handle, needed, run_job
from torchemo.lab.study.job import Ended

LOGS = "logs"
"""Folder of what jobs print, within that of jobs."""
EARLY = 90
"""Seconds before the end of its time in which a job saves."""


@final
@dataclass(frozen=True)
class SlurmOptions:
    """What a job asks the cluster for.

    Attributes:
        partition: Name of the partition.
        account: Who pays.
        qos: Quality of service.
        constraint: Features of nodes.
        timeout_min: Minutes after which a job is saved and sent again.
        mem_gb: Memory.
        cpus_per_task: Cores; a run uses one.
        gpus_per_node: GPUs, for ``--device cuda``.
        setup: Lines of shell before it starts, such as ``module load``.
        sbatch: Further options of sbatch, as ``name=value``.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    timeout_min: int = 240
    mem_gb: float | None = None
    cpus_per_task: int = 1
    gpus_per_node: int | None = None
    setup: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()

    def parameters(self) -> dict[str, Any]:
        """Return them in the words of submitit."""
        _check_time(self.timeout_min)
        pairs = [option.partition("=") for option in self.sbatch]
        wrong = [name for name, equals, _ in pairs if not equals]
        if wrong:
            raise ConfigError(f"--on-options sbatch: '{wrong[0]}' should be NAME=VALUE.")
        slurm = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "setup": list(self.setup) or None,
            "signal_delay_s": EARLY,
            "additional_parameters": {name: value for name, _, value in pairs} or None,
        }
        shared = ("timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node")
        return {
            **{name: getattr(self, name) for name in shared},
            **{f"slurm_{name}": value for name, value in slurm.items() if value is not None},
        }


@final
@dataclass(frozen=True)
class LocalOptions:
    """What processes of this machine take the place of a cluster with.

    Attributes:
        timeout_min: Minutes after which a job is saved and sent again.
    """

    timeout_min: int = 240

    def parameters(self) -> dict[str, Any]:
        """Return them in the words of submitit."""
        _check_time(self.timeout_min)
        return {"timeout_min": self.timeout_min}


class Submitted(AbstractContextManager["Submitted"]):
    """Jobs that submitit hands to a cluster."""

    every = 2.0

    def __init__(self, cluster: str, parameters: dict[str, Any], folder: Path) -> None:
        submitit = needed("submitit", extra="slurm")
        try:
            self._executor = submitit.AutoExecutor(folder / JOBS / LOGS, cluster=cluster)
            self._executor.update_parameters(name="torchemo", **parameters)
        except RuntimeError as error:
            raise ResourceError(
                f"there is no Slurm on this machine ({error}).",
                hint="Type this on a machine that submits jobs; --on submitit-local tries it without.",
            ) from error

    def submit(self, errand: Errand) -> Handle:
        """Hand a job to the cluster."""
        handle: Handle = self._executor.submit(run_saved, errand)
        return handle

    def __exit__(self, *error: object) -> None:
        """Leave; jobs of a cluster outlive the terminal."""


@final
class Slurm(Submitted):
    """Jobs of a Slurm cluster."""

    Options = SlurmOptions

    @classmethod
    def build(cls, address: str, options: SlurmOptions, folder: Path) -> "Slurm":
        """Make it on a machine that submits jobs."""
        _refuse_address("slurm", address)
        return cls("slurm", options.parameters(), folder)


@final
class SubmititLocal(Submitted):
    """Processes of this machine, started as Slurm's jobs are: to try things out."""

    Options = LocalOptions
    every = 0.5

    @classmethod
    def build(cls, address: str, options: LocalOptions, folder: Path) -> "SubmititLocal":
        """Make it; it needs no cluster."""
        _refuse_address("submitit-local", address)
        return cls("local", options.parameters(), folder)


def _check_time(minutes: int) -> None:
    if minutes < 1:
        raise ConfigError(f"--on-options timeout_min should be 1 or more, got {minutes}.")


def _refuse_address(name: str, address: str) -> None:
    if address:
        raise ConfigError(f"--on {name} takes no address, got '{address}'.")


def run_saved(errand: Errand) -> Ended:
    """Do a job that is saved when its time on the cluster ends, or when a more urgent one needs the node."""
    number = getattr(signal, f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}")
    # The job's own handler of SIGTERM saves it.
    signal.signal(number, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    return run_job(errand)
