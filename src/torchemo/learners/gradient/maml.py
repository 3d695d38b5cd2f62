"""MAML: Model-Agnostic Meta-Learning (Finn, Abbeel, Levine, ICML 2017), second and first order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.types import Batch, Params, Start
from torchemo.learners.gradient.inner import Adapted
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.learner import Traits, query_rows
from torchemo.memory.emo import Bound


@final
@dataclass(frozen=True)
class MAML:
    """Meta-learn an initialisation from which a few gradient steps go far (Eq. 2, 3).

    All tasks begin at ``theta``; the outer gradient of a task is that of its query loss through the
    inner steps, ``prod_s (I - alpha H_s) grad L_Q(theta_S)``. With ``loop.order = 1`` it is FOMAML, with
    ``loop.adapts = "head"`` ANIL, with ``"body"`` BOIL.
    """

    loop: InnerLoop

    @property
    def traits(self) -> Traits:
        """Exact unless first order."""
        second = self.loop.order == 2
        return Traits(exact_meta_gradient=second, second_order=second)

    def init(self, generator: torch.Generator) -> Params:
        """Draw the network's parameters."""
        return self.loop.model.init(generator)

    def start(self, params: Params, support: Batch, *, base: Params) -> Start:
        """Begin at ``theta`` (plus what the memory adds)."""
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
        """Take gradient steps on the support loss (Eq. 2; Eq. 7 with EMO)."""
        return self.loop.run(start, support, bound=bound, steps=steps, order=order)

    def outer(
        self, start: Start, adapted: Adapted, query: Batch, *, leaves: Sequence[Tensor]
    ) -> tuple[Float[Tensor, " task"], list[Tensor]]:
        """Differentiate the query loss after the last step (Eq. 3)."""
        return query_rows(self.loop, adapted, query, leaves=leaves)


def fomaml(loop: InnerLoop) -> MAML:
    """First-order MAML: gradients are detached, so the outer gradient is ``grad L_Q(theta_S)``."""
    return MAML(replace(loop, order=1))
