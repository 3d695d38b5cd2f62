"""R2, R3, R6, R7: our reading on seeds and test tasks that had no part in choosing it. Not in the paper."""

from dataclasses import replace
from types import MappingProxyType

from torchemo.lab.study.entry import Cell, Contrast, Entry
from torchemo.lab.study.paper.cells import LEARNERS, base_cell, gain, our_cell
from torchemo.lab.study.paper.published import Published
from torchemo.lab.study.scales import Scale, outer_rate

_PICTURES = ("learner.inner_lr=0.1", 0.006)
_PICTURE_RANGE = ("learner.rate_init=[0.05, 0.15]", 0.006)
_CURVES = "learner.inner_lr=0.003"
_CURVE_RANGE = ("learner.rate_init=[0.001, 0.005]", 0.006)

RATES: MappingProxyType[str, dict[str, tuple[str, float]]] = MappingProxyType(
    {
        "cpu/pictures": {
            **dict.fromkeys(("maml", "maml-emo", "anil", "anil-emo"), _PICTURES),
            **dict.fromkeys(("meta-sgd", "meta-sgd-emo"), _PICTURE_RANGE),
        },
        "cpu/regression": {
            "maml": (_CURVES, 0.012),
            **dict.fromkeys(("maml-emo", "anil", "anil-emo"), (_CURVES, 0.024)),
            **dict.fromkeys(("meta-sgd", "meta-sgd-emo"), _CURVE_RANGE),
        },
    }
)
"""What T1 chose with its first seed on validation tasks: inner rate and outer rate, by scale and preset."""


def _cells(scale: Scale) -> tuple[Cell, ...]:
    found: list[Cell] = []
    for learner in LEARNERS:
        found.append(base_cell(learner, tests=scale.outside))
        found.append(our_cell(learner, tests=scale.outside))
    return tuple(replace(cell, grid=(chosen_rates(scale, cell.preset),)) for cell in found)


def chosen_rates(scale: Scale, preset: str) -> tuple[str, ...]:
    """Return the rates that T1 chose for a preset."""
    known = RATES.get(f"{scale.name}/{scale.tasks}")
    if known is None:  # scale smoke, which chooses nothing that matters
        return scale.own_grids.get(preset.removesuffix("-emo"), scale.grid)[0]
    inner, outer = known[preset]
    return (inner, *outer_rate(outer))


def _contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found: list[Contrast] = []
    for learner in LEARNERS:
        found.append(gain(learner, "-emo", claims=("C1",)))
        found += [
            Contrast(f"{learner}-emo vs {learner}, {test}", f"{learner}-emo", learner, test=test)
            for test in scale.outside
        ]
    return tuple(found)


R2 = Entry(
    "R2",
    "Our reading on fresh seeds and test tasks",
    "Not in the paper: does what T1 shows of our reading hold where nothing about it was chosen?",
    Published(""),
    _cells,
    _contrasts,
    "forest",
    scales=("smoke/pictures", "smoke/regression", "cpu/pictures", "cpu/regression"),
    note="Rates are those that T1 chose. Seeds and test tasks are others than those of all other studies,"
    " whose results were seen while our reading was made; families and test classes are the same. How many"
    " seeds was settled before the first was run.",
    seeds=(3, 4, 5, 6, 7),
    test_seed=1,
)

SILENT = ("emo.retrieval.familiar=0.9",)
"""Tasks unlike nine tenths of those of training are evaluated without recall (`memory.familiarity`)."""


def _silent_cells(scale: Scale) -> tuple[Cell, ...]:
    return tuple(
        replace(cell, options=SILENT) if cell.role == "emo" else cell for cell in _cells(scale)
    )


R3 = Entry(
    "R3",
    "Our reading, silent on unfamiliar tasks, on fresh seeds and test tasks",
    "Not in the paper: does a memory that keeps silent on tasks unlike those of training still cost there,"
    " and is its gain left?",
    Published(""),
    _silent_cells,
    _contrasts,
    "forest",
    scales=("smoke/pictures", "cpu/pictures"),
    note="As R2, with seeds and test tasks of its own: R2's losses outside are why it was made. The share of"
    " tasks that count as familiar was chosen on validation tasks with R2's runs. How many seeds was settled"
    " before the first was run.",
    seeds=(8, 9, 10, 11, 12),
    test_seed=2,
)

