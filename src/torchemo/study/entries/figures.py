"""F1 to F7: curves, inner steps, memory size, domains, time, neighbours."""

from torchemo.study import published
from torchemo.study.entries.methods import READINGS, base_cell, emo_cells, rule_cells, suffix
from torchemo.study.entry import Cell, Contrast, Entry
from torchemo.study.scales import FOUR, Scale

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
        for kind in READINGS
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


def _sweep(
    scale: Scale, sizes: tuple[int, ...], option: str, letter: str, n_shot: int
) -> tuple[Cell, ...]:
    """Return the literal MAML + EMO at every size; size 0 is the base learner."""
    base = base_cell("maml", world="narrow", n_shot=n_shot)
    return (
        base,
        *(
            Cell(
                f"{letter}={size}{suffix(n_shot)}",
                f"{letter} = {size}{suffix(n_shot)}",
                "maml-emo-paper",
                "emo",
                options=(f"{option}={size}",),
                world="narrow",
                n_shot=n_shot,
            )
            for size in sizes
            if size > 0
        ),
    )


def _shots(scale: Scale) -> tuple[int, ...]:
    return (1, 5) if scale.name == "paper" else (1,)


def _sweep_contrasts(
    scale: Scale, sizes: tuple[int, ...], letter: str, middle: int, claim: str
) -> tuple[Contrast, ...]:
    """Grow from nothing to the middle, then stay: what the paper says of T and of k."""
    table = {"T": published.F3, "k": published.F7}[letter]
    known = [size for size in sizes if size > 0]
    middle = middle if middle in known else known[-1]

    def cell(size: int, n_shot: int) -> str:
        return f"{letter}={size}{suffix(n_shot)}" if size else f"maml{suffix(n_shot)}"

    def paper(a: int, b: int, n_shot: int) -> float | None:
        if not {str(a), str(b)} <= set(table.header):
            return None
        return table.gain(str(a), str(b), shot=f"{n_shot}-shot")

    found = []
    for n_shot in _shots(scale):
        pairs = [
            (middle, 0, "better"),
            (middle, known[0], "better"),
            (known[-1], middle, "no better"),
        ]
        found += [
            Contrast(
                f"{cell(a, n_shot)} vs {cell(b, n_shot)}",
                cell(a, n_shot),
                cell(b, n_shot),
                expect,  # type: ignore[arg-type]
                paper=paper(a, b, n_shot),
                claims=(claim,),
            )
            for a, b, expect in pairs
            if a != b
        ]
    return tuple(found)


F3 = Entry(
    "F3",
    "Memory size",
    "Accuracy grows with the number of slots up to 100 or 200 and then stays.",
    published.F3,
    lambda scale: tuple(
        cell
        for n_shot in _shots(scale)
        for cell in _sweep(scale, scale.capacities, "emo.memory.capacity", "T", n_shot)
    ),
    lambda scale: _sweep_contrasts(scale, scale.capacities, "T", 100, "C4"),
    "sweep",
)


def _cross_cells(scale: Scale, *, memory: bool) -> tuple[Cell, ...]:
    found: list[Cell] = []
    for world in FOUR:
        others = tuple(other for other in FOUR if other != world)
        cells = [base_cell("maml", world=world, tests=others)]
        if memory:
            cells += emo_cells("maml", world=world, tests=others)
        name = scale.worlds[world][0]
        found += [
            Cell(
                f"{cell.name} on {world}",
                f"{cell.title}, trained on {name}",
                cell.preset,
                cell.role,
                world=world,
                tests=others,
            )
            for cell in cells
        ]
    return tuple(found)


def _cross_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found = []
    for kind in READINGS:
        for trained in FOUR:
            for tested in FOUR:
                sets = [_PAPER_SETS.get(scale.worlds[world][0], "") for world in (trained, tested)]
                near = trained == tested or set(sets) == _CLOSE
                where = {"trained on": sets[0], "tested on": sets[1]}
                paper = published.F4.gain("MAML+EMO", "MAML", **where) if all(sets) else None
                found.append(
                    Contrast(
                        f"maml{kind} vs maml, {trained} to {tested}",
                        f"maml{kind} on {trained}",
                        f"maml on {trained}",
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
F7 = Entry(
    "F7",
    "Number of neighbours",
    "Accuracy grows with k up to 15 or 20 and then stays.",
    published.F7,
    lambda scale: tuple(
        cell
        for n_shot in _shots(scale)
        for cell in _sweep(scale, scale.neighbours, "emo.retrieval.k", "k", n_shot)
    ),
    lambda scale: _sweep_contrasts(scale, scale.neighbours, "k", 20, "C5"),
    "sweep",
)

FIGURES = (F1, F2, F3, F4, F5, F6, F7)
