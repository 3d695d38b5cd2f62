"""F1, F2, F4 to F6: curves, inner steps, domains, time."""

from dataclasses import replace

from torchemo.lab.study.entry import Cell, Contrast, Entry
from torchemo.lab.study.paper import published
from torchemo.lab.study.paper.cells import (
    RECORDED,
    base_cell,
    memory_cell,
    rule_cells,
    suffix,
)
from torchemo.lab.study.paper.sweeps import F3, F7
from torchemo.lab.study.scales import FOUR, Scale

_PAPER_SETS = {
    "birds84": "Bird",
    "aircraft84_47classes": "Aircraft",
    "fungi84_27classes": "Fungi",
    "plainmulti/CUB_Bird": "Bird",
    "plainmulti/DTD_Texture": "Texture",
    "plainmulti/FGVC_Aircraft": "Aircraft",
    "plainmulti/FGVCx_Fungi": "Fungi",
}
"""Which set of the paper one of ours stands for."""

_CLOSE = {"Bird", "Aircraft"}
"""The two sets between which the paper's memory helps."""

F1 = Entry(
    "F1",
    "Training curves",
    "The loss of EMO falls fastest and lowest, then SGD, then Momentum and Adam.",
    published.F1,
    lambda scale: rule_cells(),
    lambda scale: (),
    "curves",
)


def _f2_cells(scale: Scale) -> tuple[Cell, ...]:
    return (
        rule_cells(world="narrow", n_shot=5) if scale.name == "paper" else rule_cells()
    )  # elsewhere the runs of T2


def _f2_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    after = suffix(5 if scale.name == "paper" else 1)
    rows = {row[0]: row[1:] for row in published.F2.rows}
    paper = round(float(rows["EMO"][1]) - float(rows["SGD"][-1]), 2)
    return tuple(
        Contrast(
            f"maml{kind} after 1 step vs maml after all",
            f"maml{kind}{after}",
            f"maml{after}",
            "better",
            step=1,
            paper=paper,
            claims=("C2",),
        )
        for kind in RECORDED
    )


F2 = Entry(
    "F2",
    "Accuracy after every inner step",
    "EMO after one step is above SGD after five, and above chance before the first.",
    published.F2,
    _f2_cells,
    _f2_contrasts,
    "steps",
    note="Before the first step accuracy is exactly 1/N under random labels (A4): a leak test.",
)


def _cross_cells(scale: Scale, *, memory: bool) -> tuple[Cell, ...]:
    """Return MAML, and with memory, trained on one set each.

    At the scale of the paper each tunes its rates; elsewhere they take those chosen on all four sets, whose
    runs T1 has already.
    """
    whole = scale.name == "paper"
    methods = [base_cell("maml")]
    methods += [memory_cell("maml", kind) for kind in RECORDED if memory]
    found = [] if whole else list(methods)
    for world in FOUR:
        name = scale.only_set(world)
        found += [
            replace(
                method,
                name=f"{method.name} on {name}",
                title=f"{method.title}, trained on {name}",
                world=world,
                tests=tuple(other for other in FOUR if other != world),
                of=None if whole else method.name,
            )
            for method in methods
        ]
    return tuple(found)


def _cross_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found = []
    for kind in RECORDED:
        for trained in FOUR:
            for tested in FOUR:
                sets = [_PAPER_SETS.get(scale.worlds[world][0], "") for world in (trained, tested)]
                near = trained == tested or set(sets) == _CLOSE
                where = {"trained on": sets[0], "tested on": sets[1]}
                paper = published.F4.gain("MAML+EMO", "MAML", **where) if all(sets) else None
                found.append(
                    Contrast(
                        f"maml{kind} vs maml, {scale.only_set(trained)} to {scale.only_set(tested)}",
                        f"maml{kind} on {scale.only_set(trained)}",
                        f"maml on {scale.only_set(trained)}",
                        "better" if near else "worse",
                        test=tested,
                        paper=paper,
                        claims=("C6",),
                    )
                )
    return tuple(found)


F4 = Entry(
    "F4",
    "Across domains without memory",
    "MAML trained on one set is good there and poor on most others.",
    published.F4,
    lambda scale: _cross_cells(scale, memory=False),
    lambda scale: (),
    "matrix",
)
F5 = Entry(
    "F5",
    "Across domains with memory",
    "A memory of one domain helps in that domain (+2 to +5) and between Bird and Aircraft, and hurts"
    " elsewhere (-0.5 to -4.4).",
    published.F4,
    lambda scale: _cross_cells(scale, memory=True),
    _cross_contrasts,
    "matrix",
)
F6 = Entry(
    "F6",
    "Time of an inner step",
    "A step of EMO takes 2.0 ms against 1.3 ms of SGD, and 1.7 ms before the first.",
    published.F6,
    lambda scale: rule_cells(),
    lambda scale: (),
    "bars",
    measure="cost",
    scales=("smoke/pictures", "cpu/pictures", "paper/pictures"),
    note="Processor time of one task on one core; the paper's is of its own machine.",
)
FIGURES = (F1, F2, F3, F4, F5, F6, F7)
