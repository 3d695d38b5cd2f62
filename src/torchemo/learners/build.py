"""From options to learners."""

from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.core.types import Model, TaskShape
from torchemo.learners import LEARNERS
from torchemo.learners.learner import Learner


def build_learner(part: Part, model: Model, tasks: TaskShape) -> Learner:
    """Make the learner that a configuration names, for a network and such tasks."""
    kind, options = LEARNERS.resolve(part)
    learner: Learner = kind.build(options, model, tasks)
    if getattr(options, "visits", 1) > 1 and not getattr(learner, "takes_visits", False):
        raise ConfigError(
            f"learner.visits: {learner.title} does not train on visits of tasks that come back.",
            hint="Leave it out, or use maml, fomaml, anil, boil, meta-sgd or proto-maml.",
        )
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
