"""The controls that every cell with memory carries: the same run with one thing broken."""

from dataclasses import replace
from types import MappingProxyType

from torchemo.config.presets import parts_of
from torchemo.config.run import RunConfig
from torchemo.lab.study.entry import Cell, Contrast, versus
from torchemo.lab.study.scales import SEEN
from torchemo.memory import MEMORIES
from torchemo.memory.interface import TaskMemory

CONTROLS: MappingProxyType[str, str] = MappingProxyType(
    {
        "no-memory": "without memory",
        "random-retrieval": "random retrieval",
        "random-gradients": "random gradients of the same norm",
        "one-slot": "single slot",
    }
)
"""Names of the controls and how they are shown."""


def control_options(control: str, config: RunConfig) -> tuple[str, ...] | None:
    """Return what a control changes in the configuration it belongs to; None if it makes no sense there.

    A task recalls all slots of a memory of offsets, so that choosing them at random means one random slot
    per task. A single slot is a control of such memories alone: it keeps their extra outer rate. Without
    memory the learner trains for as many outer steps as both did.
    """
    offsets = MEMORIES[config.memory.name].offsets_start
    if control == "no-memory":
        alone = () if config.memory_steps is None else (f"train.steps={config.outer_steps}",)
        return ("memory.name=none", *alone)
    if control == "random-retrieval":
        return ("memory.index=random", *(("memory.k=1",) if offsets else ()))
    if control == "random-gradients":
        return ("memory.control=random_values",)
    return ("memory.capacity=1",) if offsets else None


def controls_of(cell: Cell, config: RunConfig) -> list[Cell]:
    """Return the controls of a cell whose configuration is ``config``; none if that has no memory."""
    if not issubclass(MEMORIES[config.memory.name], TaskMemory):
        return []
    changes = {name: control_options(name, config) for name in CONTROLS}
    return [
        replace(
            cell,
            name=f"{cell.name}/{name}",
            title=f"{cell.title}, {CONTROLS[name]}",
            role="control",
            options=(*cell.options, *options),
            tests=tuple(test for test in cell.tests if test == SEEN),
            of=cell.name,
            grid=(),
        )
        for name, options in changes.items()
        if options is not None
    ]


def control_contrasts(controls: list[Cell], cells: list[Cell]) -> list[Contrast]:
    """Set every cell against its controls, and these against the learner without memory.

    The paper reports none of them. The second say how much of a gain a control has already.
    """
    found = [
        Contrast(f"{cell.of} vs {_kind(cell)}", str(cell.of), cell.name, "better")
        for cell in controls
    ]
    for control in controls:
        base = _base(control, cells)
        if base is not None and _kind(control) != "no-memory":
            found.append(versus(control.name, base.name))
    return found


def _kind(control: Cell) -> str:
    return control.name.rsplit("/", 1)[-1]


def _base(control: Cell, cells: list[Cell]) -> Cell | None:
    """Return the learner of a control without memory, trained on the same, with rates of its own."""
    learner, _ = parts_of(control.preset)
    alike = (
        c
        for c in cells
        if (c.role, c.preset, c.world, c.n_shot) == ("base", learner, control.world, control.n_shot)
        and not c.options
    )
    return next(alike, None)
