"""R2, R3, R6, R7: offsets on seeds and test tasks that had no part in choosing them. Not in the paper."""

from dataclasses import replace
from types import MappingProxyType

from torchemo.lab.study.entry import Cell, Contrast, entry, versus
from torchemo.lab.study.paper.cells import LEARNERS, base_cell, gain, memory_cell
from torchemo.lab.study.scales import Scale, outer_rate

_IMAGES = ("learner.inner_lr=0.1", 0.006)
_IMAGE_RANGE = ("learner.rate_init=[0.05, 0.15]", 0.006)
_CURVES = "learner.inner_lr=0.003"
_CURVE_RANGE = ("learner.rate_init=[0.001, 0.005]", 0.006)

RATES: MappingProxyType[str, dict[str, tuple[str, float]]] = MappingProxyType(
    {
        "cpu/images": {
            **dict.fromkeys(("maml", "maml-offsets", "anil", "anil-offsets"), _IMAGES),
            **dict.fromkeys(("meta-sgd", "meta-sgd-offsets"), _IMAGE_RANGE),
        },
        "cpu/regression": {
            "maml": (_CURVES, 0.012),
            **dict.fromkeys(("maml-offsets", "anil", "anil-offsets"), (_CURVES, 0.024)),
            **dict.fromkeys(("meta-sgd", "meta-sgd-offsets"), _CURVE_RANGE),
        },
    }
)
"""What T1 chose with its first seed on validation tasks: inner rate and outer rate, by scale and cell."""


def _cells(scale: Scale) -> tuple[Cell, ...]:
    found: list[Cell] = []
    for learner in LEARNERS:
        found.append(base_cell(learner, tests=scale.outside))
        found.append(memory_cell(learner, "-offsets", tests=scale.outside))
    return tuple(replace(cell, grid=(chosen_rates(scale, cell.name),)) for cell in found)


def chosen_rates(scale: Scale, cell: str) -> tuple[str, ...]:
    """Return the rates that T1 chose for a cell."""
    known = RATES.get(f"{scale.name}/{scale.tasks}")
    if known is None:  # scale smoke, which chooses nothing that matters
        return scale.own_grids.get(cell.removesuffix("-offsets"), scale.grid)[0]
    inner, outer = known[cell]
    return (inner, *outer_rate(outer))


def _contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found: list[Contrast] = []
    for learner in LEARNERS:
        cell = f"{learner}-offsets"
        found.append(gain(learner, "-offsets", claims=("C1",)))
        found += [versus(cell, learner, test=test) for test in scale.outside]
    return tuple(found)


R2 = entry("R2", _cells, _contrasts)

FAMILIAR = ("memory.skip_unfamiliar=0.9",)
"""Tasks unlike nine tenths of those of training skip recall (`torchemo.memory.selective`)."""


def _familiar_cells(scale: Scale) -> tuple[Cell, ...]:
    return tuple(
        replace(cell, options=FAMILIAR) if cell.role == "memory" else cell for cell in _cells(scale)
    )


R3 = entry("R3", _familiar_cells, _contrasts)

VALIDATED = (*FAMILIAR, "memory.tensors=all", "memory.skip_unhelpful=0.0")
"""Slots are for all parameters; tasks whose slots failed validation skip recall
(`torchemo.memory.selective`)."""
LONGER = 4
"""How many times the usual outer steps show what longer training does."""
_SHORTER = "anil shorter"


def longer_options(scale: Scale, *, times: int = LONGER) -> tuple[str, str]:
    """Train that many times as long, with as many validations."""
    steps = times * scale.steps
    return f"train.steps={steps}", f"train.validate_every={steps // 5}"


def _validated_cells(scale: Scale) -> tuple[Cell, ...]:
    longer = longer_options(scale)
    base = replace(base_cell("anil", tests=scale.outside), grid=(chosen_rates(scale, "anil"),))
    ours = memory_cell("anil", "-offsets", tests=scale.outside)
    return (
        replace(base, options=longer),
        replace(base, name=_SHORTER, title="ANIL, a quarter of the outer steps"),
        replace(
            ours,
            title=f"{ours.title}, for all parameters, that passed validation",
            options=(*longer, *VALIDATED),
            grid=(chosen_rates(scale, "anil-offsets"),),
        ),
    )


def _validated_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found = [replace(c, claims=()) for c in _contrasts(scale) if c.cell == "anil-offsets"]
    # Longer training does the learner no good (R5), so that it is also set against what it was before.
    shorter = [
        replace(c, name=c.name.replace("vs anil", f"vs {_SHORTER}"), against=_SHORTER)
        for c in found
    ]
    return (*found, *shorter)


R6 = entry("R6", _validated_cells, _validated_contrasts)

AFTER = (*VALIDATED, "memory.recall_dropout=0.0")
"""What slots are that train after the learner; its steps are then followed by as many of theirs."""


def _slower(rates: tuple[str, ...]) -> tuple[str, ...]:
    """Give slots a third of the outer rate: they begin at a network that has learned."""
    others = (rate for rate in rates if not rate.startswith("memory.slot_lr="))
    return (*others, "memory.slot_lr=0.002")


def _after_cells(scale: Scale) -> tuple[Cell, ...]:
    after = (f"memory.steps={scale.steps}", f"train.validate_every={2 * scale.steps // 5}")
    # With as many as elsewhere a gain of three points on a quarter of them is often not significant.
    judged = f"train.validation_tasks={3 * scale.validation_tasks}"
    return tuple(
        replace(
            cell,
            title=f"{cell.title}, after the learner",
            options=(*after, *AFTER, judged),
            grid=tuple(_slower(rates) for rates in cell.grid or ()),
        )
        if cell.role == "memory"
        else cell
        for cell in _cells(scale)
    )


R7 = entry("R7", _after_cells, _contrasts)
