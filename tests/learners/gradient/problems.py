"""Small tasks in float64 for the learners around MAML."""

import torch

from tests.laws.cases import MODEL, make_episode, make_params
from torchemo.config.run import LearnerConfig
from torchemo.core.tree import select
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.learners import MAML, InnerLoop
from torchemo.learners.build import build_learner
from torchemo.learners.gradient.inner import SGD
from torchemo.learners.learner import network_names
from torchemo.models import MLP

LOOP = InnerLoop(MODEL, steps=2, rule=SGD(0.5))
POINTS = TaskShape("regression", (2,), 1, n_shot=6)
PICTURES = TaskShape("classification", (3, 16, 16), 3)
LINE = MLP(1, n_in=2, hidden=(5,), activation="tanh", initializer="kaiming")


def vectors(name, **switches):
    """A learner on the law suite's classes of vectors."""
    shape = TaskShape("classification", (2,), 3)
    return build_learner(LearnerConfig(name=name, inner_lr=0.5, steps=2, **switches), MODEL, shape)


def points(name, **switches):
    """A learner on regression points."""
    return build_learner(LearnerConfig(name=name, inner_lr=0.1, steps=2, **switches), LINE, POINTS)


def point_episode(tasks=3):
    g = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(tasks, *shape, generator=g, dtype=torch.float64)  # noqa: E731
    return Episode(Batch(draw(6, 2), draw(6, 1)), Batch(draw(4, 2), draw(4, 1)))


def with_maml(learner):
    """Return parameters of ``learner``, and a MAML with those of its network."""
    params = make_params(learner)
    return params, MAML(learner.loop), select(params, network_names(params))


__all__ = ["LOOP", "make_episode", "make_params", "point_episode", "points", "vectors", "with_maml"]
