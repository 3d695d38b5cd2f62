"""Check a device: are its gradients those of the CPU, how fast is it, and what does it hold?"""

import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from torchemo.config.presets import preset
from torchemo.config.registry import Part
from torchemo.core.errors import TorchemoError
from torchemo.core.rng import generator_for
from torchemo.core.tree import flatten
from torchemo.core.types import Batch, Episode, Params, TaskShape
from torchemo.learners.gradient.inner import SGD
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.maml import MAML
from torchemo.models import Conv4
from torchemo.runs.environment import environment
from torchemo.runs.experiment import build_trainer
from torchemo.training.device import CPU, HERE, Place, device_memory
from torchemo.training.step import outer_step
from torchemo.training.trainer import Trainer

EQUAL = {torch.float64: 1e-10, torch.float32: 1e-3}
"""Largest relative difference of a meta-gradient from the CPU's, by the precision that the device has."""

PRESETS = ("maml", "anil", "protonet", "maml-emo", "maml-emo-paper", "maml-offsets-joint")
TIMED = 5
SHAPE = TaskShape("classification", x=(3, 32, 32), n_out=5, n_shot=1, n_query=5)


class Ran(NamedTuple):
    """How three outer steps of a preset went on a device."""

    preset: str
    ok: bool
    detail: str


def device_report(place: Place) -> dict[str, Any]:
    """Compare a device with the CPU: equality, three steps of some presets, speed and memory.

    Everything is ready for JSON, so that one file can be sent to others.
    """
    error, precision = gradient_error(place.device)
    ran = [_runs(name, place) for name in PRESETS]
    # NaN is not below anything.
    equal = bool(error <= EQUAL[precision])
    return {
        "ok": equal and all(one.ok for one in ran),
        "place": place.words,
        "equality": {
            "precision": str(precision).removeprefix("torch."),
            "largest_relative_difference": error,
            "at_most": EQUAL[precision],
            "ok": equal,
        },
        "presets": [one._asdict() for one in ran],
        "seconds_per_step": {
            HERE.words: _seconds("maml", HERE),
            place.words: _seconds("maml", place),
        },
        "memory": {"bytes": device_memory(place.device), "peak_bytes": _peak(place.device)},
        "environment": environment(place),
    }


def gradient_error(device: torch.device) -> tuple[float, torch.dtype]:
    """Compare a second-order meta-gradient with the CPU's, in float64 where the device has it."""
    dtype = torch.float64 if _has_float64(device) else torch.float32
    found = [_gradient(where, dtype).to(CPU) for where in (CPU, device)]
    return float((found[1] - found[0]).norm() / found[0].norm()), dtype


def _gradient(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    # Smooth, so that no rounding decides which of two maps wins.
    model = Conv4(5, image_size=16, filters=4, activation="tanh", downsample="stride")
    learner = MAML(InnerLoop(model, rule=SGD(lr=0.1), steps=2))
    params = {n: p.to(device, dtype) for n, p in learner.init(generator_for(0, "doctor")).items()}
    generator = generator_for(0, "doctor", "device")

    def batch(examples: int) -> Batch:
        x = torch.rand(3, examples, 3, 16, 16, generator=generator, dtype=torch.float64)
        return Batch(x.to(dtype), torch.arange(examples).repeat(3, 1) % 5)

    found: Params = outer_step(learner, params, Episode(batch(5), batch(10))).gradients
    return flatten({n: g[None] for n, g in found.items()}).flatten()


def _has_float64(device: torch.device) -> bool:
    try:
        torch.zeros(1, device=device, dtype=torch.float64)
    except (RuntimeError, TypeError):
        return False
    return True


def _runs(name: str, place: Place) -> Ran:
    """Take three outer steps of a preset, and say what stopped it if anything did."""
    try:
        steps = _steps(name, place)
        losses = [float(steps(i)) for i in range(3)]
    except (TorchemoError, RuntimeError, NotImplementedError) as error:
        return Ran(name, False, str(error).splitlines()[0])
    return Ran(name, True, f"losses {', '.join(f'{loss:.3f}' for loss in losses)}")


def _steps(name: str, place: Place) -> Callable[[int], torch.Tensor]:
    config = replace(preset(name), model=Part("conv4", {"filters": 16}))
    trainer: Trainer = build_trainer(config, SHAPE, place=place)

    def step(number: int) -> torch.Tensor:
        generator = generator_for(0, "doctor", "step", number)

        def batch(examples: int) -> Batch:
            x = torch.rand(4, examples, *SHAPE.x, generator=generator)
            return Batch(x, torch.arange(examples).repeat(4, 1) % 5)

        return trainer.step(Episode(batch(5), batch(25))).losses.mean()

    return step


def _seconds(name: str, place: Place) -> float:
    """Return the least time of an outer step; reading its loss waits for the device."""
    steps = _steps(name, place)
    times = []
    for number in range(TIMED + 2):
        began = time.perf_counter()
        float(steps(number))
        times.append(time.perf_counter() - began)
    return min(times[2:])


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
