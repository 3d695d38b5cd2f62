"""T1 to T6: does memory help, and which optimizer, aggregator, controller, at which cost."""

import itertools
from collections.abc import Callable
from dataclasses import replace

from torchemo.lab.study.entry import REPAIRED, Cell, Contrast, Expectation, entry, versus
from torchemo.lab.study.paper.cells import (
    IN_TABLES,
    KINDS,
    LEARNERS,
    RECORDED,
    REPAIRED_OPTIONS,
    base_cell,
    gain,
    memory_cell,
    rule_cells,
    suffix,
)
from torchemo.lab.study.paper.published import PUBLISHED
from torchemo.lab.study.scales import OWN_WORLDS, Scale

AGGREGATORS = {
    "sum": ("memory.aggregator.name=sum",),
    "mean": ("memory.aggregator.name=mean",),
    "transformer": ("memory.aggregator.name=gate", "memory.aggregator.max_neighbors=9"),
}
CONTROLLERS = ("fifo", "clock", "lru")
CHOSEN_CONTROLLERS = {"maml": "lru", "anil": "lru", "meta-sgd": "clock"}
"""What the paper picks for each learner."""


def _t1_cells(scale: Scale) -> tuple[Cell, ...]:
    found: list[Cell] = []
    for n_shot in scale.shots:
        for learner in LEARNERS:
            base = base_cell(learner, tests=scale.elsewhere, n_shot=n_shot)
            found += [base, _longer(base, scale)]
            found += [
                memory_cell(learner, kind, tests=scale.elsewhere, n_shot=n_shot) for kind in KINDS
            ]
    for world in _own_worlds(scale):
        for learner in LEARNERS:
            base = base_cell(learner, world=world)
            cells = (base, memory_cell(learner, "-offsets", world=world))
            # Where grids take long, all take the rates that the base learner chose on the paper's sets.
            rates = learner if scale.base_rates else None
            found += [replace(_renamed(cell), of=rates) for cell in cells]
    return tuple(found)


def _own_worlds(scale: Scale) -> list[str]:
    return [world for world in OWN_WORLDS if world in scale.worlds]


def _longer(base: Cell, scale: Scale) -> Cell:
    """Give a base learner, with its own rates, more outer steps: memory takes time too."""
    times = scale.longer[base.preset]
    return replace(
        base,
        name=f"{base.name} longer",
        title=f"{base.title}, {times:g} times the outer steps",
        options=(*base.options, f"train.steps={round(scale.steps * times)}"),
        tests=(),
        of=base.name,
    )


def _renamed(cell: Cell) -> Cell:
    return replace(
        cell, name=f"{cell.name} on {cell.world}", title=f"{cell.title}, {OWN_WORLDS[cell.world]}"
    )


def _t1_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found: list[Contrast] = []
    for n_shot in scale.shots:
        for learner, name in IN_TABLES.items():
            paper = PUBLISHED["T1"].gain("with", "without", method=name, shot=str(n_shot))
            for kind in KINDS:
                found.append(gain(learner, kind, n_shot=n_shot, paper=paper, claims=("C1",)))
                cell, base = f"{learner}{kind}{suffix(n_shot)}", f"{learner}{suffix(n_shot)}"
                found += [versus(cell, base, test=world) for world in scale.elsewhere]
                expect: Expectation = "better" if kind == "-offsets" else "shown"
                found.append(versus(cell, f"{base} longer", expect))
    for world, learner in itertools.product(_own_worlds(scale), LEARNERS):
        cell, base = f"{learner}-offsets on {world}", f"{learner} on {world}"
        found.append(Contrast(f"{cell} vs {learner}", cell, base, "better"))
    return tuple(found)


T1 = entry("T1", _t1_cells, _t1_contrasts)


def _t2_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    table = PUBLISHED["T2"]
    rules = {"SGD": "maml", "Momentum": "maml momentum", "Adam": "maml adam"}
    return (
        gain("maml", "-emo-mixed", paper=table.gain("EMO", "SGD"), claims=("C7",)),
        gain("maml", "-offsets", paper=table.gain("EMO", "SGD")),
        *(
            Contrast(
                f"{a} vs {b}", rules[a], rules[b], "better", paper=table.gain(a, b), claims=("C7",)
            )
            for a, b in itertools.pairwise(rules)
        ),
    )


T2 = entry("T2", lambda scale: rule_cells(), _t2_contrasts)


def _variants(
    options: dict[str, tuple[str, ...]],
    of: Callable[[str, str], str | None] = lambda learner, name: None,
) -> tuple[Cell, ...]:
    """Return the recorded variant of the paper's memory for every learner with one part varied.

    Args:
        options: Names, and the options that choose the part.
        of: From learner and name to the cell whose rates it takes; None tunes its own.
    """
    cells = {learner: memory_cell(learner, "-emo-mixed") for learner in LEARNERS}
    return tuple(
        replace(
            cell,
            name=f"{learner} {name}",
            title=f"{cell.title}, {name}",
            options=(*cell.options, *chosen),
            of=of(learner, name),
        )
        for learner, cell in cells.items()
        for name, chosen in options.items()
    )


