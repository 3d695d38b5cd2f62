"""F1, F2, F4 to F6: curves, inner steps, domains, time."""

from dataclasses import replace

from torchemo.lab.study.entry import Cell, Contrast, entry
from torchemo.lab.study.paper.cells import (
    RECORDED,
    base_cell,
    memory_cell,
    rule_cells,
    suffix,
)
from torchemo.lab.study.paper.published import PUBLISHED
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

F1 = entry("F1", lambda scale: rule_cells())


def _f2_cells(scale: Scale) -> tuple[Cell, ...]:
    return (
        rule_cells(world="narrow", n_shot=5) if scale.name == "paper" else rule_cells()
    )  # elsewhere the runs of T2


def _f2_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    after = suffix(5 if scale.name == "paper" else 1)
    rows = {row[0]: row[1:] for row in PUBLISHED["F2"].rows}
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


F2 = entry("F2", _f2_cells, _f2_contrasts)


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
                paper = PUBLISHED["F4"].gain("MAML+EMO", "MAML", **where) if all(sets) else None
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


F4 = entry("F4", lambda scale: _cross_cells(scale, memory=False))
F5 = entry("F5", lambda scale: _cross_cells(scale, memory=True), _cross_contrasts)
F6 = entry("F6", lambda scale: rule_cells())
FIGURES = (F1, F2, F3, F4, F5, F6, F7)
