"""Gates: a description of the task scales every element of the initialisation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.learners.parts.draws import linear
from torchemo.types import Params


@final
@dataclass(frozen=True)
class Gates:
    """Start from ``theta o sigmoid(A z + b)``, with a linear map per tensor.

    Gates begin near 1/2, so the first effective weights are half the stored ones.

    Args:
        dim: Size of the task's description z.
        shapes: The gated tensors; all others stay as they are.
    """

    dim: int
    shapes: Mapping[str, torch.Size]

    def init(self, generator: torch.Generator) -> Params:
        """Draw ``{tensor}.weight [numel, dim]`` and ``{tensor}.bias [numel]`` = 0."""
        drawn = {n: linear(self.dim, s.numel(), generator) for n, s in self.shapes.items()}
        return {f"{n}.{part}": t for n, layer in drawn.items() for part, t in layer.items()}

    def __call__(self, params: Params, theta: Params, code: Float[Tensor, "task dim"]) -> Params:
        """Gate ``theta {name: [B, *shape]}`` by the tasks' descriptions."""
        gated = dict(theta)
        for name in self.shapes:
            raw = F.linear(code, params[f"{name}.weight"], params[f"{name}.bias"])
            gated[name] = theta[name] * raw.sigmoid().view(theta[name].shape)
        return gated
