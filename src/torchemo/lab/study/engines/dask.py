"""Workers of a dask cluster (extra ``dask``), wherever they are: its address is all that is needed."""

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torchemo.core.errors import ConfigError, ResourceError
from torchemo.lab.study.engines.engine import Errand, Executing, Handle, needed


@final
@dataclass(frozen=True)
class DaskOptions:
    """How the cluster is used.

    Attributes:
        timeout: Seconds to wait for its scheduler.
        workers: Names or addresses of those workers alone that may do jobs.
    """

    timeout: float = 10.0
    workers: tuple[str, ...] = ()


@final
class Dask(AbstractContextManager["Dask"]):
    """Workers of dask.distributed, started with one thread each: ``dask worker --nthreads 1``."""

    every = 1.0

    Options = DaskOptions

    def __init__(self, executing: Executing) -> None:
        self._executing = executing

    @classmethod
    def build(cls, address: str, options: DaskOptions, folder: Path) -> "Dask":
        """Connect with the scheduler.

        Raises:
            ConfigError: The address is none.
            ResourceError: Nobody answers there.
        """
        if not re.fullmatch(r"[^/\s]+:\d+", address):
            raise ConfigError(
                f"--on dask needs the address of a scheduler, got '{address}'.",
                hint="Such as --on dask://scheduler:8786.",
            )
        if options.timeout <= 0:
            raise ConfigError(f"--on-options timeout should be above 0, got {options.timeout:g}.")
        distributed = needed("distributed", extra="dask")
        try:
            client = distributed.Client(f"tcp://{address}", timeout=options.timeout)
        except (OSError, TimeoutError) as error:
            raise ResourceError(
                f"no scheduler of dask answers at {address} within {options.timeout:g} s.",
                hint="Start one with: dask scheduler; or wait longer with --on-options timeout=60.",
            ) from error
        # Jobs leave files: the same call may not be taken for done because it was made before.
        kwargs = {"workers": list(options.workers)} if options.workers else {}
        executor = client.get_executor(pure=False, **kwargs)
        return cls(Executing(executor, close=client.close))

    def submit(self, errand: Errand) -> Handle:
        """Send an errand to a worker."""
        return self._executing.submit(errand)

    def __exit__(self, *error: object) -> None:
        """Part from the cluster, which goes on."""
        self._executing.__exit__(None, None, None)
