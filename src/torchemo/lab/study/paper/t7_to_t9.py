"""T7 to T9: EMO on top of ARML against other learners, with Conv-4 and ResNet-12."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchemo.lab.study.entry import Cell, Contrast, Entry, Expectation
from torchemo.lab.study.paper import published
from torchemo.lab.study.paper.cells import LEARNERS as TUNED
from torchemo.lab.study.paper.cells import suffix
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

TEXTURES = "outside textures"
IN_EQUAL_TIME = " in equal time"
LONGER = " longer"
LONGER_PAIRS = {
    "maml": ("maml-emo", "hsml"),
    "maml on surfaces": ("maml-emo on surfaces", "arml on surfaces"),
}
"""Learners that are also trained far longer on regression, and what is set against them."""
TRAINED_LONGER = {*LONGER_PAIRS, *(name for names in LONGER_PAIRS.values() for name in names)}

_FULL_SIZES: dict[str, tuple[str, ...]] = {
    "arml": ("learner.task_dim=128",),
    "hsml": ("learner.task_dim=128",),
    "tsa-maml": (
        *("train.iterations=162500", "learner.first_stage=100000", "learner.cluster_tasks=10000"),
        "outer.schedule=cosine",
    ),
    "musml": ("learner.anneal=50000",),
}
"""Presets have sizes for a CPU: the published ones (`config.presets`), for the scale of the paper."""


def _worlds(scale: Scale) -> tuple[str, ...]:
    if scale.name == "paper":
        return ("mixed", "narrow")
    return ("mixed", "surfaces") if "surfaces" in scale.worlds else ("mixed",)


def _name(preset: str, world: str, n_shot: int) -> str:
    return preset + suffix(n_shot) + ("" if world == "mixed" else f" on {world}")


def _cells(scale: Scale, n_shot: int) -> tuple[Cell, ...]:
    methods = {name: (title, "base") for name, title in LEARNERS.items()}
    methods |= {f"{name}-emo": (f"{title} + EMO (ours)", "emo") for name, title in LEARNERS.items()}
    methods["arml-emo-paper"] = ("ARML + EMO (literal)", "emo")
    cells = [
        Cell(
            _name(preset, world, n_shot),
            title + suffix(n_shot) + WORLDS[world],
            preset,
            "emo" if role == "emo" else "base",
            options=_sizes(preset, scale),
            world=world,
            tests=_textures(scale),
            n_shot=n_shot,
            of=_rates_of(preset, scale, n_shot),
        )
        for world in _worlds(scale)
        for preset, (title, role) in methods.items()
    ]
    return (*cells, *_in_equal_time(cells, scale), *_longer(cells, scale))


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
                        f"train.iterations={5 * scale.iterations}",
                        f"train.validate_every={scale.iterations}",
                    ),
                    of=cell.name,
                )


def _in_equal_time(cells: Sequence[Cell], scale: Scale) -> Iterator[Cell]:
    """Train once more, with its rates, for as many steps as take the CPU time of MAML's."""
    steps = scale.iterations
    for cell in cells:
        cost = scale.costs.get(cell.preset, 1.0)
        if cost != 1.0:
            yield replace(
                cell,
                name=cell.name + IN_EQUAL_TIME,
                title=f"{cell.title}, in MAML's CPU time",
                options=_steps(round(steps / cost)),
                tests=(),
                of=cell.name,
            )


def _steps(count: int) -> tuple[str, ...]:
    """Outer steps; what happens at a step of the run (MUSML's annealing, TSA-MAML's stages) moves along."""
    return (
        *(f"train.iterations={count}", f"train.validate_every={count // 5}"),
        *(f"learner.anneal={2 * count // 5}", f"learner.first_stage={count // 5}"),
    )


def _sizes(preset: str, scale: Scale) -> tuple[str, ...]:
    learner = preset.removesuffix("-paper").removesuffix("-emo")
    return _FULL_SIZES.get(learner, ()) if scale.name == "paper" else ()


def _textures(scale: Scale) -> tuple[str, ...]:
    """Textures are trained on in the paper; where there are too few of their classes, they are a test."""
    return tuple(world for world in scale.outside if world == TEXTURES)


