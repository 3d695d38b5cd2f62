"""What all learners with an inner loop share: fit by gradient steps, predict with the adapted network."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.losses import balanced_cross_entropy
from torchemo.core.tree import leaf, select, tree_map, with_rows
from torchemo.core.types import Batch, Model, Params, Start, TaskShape
from torchemo.learners.gradient.inner import task_gradients
from torchemo.learners.gradient.loop import InnerLoop, LoopOptions
from torchemo.learners.learner import Fitted, Traits
from torchemo.learners.returning import fit_visits
from torchemo.memory.bound import BoundMemory
from torchemo.models.alone import reads_support
from torchemo.models.trunk import OnFeatures


class How(NamedTuple):
    """How the inner steps of a fit are taken, as `InnerLoop.run` takes it; order 0 keeps no graph."""

    memory: BoundMemory | None
    steps: int | None
    order: int


@dataclass(frozen=True)
class GradientLearner:
    """A learner that begins at shared parameters and takes gradient steps on the support loss."""

    title: ClassVar[str] = ""
    Options: ClassVar[type[LoopOptions]] = LoopOptions
    fixed: ClassVar[dict[str, Any]] = {}
    """What a paper fixes of its inner loop: further arguments of `LoopOptions.loop`."""

    loop: InnerLoop

    @classmethod
    def build(cls, options: Any, model: Model, tasks: TaskShape) -> "GradientLearner":
        """Make the learner for a network and such tasks; it takes options of its own by their names."""
        return cls(options.loop(model, tasks, **cls.fixed), **options.own())

    @property
    def model(self) -> Model:
        """Its network."""
        return self.loop.model

    @property
    def steps(self) -> int:
        """Inner steps while training."""
        return self.loop.steps

    @property
    def order(self) -> int:
        """Order of the meta-gradient: 2 is exact, 1 detaches inner gradients."""
        return self.loop.order

    @property
    def traits(self) -> Traits:
        """Exact unless first order."""
        second = self.order == 2
        return Traits(exact_meta_gradient=second, second_order=second)

    def adapted(self, theta: Params) -> list[str]:
        """Return the names of the tensors that inner steps move."""
        return self.loop.names(theta)

    def init(self, generator: torch.Generator) -> Params:
        """Draw the network's parameters."""
        return self.loop.model.init(generator)

    def fit(
        self,
        start: Start,
        support: Batch,
        *,
        memory: BoundMemory | None = None,
        steps: int | None = None,
        graph: bool = True,
    ) -> Fitted:
        """Take gradient steps on the support loss (Eq. 2; Eq. 7 with a memory of gradients)."""
        how, visits = How(memory, steps, self.order if graph else 0), self.loop.visits
        if visits == 1 or how.order == 0 or memory is not None:
            return self.inner(start, support, how)
        return fit_visits(
            lambda part, bound: self.inner(start, part, how._replace(memory=bound)),
            support,
            visits=visits,
            head=self.model.head,
        )

    @property
    def takes_visits(self) -> bool:
        """Whether a support set may be taken as several visits: all of them have a part in the loss."""
        return type(self).loss is GradientLearner.loss and not hasattr(self, "rows")

    def inner(self, start: Start, support: Batch, how: How) -> Fitted:
        """Take the inner steps of `fit`."""
        return self.loop.run(start, support, **how._asdict())

    def predict(self, fitted: Fitted, x: Tensor, *, step: int | None = None) -> Tensor:
        """Answer with the network after inner step ``step``, by default the last."""
        chosen = len(fitted.path) - 1 if step is None else step
        return self.predict_path(fitted, x, steps=[chosen])[0]

    def predict_path(self, fitted: Fitted, x: Tensor, *, steps: Sequence[int]) -> list[Tensor]:
        """Answer ``x`` with the parameters after each of the given numbers of inner steps."""
        return self.loop.outputs(fitted, x, steps=steps)

    def loss(self, fitted: Fitted, query: Batch) -> Float[Tensor, " task"]:
        """Return the query loss after the last step (Eq. 3)."""
        return self.loop.losses(fitted, query)

    def query_gradient(self, fitted: Fitted, query: Batch) -> Params:
        """Differentiate the query loss at theta_S in theta_S itself."""
        loop = self.loop
        end = tree_map(leaf, fitted.path[-1])
        with torch.enable_grad():
            losses = loop.loss(loop.model.at(loop.steps)(end, query.x), query.y)
            return task_gradients(losses, select(end, loop.names(end)))

    def for_classes(self, n_way: int) -> Self:
        """Return this learner for tasks of ``n_way`` classes; see `params_for`."""
        return replace(self, loop=self.loop.for_classes(n_way))

    @property
    def keeps_rows(self) -> bool:
        """Whether trained rows of the head stay for tasks with another number of classes.

        Labels are random in training, so no row stands for a class. Where the head alone adapts, all rows
        start at their mean: such a head answers like a head of zeros, and answers do not depend on the order
        of the classes. Where the body adapts, equal rows would send it no gradient in the first step, so
        trained rows stay, and only new ones start at the mean.
        """
        return self.loop.adapts != "head"

    def params_for(self, params: Params, n_way: int) -> Params:
        """Return the parameters for tasks of ``n_way`` classes; see `keeps_rows`."""
        rows, keep = set(self.per_class(params)), self.keeps_rows
        return {n: with_rows(p, n_way, keep=keep) if n in rows else p for n, p in params.items()}

    def per_class(self, params: Params) -> list[str]:
        """Return the names of meta-parameters with a row for every class."""
        return [name for name in self.model.head if name in params]

    def balanced(self) -> Self:
        """Return this learner with a loss in which classes weigh alike, however many examples they have."""
        return replace(self, loop=replace(self.loop, loss=balanced_cross_entropy))

    def followed(self, fitted: Fitted, support: Batch, *, rates: Params | None = None) -> Params:
        """Return gradient, anchor and Gauss-Newton factors half-way along the inner path."""
        values = self.loop.followed(fitted, support, rates=rates)
        parts = next(iter(values.values())).shape[2] - 1
        extra = fitted.extra_values or {}
        return values | {
            n: torch.stack((v, *[torch.zeros_like(v)] * parts), 1)[:, None]
            for n, v in extra.items()
        }

    def on_features(self) -> "GradientLearner | None":
        """Return this learner for features as inputs; None if its trunk changes during the inner loop.

        The trunk changes with running statistics, and where a query is normalised with the support set.
        """
        model = self.loop.model
        if self.loop.adapts != "head" or model.buffers or reads_support(model):
            return None
        return replace(self, loop=replace(self.loop, model=OnFeatures(model)))