TRUSTED = (*SILENT, "emo.value.tensors=all", "emo.retrieval.trust=0.0")
"""Slots hold whole networks; those that are not shown to help on validation tasks keep silent
(`torchemo.memory.trust`)."""
LONGER = 4
"""How many times the usual outer steps show what longer training does."""
_SHORTER = "anil shorter"


def longer_options(scale: Scale, *, times: int = LONGER) -> tuple[str, str]:
    """Train that many times as long, with as many validations."""
    steps = times * scale.iterations
    return f"train.iterations={steps}", f"train.validate_every={steps // 5}"


def _trusted_cells(scale: Scale) -> tuple[Cell, ...]:
    longer = longer_options(scale)
    base = replace(base_cell("anil", tests=scale.outside), grid=(chosen_rates(scale, "anil"),))
    ours = our_cell("anil", tests=scale.outside)
    return (
        replace(base, options=longer),
        replace(base, name=_SHORTER, title="ANIL, a quarter of the outer steps"),
        replace(
            ours,
            title=f"{ours.title}, whole networks, trusted slots",
            options=(*longer, *TRUSTED),
            grid=(chosen_rates(scale, "anil-emo"),),
        ),
    )


def _trusted_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found = [replace(c, claims=()) for c in _contrasts(scale) if c.cell == "anil-emo"]
    # Longer training does the learner no good (R5), so that it is also set against what it was before.
    shorter = [
        replace(c, name=c.name.replace("vs anil", f"vs {_SHORTER}"), against=_SHORTER)
        for c in found
    ]
    return (*found, *shorter)


R6 = Entry(
    "R6",
    "Slots of whole networks that earn their trust, on fresh seeds and test tasks",
    "Not in the paper: a network for each set gains far more on birds and flowers than our slots, and loses"
    " on aircraft and fungi (R5). Do slots of whole networks reach more of it, where those that are not shown"
    " to help on validation tasks keep silent?",
    Published(""),
    _trusted_cells,
    _trusted_contrasts,
    "forest",
    scales=("smoke/pictures", "cpu/pictures"),
    note="With ANIL, as the quickest, trained four times as long as elsewhere, with the rates that T1 chose."
    " Seeds and test tasks are others than those of all other studies; R5's test figures had been seen when"
    " it was made, and all choices were made on validation tasks with one seed. How many seeds was settled"
    " before the first was run.",
    seeds=(18, 19, 20, 21, 22),
    test_seed=4,
)

AFTERWARDS = (*TRUSTED, "emo.memory.afterwards=0.5", "emo.value.recall_dropout=0.0")
"""The learner learns for the first half of the training, slots for the second (`Policy.afterwards`)."""


def _slower(rates: tuple[str, ...]) -> tuple[str, ...]:
    """Give slots a third of the outer rate: they begin at a network that has learned."""
    others = (rate for rate in rates if not rate.startswith("emo.memory.slot_lr="))
    return (*others, "emo.memory.slot_lr=0.002")


def _afterwards_cells(scale: Scale) -> tuple[Cell, ...]:
    longer = longer_options(scale, times=2)
    # With as many as elsewhere a gain of three points on a quarter of them is often not shown.
    judged = f"train.validation_tasks={3 * scale.validation_tasks}"
    return tuple(
        replace(
            cell,
            title=f"{cell.title}, afterwards",
            options=(*longer, *AFTERWARDS, judged),
            grid=tuple(_slower(rates) for rates in cell.grid or ()),
        )
        if cell.role == "emo"
        else cell
        for cell in _cells(scale)
    )


R7 = Entry(
    "R7",
    "Slots that learn after the learner, on fresh seeds and test tasks",
    "Not in the paper: what aircraft lose in R6 they lose in the bare initialisation, which has learned with"
    " slots beside it. What do slots gain that begin when the learner has learned, and leave it as it is?",
    Published(""),
    _afterwards_cells,
    _contrasts,
    "forest",
    scales=("smoke/pictures", "cpu/pictures"),
    note="The learner learns as without memory, with the rates that T1 chose; then it rests, and slots of"
    " whole networks learn for as many outer steps. So the control without memory is the learner trained"
    " twice as long, and one slot is one network that goes on from there. Slots that are not shown to help on"
    " validation tasks keep silent, on unfamiliar tasks all do. Seeds and test tasks are others than those of"
    " all other studies; R6's test figures had been seen when it was made, and all choices were made on"
    " validation tasks with one seed. How many seeds was settled before the first was run.",
    seeds=(23, 24, 25, 26),
    test_seed=5,
)
