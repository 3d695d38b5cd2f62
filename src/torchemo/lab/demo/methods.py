"""What is compared in the demo, visit by visit, on the same curves with the same points."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from torchemo.core.types import Batch, Episode
from torchemo.memory.lifelong.memory import LifelongMemory
from torchemo.memory.lifelong.recognise import ByName
from torchemo.training.device import home, to_device
from torchemo.training.lifelong import Revisit, revisit
from torchemo.training.system import System

BASE = "MAML"
SLOPES = "MAML + EMO"
EMO = "MAML + EMO, curvature"
STRANGERS = "control, wrong curve recalled"
REPLAY = "MAML, all points kept"
OFFSETS = "MAML + offsets"
OFFSETS_EMO = "MAML + offsets + EMO, curv."


@final
@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        visits: The visits, ``visit -> Episode``.
        errors: Mean squared error of each method, ``[visit, curve]``.
        answers: Answers at the last visit, ``[curve, query]``.
        numbers: How many numbers each memory keeps of a visit.
    """

    visits: list[Episode]
    errors: dict[str, Tensor]
    answers: dict[str, Tensor]
    numbers: dict[str, int]


def measure(systems: dict[str, System], visits: list[Episode]) -> Measured:
    """Answer all visits in turn with every method, where the systems are."""
    there = [to_device(visit, home(systems["maml"].params)) for visit in visits]
    slopes, curved, own = (LifelongMemory(ByName(), content=c) for c in
                           ("per_step", "gauss_newton", "gauss_newton"))  # fmt: skip
    nothing = LifelongMemory(ByName())
    found: dict[str, list[Tensor]] = {}
    for v, visit in enumerate(there):
        support, all_points = visit.support, _pooled(there[: v + 1])
        ways = {
            BASE: _at(systems["maml"], support, nothing),
            SLOPES: _at(systems["maml"], support, slopes),
            EMO: _at(systems["maml"], support, curved),
            # The same memory, asked for the wrong curve: more gradients alone are no help.
            STRANGERS: _at(systems["maml"], support, curved, shift=1),
            REPLAY: _at(systems["maml"], all_points, nothing),
            OFFSETS: _at(systems["maml-offsets"], support, nothing),
            OFFSETS_EMO: _at(systems["maml-offsets"], support, own),
        }
        for name, way in ways.items():
            found.setdefault(name, []).append(way.outputs(visit.query.x)[..., 0].cpu())
        for name in (SLOPES, EMO, OFFSETS_EMO):
            ways[name].remember()
    truth = visits[0].query.y[..., 0]
    return Measured(
        visits,
        errors={n: torch.stack([_error(a, truth) for a in one]) for n, one in found.items()},
        answers={name: one[-1] for name, one in found.items()},
        numbers={SLOPES: _kept(slopes), EMO: _kept(curved)},
    )


def _at(system: System, support: Batch, memory: LifelongMemory, *, shift: int = 0) -> Revisit:
    tasks = len(support.x)
    names = [(f"curve {(i + shift) % tasks}",) for i in range(tasks)]
    return revisit(
        system.learner, system.params, support, memory, names=names, own_memory=system.memory
    )


def _pooled(visits: list[Episode]) -> Batch:
    return Batch(
        torch.cat([v.support.x for v in visits], 1), torch.cat([v.support.y for v in visits], 1)
    )


def _error(answers: Tensor, truth: Tensor) -> Tensor:
    return (answers - truth).square().mean(1)


def _kept(memory: LifelongMemory) -> int:
    return sum(value.numel() for value in memory.visits[0].values.values())
