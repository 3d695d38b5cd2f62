"""Where the jobs of a study run: on this machine, a Slurm or dask cluster, or an engine of your own."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torchemo.config.registry import Registry
from torchemo.config.toml import from_dict, override
from torchemo.core.errors import ConfigError
from torchemo.lab.study.engines.engine import Engine

_HERE = "torchemo.lab.study.engines"

ENGINES = Registry(
    "engine",
    "on",
    {
        "local": f"{_HERE}.local:Local",
        "slurm": f"{_HERE}.slurm:Slurm",
        "submitit-local": f"{_HERE}.slurm:SubmititLocal",
        "dask": f"{_HERE}.dask:Dask",
    },
    group="torchemo.engines",
)
"""Engines by name. A class has ``Options``, a frozen dataclass, and ``build(address, options, folder)``."""


def open_engine(on: str, options: Sequence[str], folder: Path) -> Engine:
    """Make an engine.

    Args:
        on: Its name, and perhaps an address: ``slurm``, ``dask://scheduler:8786``.
        options: Its options as ``key=value``.
        folder: Folder of the studies, which all workers see.

    Raises:
        ConfigError: There is no such engine, it is not installed, or it has no such option.
        ResourceError: It does not answer.
    """
    name, _, address = on.partition("://")
    given: dict[str, Any] = {}
    kind = ENGINES[name]
    for option in options:
        if "=" not in option:
            raise ConfigError(
                f"--on-options '{option}' should be KEY=VALUE, such as timeout_min=60."
            )
        override(given, option)
    options_of: type[Any] = ENGINES.options_of(name)
    if given and not fields(options_of):
        raise ConfigError(f"engine '{name}' has no options, got --on-options {' '.join(options)}.")
    resolved = from_dict(given, options_of, where=f"--on-options of engine '{name}'")
    engine: Engine = kind.build(address, resolved, folder.resolve())
    return engine
