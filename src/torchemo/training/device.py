"""How a command uses the machine: which device computes, how precisely, on how many threads."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from torchemo.config.machine import Machine, Precision
from torchemo.core import allocator
from torchemo.core.errors import ConfigError, ResourceError
from torchemo.core.machine import physical_memory
from torchemo.core.types import BaseClasses, Batch, Episode, Params
from torchemo.core.workers import usable_cores
from torchemo.training.distributed import ALONE, Team, open_team

CPU = torch.device("cpu")


class Place(NamedTuple):
    """Where everything is computed, how precisely, and by how many threads.

    Attributes:
        device: Where tensors lie.
        precision: What products of the network are computed in.
        workers: Threads that share the tasks of a step; results do not depend on it.
        team: Processes that share them; results do not depend on it either.

    Example:
        >>> open_place(device="cpu").words
        'cpu, float32'
    """

    device: torch.device = CPU
    precision: Precision = "float32"
    workers: int = 1
    team: Team = ALONE

    @property
    def words(self) -> str:
        """The place in words: ``cuda:0 (NVIDIA A100), bf16``."""
        name = _name_of(self.device)
        return f"{self.device}{f' ({name})' if name else ''}, {self.precision}"


HERE = Place()
"""The CPU."""


def open_place(*, device: str = "cpu", precision: Precision = "float32", workers: int = 1) -> Place:
    """Return a place to compute at, ready for use.

    Args:
        device: See `open_device`.
        precision: ``float32``; ``tf32``, which changes a setting of the whole process; ``bf16``.
        workers: Threads that share the tasks of a step.

    Raises:
        ConfigError: There is no such device, or it does not have this precision.
        ResourceError: The device is there and cannot be used.
    """
    found = open_device(device)
    _check_precision(found, precision)
    _check_usable(found)
    if found.type == "cuda":
        # cuDNN's own default is TF32, which a study has to ask for.
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
    return Place(found, precision, workers)


def place_of(machine: Machine, *, workers: int = 1) -> Place:
    """Return the place that a command's options name; under ``torchrun`` each process takes its own GPU."""
    device, rank = machine.device, os.environ.get("LOCAL_RANK")
    if device == "cuda" and rank is not None:
        device = f"cuda:{rank}"
    return open_place(device=device, precision=machine.precision, workers=workers)


@contextmanager
def joined(place: Place) -> Iterator[Place]:
    """Share work with the other processes that ``torchrun`` started, if it started this one."""
    with open_team(place.device) as team:
        yield place._replace(team=team)


def _check_precision(device: torch.device, precision: Precision) -> None:
    if precision not in ("float32", "tf32", "bf16"):
        raise ConfigError(f"there is no precision '{precision}': use float32, tf32 or bf16.")
    if precision == "float32":
        return
    if precision == "tf32":
        capable = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        capable = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if not capable:
        what = _name_of(device) or device
        raise ConfigError(f"{what} has no {precision}.", hint="Use --precision float32.")


def _check_usable(device: torch.device) -> None:
    """Refuse a device that is busy, before any work."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        raise ResourceError(
            f"device '{device}' cannot be used: {str(error).splitlines()[0]}",
            hint="Wait until it is free, or use another --device.",
        ) from error


def _name_of(device: torch.device) -> str:
    found = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return "" if device.type == "cpu" or found is None else str(found(device))


def device_memory(device: torch.device) -> int | None:
    """Return how many bytes a device has in all, or this machine for the CPU; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return physical_memory()


def open_device(name: str = "cpu") -> torch.device:
    """Return the device called ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``mps`` or ``xpu``.

    Args:
        name: ``auto`` is the accelerator of this machine, or the CPU where there is none.

    Raises:
        ConfigError: There is no such device on this machine.

    Example:
        >>> open_device("cpu")
        device(type='cpu')
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or CPU
    try:
        device = torch.device(name)
    except RuntimeError:
        raise _no_device(name) from None
    if device.type == "cpu":
        return CPU
    # An accelerator answers with nothing for a number that it does not have, without touching the rest.
    found = getattr(torch, device.type, None)
    count = found.device_count() if found is not None and found.is_available() else 0
    if (device.index or 0) >= count:
        raise _no_device(name)
    return torch.device(device.type, device.index or 0)


def _no_device(name: str) -> ConfigError:
    return ConfigError(
        f"there is no device '{name}' on this machine.",
        hint=f"Use one of: {', '.join(devices())}.",
    )


def devices() -> list[str]:
    """List the devices of this machine as `open_device` takes them."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["auto", "cpu"]
    count = torch.accelerator.device_count()
    return ["auto", "cpu", *(f"{accelerator.type}:{i}" for i in range(count))]


def to_device(episode: Episode, device: torch.device) -> Episode:
    """Return tasks with their examples and base classes on a device; tags and numbers stay on the host.

    Images in uint8, 0 .. 255, are scaled to [0, 1] on the device: a quarter of the bytes travels.
    """
    if episode.support.x.device == device and not _is_stored(episode.support.x):
        return episode
    support, query = (batch_to(b, device) for b in (episode.support, episode.query))
    base = episode.base
    if base is not None:
        examples = None if base.examples is None else batch_to(base.examples, device)
        base = BaseClasses(base.labels.to(device, non_blocking=True), examples)
    return replace(episode, support=support, query=query, base=base)


def batch_to(batch: Batch, device: torch.device) -> Batch:
    """Return examples on a device; images that come in uint8 are scaled there."""
    x, y = (t.to(device, non_blocking=True) for t in batch)
    # The same operations as on the CPU, so that they give the same bits.
    return Batch(x.to(torch.float32).div_(255) if _is_stored(x) else x, y)


def _is_stored(x: torch.Tensor) -> bool:
    """Return whether inputs are images ``[task, example, channel, height, width]`` as they are kept."""
    return x.dtype == torch.uint8 and x.dim() == 5


def home(params: Params) -> torch.device:
    """Return where a network is."""
    return next((p.device for p in params.values()), CPU)


def task_workers(*, release_memory: bool = False) -> int:
    """Set torch to one thread per operation and return how many tasks may run at once.

    One thread per task has no synchronisation inside operations and gives the same bits on any number of
    cores; ``OMP_NUM_THREADS`` limits it, as people expect. The C allocator is told to keep freed memory,
    which every step would otherwise pay for anew.
    """
    if allocator.wanted() and not release_memory:
        allocator.keep_memory()
    limit = os.environ.get("OMP_NUM_THREADS", "")
    cores = usable_cores()
    torch.set_num_threads(1)
    return min(cores, int(limit)) if re.fullmatch("0*[1-9][0-9]{0,8}", limit) else cores
