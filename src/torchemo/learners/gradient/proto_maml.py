"""Proto-MAML (Triantafillou et al., Meta-Dataset, ICLR 2020): a head made of the support set."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch

from torchemo.core.errors import ConfigError
from torchemo.core.prototypes import class_means
from torchemo.core.types import Batch, Model, Params, Start, TaskShape
from torchemo.learners.gradient.base import GradientLearner, How
from torchemo.learners.gradient.loop import LoopOptions
from torchemo.learners.learner import Fitted, Traits


@final
@dataclass(frozen=True)
class ProtoMAML(GradientLearner):
    """MAML whose head starts as the prototypical classifier: ``W_c = 2 p_c``, ``b_c = -||p_c||^2``.

    p_c is the mean support feature of class c. The head is not a meta-parameter, so it has no outer gradient
    and a memory of outer gradients is body-only; relabelling a task changes nothing. Any number of classes.

    Args:
        loop: The inner loop (``adapts = "head"`` is Proto-ANIL).
        n_way: Classes of a task; None takes the largest support label.
    """

    title: ClassVar[str] = "Proto-MAML"

    n_way: int | None = None

    def __post_init__(self) -> None:
        if len(self.model.head) != 2:
            raise ConfigError(
                f"Proto-MAML needs a head with weight and bias, the model names {self.model.head}."
            )

    @classmethod
    def build(cls, options: LoopOptions, model: Model, tasks: TaskShape) -> "ProtoMAML":
        """Make the learner; regression has no classes and is refused."""
        if tasks.kind != "classification":
            raise ConfigError("Proto-MAML needs classes; these tasks are regression.")
        if options.shared_row:
            raise ConfigError(
                "learner.shared_row: the head of Proto-MAML is made of the support set, not learned.",
                hint="Leave it out.",
            )
        return cls(options.loop(model, tasks), n_way=tasks.n_out)

    @property
    def traits(self) -> Traits:
        """Its start reads support labels."""
        return super().traits._replace(reads_labels_at_start=True)

    def init(self, generator: torch.Generator) -> Params:
        """Draw the body's parameters."""
        theta = self.model.init(generator)
        return {name: p for name, p in theta.items() if name not in self.model.head}

    def inner(self, start: Start, support: Batch, how: How) -> Fitted:
        """Build the head from the support set, then take gradient steps on all tensors."""
        headed = {**start.theta, **self.head(start.theta, support, order=how.order)}
        return super().inner(start._replace(theta=headed), support, how)

    def head(self, theta: Params, support: Batch, *, order: int = 2) -> Params:
        """Return ``W = 2 p`` and ``b = -||p||^2``; detached unless second order."""
        with torch.set_grad_enabled(order == 2):
            features = self.model.at(0, stored=order == 0).features(theta, support.x)
            n_way = int(support.y.max()) + 1 if self.n_way is None else self.n_way
            prototypes = class_means(features, support.y, n_way=n_way)
            weight, bias = self.model.head
            return {weight: 2 * prototypes, bias: -prototypes.square().sum(-1)}

    @property
    def keeps_rows(self) -> bool:
        """There is no learned head; recalled head rows take their mean."""
        return False

    def for_classes(self, n_way: int) -> "ProtoMAML":
        """Return this learner for tasks of ``n_way`` classes: its head is made per task."""
        return replace(self, loop=self.loop.for_classes(n_way), n_way=n_way)
