"""What a slot stands for: the validation tasks that recall it most, with their images."""

from typing import NamedTuple

from torchemo.data.episodes import sample_ids
from torchemo.data.source import PictureTasks
from torchemo.report.run.images import Thumbnails
from torchemo.report.run.memory import MemoryView
from torchemo.report.run.probe import Probe
from torchemo.runs.load import Opened
from torchemo.runs.train import VALIDATION_SEED

MAX_SLOTS, MAX_TASKS = 8, 2
"""Slots and tasks of each that are shown."""
LEAST = 0.05
"""Weight below which a slot is hardly used for a task."""


class ClassShown(NamedTuple):
    """A class of a task, and one of its support images; empty if that cannot be shown."""

    name: str
    uri: str


class TaskShown(NamedTuple):
    """A validation task and the weight with which it recalls the slot."""

    number: int
    weight: float
    domain: str
    classes: list[ClassShown]


class SlotShown(NamedTuple):
    """A slot, the mean weight that validation tasks put on it, and those that put most."""

    number: int
    weight: float
    failed: bool
    tasks: list[TaskShown]


def what_slots_stand_for(opened: Opened, probe: Probe, memory: MemoryView) -> list[SlotShown]:
    """Return the slots that validation tasks recall most, each with the tasks that recall it most."""
    used = sorted(memory.slots, key=lambda slot: (-slot.weight, slot.number))[:MAX_SLOTS]
    return [
        SlotShown(
            slot.number,
            slot.weight,
            slot.number in memory.failed,
            [_task(opened, probe, n, slot.number) for n in _most(probe, slot.number)],
        )
        for slot in used
    ]


def _most(probe: Probe, slot: int) -> list[int]:
    weights, tasks = probe.weights[:, slot].topk(min(MAX_TASKS, len(probe.weights)))
    return [
        int(n) for n, weight in zip(tasks.tolist(), weights.tolist(), strict=True) if weight > LEAST
    ]


def _task(opened: Opened, probe: Probe, number: int, slot: int) -> TaskShown:
    source, weight = opened.source, float(probe.weights[number, slot])
    domain = source.domains[int(probe.domain[number])]
    classes: list[ClassShown] = []
    if isinstance(source, PictureTasks):
        ids = sample_ids(
            source.index, source.spec, seed=VALIDATION_SEED, split="val", start=number, count=1
        )
        image = Thumbnails(source, opened.config.data)
        for label, kind in enumerate(ids.classes[0].tolist()):
            example = ids.support[0][ids.support_y[0] == label][0]
            classes.append(ClassShown(source.index.class_names[kind], image(int(example))))
    return TaskShown(number, weight, domain, classes)
