"""Small tasks in float64 for the learners around MAML."""

import torch

from tests.laws.cases import MODEL, make_episode, make_params, option_names
from torchemo.config.registry import Part
from torchemo.core.tree import select
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.learners import LEARNERS
from torchemo.learners.build import build_learner
from torchemo.learners.gradient.inner import SGD
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.maml import MAML
from torchemo.learners.learner import network_names
from torchemo.models import MLP

LOOP = InnerLoop(MODEL, steps=2, rule=SGD(0.5))
POINTS = TaskShape("regression", (2,), 1, n_shot=6)
IMAGES = TaskShape("classification", (3, 16, 16), 3)
LINE = MLP(1, n_in=2, hidden=(5,), activation="tanh", initializer="kaiming")


def learner_part(name, *, base="maml", **options):
    """A learner with those of the options that it has; the rest go to the learner underneath, if any."""
    assert options.keys() <= set().union(*(option_names(LEARNERS, n) for n in LEARNERS))
    known = option_names(LEARNERS, name)
    own = {n: value for n, value in options.items() if n in known}
    return Part(name, own | ({"base": learner_part(base, **options)} if "base" in known else {}))


def vectors(name, **options):
    """A learner on the law suite's classes of vectors."""
    shape = TaskShape("classification", (2,), 3)
    return build_learner(learner_part(name, inner_lr=0.5, steps=2, **options), MODEL, shape)


def points(name, **options):
    """A learner on regression points."""
    return build_learner(learner_part(name, inner_lr=0.1, steps=2, **options), LINE, POINTS)


def point_episode(tasks=3):
    g = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(tasks, *shape, generator=g, dtype=torch.float64)  # noqa: E731
    return Episode(Batch(draw(6, 2), draw(6, 1)), Batch(draw(4, 2), draw(4, 1)))


def loop_of(learner):
    """The inner loop of a learner, or of the one underneath (BMG)."""
    return getattr(learner, "base", learner).loop


def with_maml(learner):
    """Return parameters of ``learner``, and a MAML with those of its network."""
    params = make_params(learner)
    return params, MAML(loop_of(learner)), select(params, network_names(params))


__all__ = [
    "LOOP",
    "learner_part",
    "loop_of",
    "make_episode",
    "make_params",
    "point_episode",
    "points",
    "vectors",
    "with_maml",
]
