"""What all learners with an inner loop share: fit by gradient steps, predict with the adapted network."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.tree import leaf, select, tree_map
from torchemo.core.types import Batch, Model, Params, Start, TaskShape
from torchemo.learners.gradient.inner import task_gradients
from torchemo.learners.gradient.loop import InnerLoop, LoopOptions
from torchemo.learners.learner import Fitted, Traits
from torchemo.memory.interface import BoundMemory
from torchemo.models.alone import reads_support
from torchemo.models.trunk import OnFeatures


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
        return self.inner(start, support, memory, steps, self.order if graph else 0)

    def inner(
        self,
        start: Start,
        support: Batch,
        memory: BoundMemory | None,
        steps: int | None,
        order: int,
    ) -> Fitted:
        """Take the inner steps of `fit`; order 0 keeps no graph."""
        return self.loop.run(start, support, memory=memory, steps=steps, order=order)

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

    def on_features(self) -> "GradientLearner | None":
        """Return this learner for features as inputs; None if its trunk changes during the inner loop.

        The trunk changes with running statistics, and where a query is normalised with the support set.
        """
        model = self.loop.model
        if self.loop.adapts != "head" or model.buffers or reads_support(model):
            return None
        return replace(self, loop=replace(self.loop, model=OnFeatures(model)))
