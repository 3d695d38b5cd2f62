"""The controls that every cell with memory carries: the same run with one thing broken."""

from types import MappingProxyType

from torchemo.config.run import RunConfig
from torchemo.lab.study.entry import Cell, Contrast
from torchemo.lab.study.scales import SEEN

CONTROLS: MappingProxyType[str, str] = MappingProxyType(
    {
        "no-memory": "without memory",
        "random-retrieval": "random retrieval",
        "random-gradients": "random gradients of the same norm",
        "one-slot": "one slot for all tasks",
    }
)
"""Names of the controls and how they are shown."""


def control_options(control: str, config: RunConfig) -> tuple[str, ...] | None:
    """Return what a control changes in the configuration it belongs to; None if it makes no sense there.

    Consolidated slots are all recalled, so that choosing them at random means one random slot per task.
    A single slot is a control of consolidated memories alone: it keeps their extra outer rate.
    """
    consolidates = config.emo.memory.write == "consolidate"
    if control == "no-memory":
        return ("emo.memory.capacity=0",)
    if control == "random-retrieval":
        return ("emo.retrieval.index=random", *(("emo.retrieval.k=1",) if consolidates else ()))
    if control == "random-gradients":
        return ("emo.value.control=random_values",)
    return ("emo.memory.capacity=1",) if consolidates else None


def controls_of(cell: Cell, config: RunConfig) -> list[Cell]:
    """Return the controls of a cell with memory, whose configuration is ``config``."""
    found = []
    for name, title in CONTROLS.items():
        options = control_options(name, config)
        if options is not None:
            found.append(
                Cell(
                    f"{cell.name}/{name}",
                    f"{cell.title}, {title}",
                    cell.preset,
                    "control",
                    options=(*cell.options, *options),
                    world=cell.world,
                    tests=tuple(test for test in cell.tests if test == SEEN),
                    n_shot=cell.n_shot,
                    of=cell.name,
                    reading=cell.reading,
                )
            )
    return found


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
            found.append(Contrast(f"{control.name} vs {base.name}", control.name, base.name))
    return found


def _kind(control: Cell) -> str:
    return control.name.rsplit("/", 1)[-1]


def _base(control: Cell, cells: list[Cell]) -> Cell | None:
    """Return the learner of a control without memory, trained on the same, with rates of its own."""
    learner = control.preset.removesuffix("-paper").removesuffix("-emo")
    alike = (
        c
        for c in cells
        if (c.role, c.preset, c.world, c.n_shot) == ("base", learner, control.world, control.n_shot)
        and not c.options
    )
    return next(alike, None)
