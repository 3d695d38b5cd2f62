"""Clip and blur what a store keeps: less of a support image can be read from it.

The gradient of an inner step is scaled down to a largest norm, and normal noise is added to every number
(Abadi et al., CCS 2016). The visit is the unit, not the image, and every step and every class mean is a
release of its own: count them if you compute a privacy budget.
"""

import secrets

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from torchemo.core.types import Params
from torchemo.memory.lifelong.shares import COMPARED
from torchemo.runs.visits.index import Settings

_TINY = 1e-12


def protected(
    values: Params, means: Params, settings: Settings, *, generator: Generator | None = None
) -> tuple[Params, Params]:
    """Return gradients ``{name: [step, *shape]}`` and class means as the settings let them be kept.

    Args:
        values: Support gradients of the inner steps.
        means: Class means, ``{space: [way, dim]}``.
        settings: ``clip`` and ``noise``; without a clip nothing changes.
        generator: Source of the noise; by default one that nobody can repeat.
    """
    if settings.clip is None:
        return values, means
    generator = generator or Generator().manual_seed(secrets.randbits(63))
    steps = {name: value.shape[0] for name, value in values.items()}
    kept: Params = {}
    for length in sorted(set(steps.values())):
        together = {name: value for name, value in values.items() if steps[name] == length}
        factor = _factors(together, settings.clip)
        for name, value in together.items():
            scaled = value * factor.view(-1, *(1,) * (value.dim() - 1)).to(value)
            kept[name] = _blurred(scaled, settings.clip * settings.noise, generator)
    # Examples that are compared have the norm 1, and their means no larger one.
    units = {
        space: mean if space == COMPARED else torch.nn.functional.normalize(mean, dim=1)
        for space, mean in means.items()
    }
    blurred = {space: _blurred(unit, settings.noise, generator) for space, unit in units.items()}
    return {name: kept[name] for name in values}, blurred


def _factors(values: Params, clip: float) -> Float[Tensor, " step"]:
    """Return the factor, at most 1, that brings the gradient of each step to the norm ``clip``."""
    squares = torch.stack([v.double().flatten(1).square().sum(1) for v in values.values()]).sum(0)
    return (clip / squares.sqrt().clamp(min=_TINY)).clamp(max=1.0)


def _blurred(value: Tensor, deviation: float, generator: Generator) -> Tensor:
    if deviation == 0:
        return value
    return value + deviation * torch.randn(value.shape, generator=generator).to(value)
