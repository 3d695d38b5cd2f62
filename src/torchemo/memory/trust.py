"""Which slots help on classes that training has not seen: the others had better keep silent.

A slot of a kind of tasks with few classes learns these by heart: it gains on tasks of training and loses on
tasks of other classes. Validation tasks have other classes, so they tell the two apart.
"""

from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from torchemo.core.errors import ConfigError

BOUND = 1.645
"""Standard errors: a gain of nothing seems this large in one case of twenty."""


@final
class Trust(nn.Module):
    """Remember of every slot whether its recall is shown to gain on validation tasks.

    With recall weights a_bj and the gain d_b of task b (its score with recall minus that without), a slot's
    gain is ``g_j = sum_b a_bj d_b / sum_b a_bj``, with the standard error
    ``sqrt(sum_b a_bj^2 (d_b - g_j)^2) / sum_b a_bj``. A slot is trusted when its gain, less `BOUND` standard
    errors, is above ``least``; all are until they have been judged. A task is evaluated with its recall when
    at least half of its weight lies on trusted slots.

    Args:
        capacity: Slots of the memory.
        least: Gain that a slot must exceed, in shares of right answers or in squared error.
    """

    doubted: Tensor

    def __init__(self, capacity: int, *, least: float = 0.0) -> None:
        super().__init__()
        if capacity < 1:
            raise ConfigError(f"trust: a memory of {capacity} slots has none to judge.")
        self.least = least
        self.register_buffer("doubted", torch.zeros(capacity, dtype=torch.bool))

    def forward(
        self, slots: Int[Tensor, "task m"], weights: Float[Tensor, "task m"]
    ) -> Bool[Tensor, " task"]:
        """Return which tasks may use their recall; changes nothing."""
        doubt = (weights.detach() * self.doubted[slots]).sum(1)
        return doubt <= weights.detach().sum(1) / 2

    def judge(
        self,
        slots: Int[Tensor, "task m"],
        weights: Float[Tensor, "task m"],
        gains: Float[Tensor, " task"],
    ) -> None:
        """Judge all slots anew by the gains of tasks that recalled them with these weights."""
        shape = (len(slots), len(self.doubted))
        a = torch.zeros(shape, dtype=torch.float64).scatter_(1, slots, weights.detach().double())
        total = a.sum(0).clamp_min(torch.finfo(a.dtype).tiny)
        gain = (a * gains.double()[:, None]).sum(0) / total
        error = (a * (gains.double()[:, None] - gain)).square().sum(0).sqrt() / total
        self.doubted.copy_(~(gain - BOUND * error > self.least))