def _rates_of(preset: str, scale: Scale, n_shot: int) -> str | None:
    """On two cores a grid for each of so many methods would take days: on pictures all take MAML's rates.

    ANIL and Meta-SGD have chosen theirs for T1 (and each with memory takes those of its base).
    """
    own = preset.removesuffix("-emo") in TUNED
    return None if own or not scale.base_rates else _name("maml", "mixed", n_shot)


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
        Contrast(f"{name}{LONGER} vs {base}{LONGER}", f"{name}{LONGER}", f"{base}{LONGER}")
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
    for test in _textures(scale):
        yield Contrast(f"{first} vs {base}, {test}", first, second, test=test)
    if cell in scale.costs and base in scale.costs:
        first += IN_EQUAL_TIME
        second += "" if base == "maml" else IN_EQUAL_TIME  # the others have its time
        yield Contrast(f"{first} vs {second}", first, second)


def _pairs() -> Iterator[tuple[str, str, Expectation]]:
    """What the paper sets against what: ARML with memory, every learner with memory, ARML and HSML."""
    for cell in ("arml-emo-paper", "arml-emo"):
        for base in ("arml", "maml"):
            yield cell, base, "better"
    for learner in LEARNERS:
        if learner != "arml":
            yield f"{learner}-emo", learner, "shown"
    yield "arml", "maml", "better"
    yield "hsml", "maml", "better"
    # Slots or gates: two ways to tell kinds of tasks apart.
    for learner in ("hsml", "arml"):
        yield "maml-emo", learner, "shown"


def _paper(cell: str, base: str, world: str, n_shot: int) -> float | None:
    """The paper's difference in points, where it has both."""
    sets = {"mixed": ("Bird", "Texture", "Aircraft", "Fungi"), "narrow": ("miniImageNet",)}
    names = {**LEARNERS, "arml-emo": "ARML+EMO", "arml-emo-paper": "ARML+EMO"}
    if cell not in names or world not in sets:
        return None
    table = published.T7 if n_shot == 1 else published.T8
    first, second = (
        sum(table.mean(name, method=names[method]) for name in sets[world]) / len(sets[world])
        for method in (cell, base)
    )
    return round(first - second, 2)


T7 = Entry(
    "T7",
    "Comparison with other learners, Conv-4, 1-shot",
    "ARML + EMO is the best on every data set (but MUSML on Texture).",
    published.T7,
    lambda scale: _cells(scale, 1),
    lambda scale: _contrasts(scale, 1),
    "forest",
)
T8 = Entry(
    "T8",
    "Comparison with other learners, Conv-4, 5-shot",
    "ARML + EMO is the best on every data set.",
    published.T8,
    lambda scale: _cells(scale, 5),
    lambda scale: _contrasts(scale, 5),
    "forest",
)

_RESNET = ("model.name=resnet12", "model.channels=wide")
_RESNET_SMOKE = ("model.name=resnet12", "train.iterations=2", "train.tasks=1", "learner.order=1")


def _t9_cells(scale: Scale) -> tuple[Cell, ...]:
    small = scale.name == "smoke"
    worlds, shots = (("narrow",), (1,)) if small else (("narrow", "tiered"), (1, 5))
    presets = {
        "anil": "ANIL",
        "anil-emo-paper": "ANIL + EMO (literal)",
        "arml": "ARML",
        "arml-emo-paper": "ARML + EMO (literal)",
        "arml-emo": "ARML + EMO (ours)",
    }
    return tuple(
        Cell(
            f"{preset} on {world}{suffix(n_shot)}",
            f"{title}, {world}{suffix(n_shot)}",
            preset,
            "emo" if "-emo" in preset else "base",
            options=_RESNET_SMOKE if small else (*_RESNET, *_sizes(preset, scale)),
            world=world,
            n_shot=n_shot,
        )
        for world in worlds
        for n_shot in shots
        for preset, title in presets.items()
        if not (small and preset.startswith("arml"))
    )


def _t9_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    names = [cell.name for cell in _t9_cells(scale)]
    pairs = [
        (name, name.replace("-emo-paper", "").replace("-emo", ""))
        for name in names
        if "-emo" in name
    ]
    return tuple(Contrast(f"{cell} vs {base}", cell, base, "better") for cell, base in pairs)


T9 = Entry(
    "T9",
    "ResNet-12 on miniImageNet and tieredImageNet",
    "ARML + EMO is 0.3 to 1.5 points above HVM, the best before it; ARML alone is not reported.",
    published.T9,
    _t9_cells,
    _t9_contrasts,
    "forest",
    scales=("smoke/pictures", "paper/pictures"),
    note="The recipe is not given; SNAIL to HVM are cited by the paper and not run here.",
)

COMPARISONS = (T7, T8, T9)
