"""T7 and T8: EMO on top of ARML against other learners, with Conv-4."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchemo.config.presets import parts_of
from torchemo.lab.study.entry import Cell, Contrast, Expectation, entry, versus
from torchemo.lab.study.paper.cells import KINDS, suffix
from torchemo.lab.study.paper.cells import LEARNERS as TUNED
from torchemo.lab.study.paper.published import PUBLISHED
from torchemo.lab.study.scales import Scale

LEARNERS = {
    "anil": "ANIL",
    "maml": "MAML",
    "bmg": "BMG",
    "meta-sgd": "Meta-SGD",
    "musml": "MUSML",
    "hsml": "HSML",
    "tsa-maml": "TSA-MAML",
    "arml": "ARML",
}
"""Learners of the tables by preset; each is run without and with memory."""

WORLDS = {"mixed": "", "narrow": ", narrow", "surfaces": ", 2-D families"}
"""What the methods are compared on, and what a title says of it."""

IN_EQUAL_TIME = " in equal time"
LONGER = " longer"
LONGER_PAIRS = {
    "maml": ("maml-offsets", "hsml"),
    "maml on surfaces": ("maml-offsets on surfaces", "arml on surfaces"),
}
"""Learners that are also trained far longer on regression, and what is set against them."""
TRAINED_LONGER = {*LONGER_PAIRS, *(name for names in LONGER_PAIRS.values() for name in names)}

_FULL_SIZES: dict[str, tuple[str, ...]] = {
    "arml": ("learner.task_dim=128",),
    "hsml": ("learner.task_dim=128",),
    "tsa-maml": (
        *("train.steps=162500", "learner.first_stage=100000", "learner.cluster_tasks=10000"),
        "outer.schedule=cosine",
    ),
    "musml": ("learner.anneal=50000",),
}
"""Presets have sizes for a CPU: the published ones (`config.presets`), for the scale of the paper."""


def _worlds(scale: Scale) -> tuple[str, ...]:
    if scale.name == "paper":
        return ("mixed", "narrow")
    return ("mixed", "surfaces") if "surfaces" in scale.worlds else ("mixed",)


def _name(method: str, world: str, n_shot: int) -> str:
    return method + suffix(n_shot) + ("" if world == "mixed" else f" on {world}")


def _cells(scale: Scale, n_shot: int) -> tuple[Cell, ...]:
    methods = [(learner, kind) for kind in ("", "-offsets") for learner in LEARNERS]
    methods.append(("arml", "-emo-mixed"))
    cells = [
        _cell(scale, learner, kind, world=world, n_shot=n_shot)
        for world in _worlds(scale)
        for learner, kind in methods
    ]
    return (*cells, *_in_equal_time(cells, scale), *_longer(cells, scale))


def _cell(scale: Scale, learner: str, kind: str, *, world: str, n_shot: int) -> Cell:
    """Return a learner without memory, or with a kind of it."""
    base = Cell(
        _name(learner, world, n_shot),
        LEARNERS[learner] + suffix(n_shot) + WORLDS[world],
        learner,
        "base",
        options=sizes(learner, scale),
        world=world,
        tests=scale.textures,
        n_shot=n_shot,
        of=_rates_of(learner, scale, n_shot),
    )
    return remembering(base, LEARNERS[learner], kind) if kind else base


def remembering(base: Cell, title: str, kind: str) -> Cell:
    """Return the cell of a learner, which is called ``title``, with a kind of memory."""
    memory, learner = KINDS[kind], base.preset
    return replace(
        base,
        name=base.name.replace(learner, f"{learner}{kind}", 1),
        title=base.title.replace(title, memory.beside(title), 1),
        preset=f"{learner}{memory.preset}",
        role="memory",
        options=(*memory.options, *base.options),
        variant=memory.variant,
    )


def _longer(cells: Sequence[Cell], scale: Scale) -> Iterator[Cell]:
    """Train five times as long: do errors come nearer to the published, and is a memory's gain left?"""
    if scale.regression and scale.name == "cpu":
        for cell in cells:
            if cell.name in TRAINED_LONGER:
                yield replace(
                    cell,
                    name=cell.name + LONGER,
                    title=f"{cell.title}, 5 times the outer steps",
                    options=(
                        f"train.steps={5 * scale.steps}",
                        f"train.validate_every={scale.steps}",
                    ),
                    of=cell.name,
                )


