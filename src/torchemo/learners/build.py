"""From options to learners."""

from torchemo.config.registry import Part
from torchemo.core.types import Model, TaskShape
from torchemo.learners import LEARNERS
from torchemo.learners.learner import Learner


def build_learner(part: Part, model: Model, tasks: TaskShape) -> Learner:
    """Make the learner that a configuration names, for a network and such tasks."""
    kind, options = LEARNERS.resolve(part)
    learner: Learner = kind.build(options, model, tasks)
    return learner


def learner_title(part: Part) -> str:
    """Name the learner that a configuration names, without building it.

    A learner's class has its name as ``title``; where the name depends on options, ``title_of(options)``
    returns it.
    """
    kind, options = LEARNERS.resolve(part)
    if hasattr(kind, "title_of"):
        return str(kind.title_of(options))
    title = getattr(kind, "title", None)
    return title if isinstance(title, str) else part.name
