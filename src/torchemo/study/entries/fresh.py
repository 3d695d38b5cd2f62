"""R2: our reading on seeds and test tasks that had no part in choosing it. Not in the paper."""

from torchemo.study.entries.methods import LEARNERS, base_cell, emo_cells, gain, is_ours
from torchemo.study.entry import Cell, Contrast, Entry
from torchemo.study.published import Published
from torchemo.study.scales import Scale


def _cells(scale: Scale) -> tuple[Cell, ...]:
    found: list[Cell] = []
    for learner in LEARNERS:
        found.append(base_cell(learner, tests=scale.outside))
        found += [cell for cell in emo_cells(learner, tests=scale.outside) if is_ours(cell)]
    return tuple(found)


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
    "not in the paper: does what T1 shows of our reading hold where nothing about it was chosen?",
    Published(""),
    _cells,
    _contrasts,
    "forest",
    scales=("smoke/pictures", "cpu/pictures"),
    note="Rates are those that T1 chose for the base learners, the first of the grid. Seeds and test tasks"
    " are others than those of T1 and R1, after whose results the preset was chosen; test classes are not."
    " How many seeds was settled before the first was run.",
    seeds=(3, 4, 5, 6, 7),
    test_seed=1,
    tunes=False,
)
