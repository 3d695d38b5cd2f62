"""Proto-MAML (Triantafillou et al., Meta-Dataset, ICLR 2020): a head made of the support set."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Batch, Params, Start
from torchemo.learners.gradient.inner import Adapted
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.learner import Traits, query_rows
from torchemo.memory.emo import Bound
from torchemo.memory.keys.encoder import class_means


@final
@dataclass(frozen=True)
class ProtoMAML:
    """MAML whose head starts as the prototypical classifier: ``W_c = 2 p_c``, ``b_c = -||p_c||^2``.

    p_c is the mean support feature of class c. The head is not a meta-parameter, so there is no head row
    and the memory of outer rows is body-only; relabelling a task changes nothing. Any number of classes.

    Args:
        loop: The inner loop (``adapts = "head"`` is Proto-ANIL).
        n_way: Classes of a task; None takes the largest support label.
    """

    loop: InnerLoop
    n_way: int | None = None

    def __post_init__(self) -> None:
        if len(self.loop.model.head) != 2:
            raise ConfigError(
                f"Proto-MAML needs a head with weight and bias, the model names {self.loop.model.head}."
            )

    @property
    def traits(self) -> Traits:
        """Its start reads support labels."""
        second = self.loop.order == 2
        return Traits(exact_meta_gradient=second, second_order=second, reads_labels_at_start=True)

    def init(self, generator: torch.Generator) -> Params:
        """Draw the body's parameters."""
        theta = self.loop.model.init(generator)
        return {name: p for name, p in theta.items() if name not in self.loop.model.head}

    def start(self, params: Params, support: Batch, *, base: Params) -> Start:
        """Begin at the shared body; the head is built where the task is adapted."""
        return Start(base)

    def adapt(
        self,
        start: Start,
        support: Batch,
        *,
        bound: Bound | None = None,
        steps: int | None = None,
        order: int | None = None,
    ) -> Adapted:
        """Build the head from the support set, then take gradient steps on all tensors."""
        order = self.loop.order if order is None else order
        headed = {**start.theta, **self.head(start.theta, support, order=order)}
        return self.loop.run(
            start._replace(theta=headed), support, bound=bound, steps=steps, order=order
        )

    def head(self, theta: Params, support: Batch, *, order: int = 2) -> Params:
        """Return ``W = 2 p`` and ``b = -||p||^2``; detached unless second order."""
        with torch.set_grad_enabled(order == 2):
            features = self.loop.model.at(0, stored=order == 0).features(theta, support.x)
            n_way = int(support.y.max()) + 1 if self.n_way is None else self.n_way
            prototypes = class_means(features, support.y, n_way=n_way)
            weight, bias = self.loop.model.head
            return {weight: 2 * prototypes, bias: -prototypes.square().sum(-1)}

    def outer(
        self, start: Start, adapted: Adapted, query: Batch, *, leaves: Sequence[Tensor]
    ) -> tuple[Float[Tensor, " task"], list[Tensor]]:
        """Differentiate the query loss in the body."""
        return query_rows(self.loop, adapted, query, leaves=leaves)
