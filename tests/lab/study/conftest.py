"""Tiny studies of regression tasks, and the command in this process."""

from dataclasses import replace

import pytest

from tests.apps.cli.conftest import torchemo  # noqa: F401
from torchemo.lab.study.entry import Cell, Contrast, Entry
from torchemo.lab.study.paper.published import Published
from torchemo.lab.study.plan import plan
from torchemo.lab.study.run import StudyRun
from torchemo.lab.study.scales import SCALES

TINY = replace(
    SCALES["smoke/regression"],
    options=(
        *("train.steps=3", "train.tasks=2", "train.validate_every=1"),
        *("train.validation_tasks=2", "data.n_query=3", "model.hidden=[3]", "learner.steps=1"),
    ),
    test_tasks=6,
    diagnosed=4,
)

CELLS = (
    Cell("maml", "MAML", "maml", "base"),
    Cell("maml-emo-paper", "MAML + EMO", "maml-emo-paper", "memory"),
)
CONTRASTS = (Contrast("gain", "maml-emo-paper", "maml", "better", paper=2.0, claims=("C1",)),)


def tiny_entry(cells=CELLS, contrasts=CONTRASTS, name="T1"):
    """An entry of two cells; it borrows the name of one that exists, for its page."""
    return Entry(
        name, "tiny", "says", Published("a\n1"), lambda s: cells, lambda s: contrasts, "forest"
    )


def tiny_study(**options):
    """Two cells, one seed, no controls unless asked for."""
    cells = options.pop("cells", CELLS)
    contrasts = options.pop("contrasts", CONTRASTS)
    settings = {"controls": False, "seeds": (0,), **options}
    return plan(tiny_entry(cells, contrasts), TINY, **settings)


@pytest.fixture
def run_tiny(tmp_path):
    """Return ``run_tiny(**options) -> (StudyRun, result)`` in one folder."""

    def run(watch=None, **options):
        made = StudyRun(tiny_study(**options), tmp_path / "out", workers=1)
        if watch is not None:
            made.watch = watch
        return made, made.run()

    return run