def _in_equal_time(cells: Sequence[Cell], scale: Scale) -> Iterator[Cell]:
    """Train once more, with its rates, for as many steps as take the CPU time of MAML's."""
    for cell in cells:
        cost = scale.costs.get(cell.preset.removesuffix("-joint"), 1.0)
        if cost != 1.0:
            yield replace(
                cell,
                name=cell.name + IN_EQUAL_TIME,
                title=f"{cell.title}, in MAML's CPU time",
                options=_steps(cell, round(scale.steps / cost)),
                tests=(),
                of=cell.name,
            )


def _steps(cell: Cell, count: int) -> tuple[str, ...]:
    """Set the outer steps; what happens at a step of the run moves along."""
    moving = {"musml": f"learner.anneal={2 * count // 5}"}
    moving["tsa-maml"] = f"learner.first_stage={count // 5}"
    learner, _ = parts_of(cell.preset)
    own = (moving[learner],) if learner in moving else ()
    return (f"train.steps={count}", f"train.validate_every={count // 5}", *own)


def sizes(learner: str, scale: Scale) -> tuple[str, ...]:
    """Return the published sizes of a learner at the scale of the paper."""
    return _FULL_SIZES.get(learner, ()) if scale.name == "paper" else ()


def _rates_of(learner: str, scale: Scale, n_shot: int) -> str | None:
    """On two cores a grid for each of so many methods would take days: on images all take MAML's rates.

    ANIL and Meta-SGD have chosen theirs for T1 (and each with memory takes those of its base).
    """
    return None if learner in TUNED or not scale.base_rates else _name("maml", "mixed", n_shot)


def _contrasts(scale: Scale, n_shot: int) -> tuple[Contrast, ...]:
    found = tuple(
        contrast
        for world in _worlds(scale)
        for cell, base, expect in _pairs()
        for contrast in _both(scale, world, n_shot, cell, base, expect)
    )
    if not (scale.regression and scale.name == "cpu" and n_shot == 1):
        return found
    longer = (
        versus(f"{name}{LONGER}", f"{base}{LONGER}")
        for base, names in LONGER_PAIRS.items()
        for name in names
    )
    return (*found, *longer)


def _both(
    scale: Scale, world: str, n_shot: int, cell: str, base: str, expect: Expectation
) -> Iterator[Contrast]:
    """On the cells' own tasks, as in the paper, and on textures where they are a test."""
    first, second = _name(cell, world, n_shot), _name(base, world, n_shot)
    paper = _paper(cell, base, world, n_shot)
    yield Contrast(f"{first} vs {base}", first, second, expect, paper=paper)
    for test in scale.textures:
        yield Contrast(f"{first} vs {base}, {test}", first, second, test=test)
    if cell in scale.costs and base in scale.costs:
        first += IN_EQUAL_TIME
        second += "" if base == "maml" else IN_EQUAL_TIME  # the others have its time
        yield versus(first, second)


def _pairs() -> Iterator[tuple[str, str, Expectation]]:
    """What the paper sets against what: ARML with memory, every learner with memory, ARML and HSML."""
    for cell in ("arml-emo-mixed", "arml-offsets"):
        for base in ("arml", "maml"):
            yield cell, base, "better"
    for learner in LEARNERS:
        if learner != "arml":
            yield f"{learner}-offsets", learner, "shown"
    yield "arml", "maml", "better"
    yield "hsml", "maml", "better"
    # Slots or gates: two ways to tell kinds of tasks apart.
    for learner in ("hsml", "arml"):
        yield "maml-offsets", learner, "shown"


def _paper(cell: str, base: str, world: str, n_shot: int) -> float | None:
    """The paper's difference in points, where it has both."""
    sets = {"mixed": ("Bird", "Texture", "Aircraft", "Fungi"), "narrow": ("miniImageNet",)}
    names = {**LEARNERS, "arml-offsets": "ARML+EMO", "arml-emo-mixed": "ARML+EMO"}
    if cell not in names or world not in sets:
        return None
    table = PUBLISHED["T7"] if n_shot == 1 else PUBLISHED["T8"]
    first, second = (
        sum(table.mean(name, method=names[method]) for name in sets[world]) / len(sets[world])
        for method in (cell, base)
    )
    return round(first - second, 2)


T7 = entry("T7", lambda scale: _cells(scale, 1), lambda scale: _contrasts(scale, 1))
T8 = entry("T8", lambda scale: _cells(scale, 5), lambda scale: _contrasts(scale, 5))

COMPARISONS = (T7, T8)