def _t3_cells(scale: Scale) -> tuple[Cell, ...]:
    def of(learner: str, name: str) -> str | None:
        # It begins as the own gradient alone, so that the rates of the base learner fit, and takes ten times
        # as long as the others.
        return learner if name == "transformer" and scale.name != "paper" else None

    return (
        *(base_cell(learner) for learner in LEARNERS),
        *_variants(AGGREGATORS, of),
    )


def _t3_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found = []
    for learner, name in IN_TABLES.items():
        means = {a: PUBLISHED["T3"].mean(a, method=name) for a in AGGREGATORS}
        best = max(means, key=lambda a: means[a])
        found += [
            Contrast(
                f"{learner}: {best} vs {other}",
                f"{learner} {best}",
                f"{learner} {other}",
                "better",
                paper=round(means[best] - means[other], 2),
            )
            for other in AGGREGATORS
            if other != best
        ]
        found += [versus(f"{learner} {a}", learner) for a in AGGREGATORS]
    return tuple(found)


T3 = entry("T3", _t3_cells, _t3_contrasts)


def _t4_cells(scale: Scale) -> tuple[Cell, ...]:
    def of(learner: str, name: str) -> str | None:
        # What is forgotten does not change how long a step is: elsewhere one choice serves all three.
        chosen = CHOSEN_CONTROLLERS[learner]
        return None if name == chosen or scale.name == "paper" else f"{learner} {chosen}"

    mixed = _variants({name: (f"memory.controller.name={name}",) for name in CONTROLLERS}, of)
    return (
        *(base_cell(learner) for learner in LEARNERS),
        *mixed,
        *(_repaired(cell, scale) for cell in mixed if cell.preset.startswith("maml")),
    )


def _repaired(cell: Cell, scale: Scale) -> Cell:
    """Return a cell without what R1 finds to break it; its rates are those of R1 and the sweeps."""
    first = None if scale.name == "paper" else "maml"
    return replace(
        cell,
        name=f"{cell.name} {REPAIRED}",
        title=cell.title.replace(KINDS["-emo-mixed"].title, "EMO (repaired)"),
        options=(*REPAIRED_OPTIONS, cell.options[-1]),
        of=first if cell.of is None else f"{cell.of} {REPAIRED}",
        variant=REPAIRED,
    )


def _t4_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found: list[Contrast] = []
    for learner, name in IN_TABLES.items():
        printed = {
            controller: PUBLISHED["T4"].mean(controller, method=name) for controller in CONTROLLERS
        }
        printed[learner] = PUBLISHED["T1"].mean("without", method=name, shot="1")
        found += _controller_contrasts(learner, "", printed)
    return (*found, *_controller_contrasts("maml", f" {REPAIRED}", {}))


def _controller_contrasts(learner: str, kind: str, printed: dict[str, float]) -> list[Contrast]:
    pairs: list[tuple[str, str, Expectation]] = [
        ("lru", "fifo", "better"),
        ("clock", "fifo", "better"),
        ("fifo", learner, "worse"),
    ]
    return [
        Contrast(
            f"{learner}{kind}: {a} vs {b}",
            f"{learner} {a}{kind}",
            b if b == learner else f"{learner} {b}{kind}",
            expect,
            paper=round(printed[a] - printed[b], 2) if printed else None,
            claims=("C3",),
        )
        for a, b, expect in pairs
    ]


T4 = entry("T4", _t4_cells, _t4_contrasts)

T5 = entry(
    "T5",
    lambda scale: (
        base_cell("maml"),
        memory_cell("maml", "-emo-mixed"),
        replace(
            memory_cell("maml", "-emo-paper"),
            name="transformer-based gradient",
            title="MAML + EMO, transformer-based gradient",
            missing="the paper does not say what it is",
        ),
    ),
    lambda scale: (gain("maml", "-emo-mixed"),),
)


def _t6_cells(scale: Scale) -> tuple[Cell, ...]:
    found: list[Cell] = []
    for learner in ("maml", "meta-sgd"):
        base = base_cell(learner)
        adam = replace(
            base,
            name=f"{learner} adam",
            title=f"{base.title}, Adam",
            options=("learner.rule=adam",) if learner == "maml" else (),
            missing=None if learner == "maml" else "Meta-SGD learns its rates; it has no Adam rule",
        )
        found += [base, adam, *(memory_cell(learner, kind) for kind in RECORDED)]
    return tuple(found)


T6 = entry("T6", _t6_cells)

TABLES = (T1, T2, T3, T4, T5, T6)
