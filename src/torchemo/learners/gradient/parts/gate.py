"""Gates: a description of the task scales every element of the initialisation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.types import Params
from torchemo.learners.gradient.parts.initial import linear


@final
@dataclass(frozen=True)
class Gates:
    """Gates ``sigmoid(A z + b)`` in the shapes of tensors, with a linear map per tensor.

    Gates begin near 1/2, so the first effective weights are half the stored ones.
    """

    dim: int
    shapes: Mapping[str, torch.Size]

    def init(self, generator: torch.Generator) -> Params:
        """Draw ``{tensor}.weight [numel, dim]`` and ``{tensor}.bias [numel]`` = 0."""
        drawn = {n: linear(self.dim, s.numel(), generator) for n, s in self.shapes.items()}
        return {f"{n}.{part}": t for n, layer in drawn.items() for part, t in layer.items()}

    def __call__(self, params: Params, code: Float[Tensor, "task dim"]) -> Params:
        """Return the gates ``{name: [B, *shape]}`` of tasks with these descriptions."""
        gates = {}
        for name, shape in self.shapes.items():
            raw = F.linear(code, params[f"{name}.weight"], params[f"{name}.bias"])
            gates[name] = raw.sigmoid().view(-1, *shape)
        return gates
