"""An adapter that adds to the features of a pretrained network, and adds nothing before it is trained."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.types import Params
from torchemo.models.alone import OneByOne
from torchemo.models.inputs import check_examples, check_params, check_positive
from torchemo.models.layers import kaiming_normal, task_linear, zeros

LENGTH = 4.0
"""Length of unadapted features. Squared distances between them are then at most 64, so that ProtoNet's
softmax is not saturated, and rates of inner steps suit heads on them."""


@final
@dataclass(frozen=True)
class ResidualAdapter(OneByOne):
    """Features z of a network plus what two layers make of them: ``x [B, n, d] -> [B, n, n_out]``.

    ``f(z) = LENGTH (u + W2 relu(W1 sqrt(d) u + b1) / sqrt(d))`` with ``u = z / |z|``. W2 begins at zero, so
    that before training f(z) has the direction of z, and nearest mean by cosine is that of the network.

    Attributes:
        n_out: Number of outputs of the head.
        n_in: Numbers in one input, d.
        hidden: Units between the two layers.

    Example:
        >>> from torchemo.core.rng import generator_for
        >>> from torchemo.core.tree import expand
        >>> model = ResidualAdapter(5, n_in=8, hidden=3)
        >>> params = expand(model.init(generator_for(0, "init")), 2)
        >>> model.features(params, torch.ones(2, 4, 8)).shape
        torch.Size([2, 4, 8])
    """

    n_out: int
    _: KW_ONLY
    n_in: int
    hidden: int

    def __post_init__(self) -> None:
        check_positive(n_out=self.n_out, n_in=self.n_in, hidden=self.hidden)

    def init(self, generator: torch.Generator) -> Params:
        """Draw the first layer and the head; the second layer is zero."""
        return {
            "down.weight": kaiming_normal((self.hidden, self.n_in), generator),
            "down.bias": zeros((self.hidden,), generator),
            "up.weight": zeros((self.n_in, self.hidden), generator),
            "head.weight": kaiming_normal((self.n_out, self.n_in), generator),
            "head.bias": zeros((self.n_out,), generator),
        }

    def __call__(self, params: Params, x: Tensor) -> Float[Tensor, "task n out"]:
        """Map ``x [B, n, d]`` to outputs ``[B, n, n_out]``."""
        return self.classify(params, self.features(params, x))

    def features(self, params: Params, x: Tensor) -> Float[Tensor, "task n d"]:
        """Map ``x [B, n, d]`` to adapted features ``[B, n, d]``."""
        check_examples(x, (self.n_in,), what="adapter")
        check_params(params, self._body_shapes, tasks=x.shape[0], what="adapter")
        u, root = F.normalize(x, dim=-1), math.sqrt(self.n_in)
        inside = F.relu(task_linear(params, root * u, layer="down"))
        return LENGTH * (u + inside @ params["up.weight"].transpose(1, 2) / root)

    def classify(self, params: Params, features: Tensor) -> Float[Tensor, "task n out"]:
        """Apply the head to ``features [B, n, d]``."""
        check_examples(features, (self.n_in,), what="adapter's head")
        return task_linear(params, features, layer="head")

    @property
    def _body_shapes(self) -> Mapping[str, tuple[int, ...]]:
        d, h = self.n_in, self.hidden
        return {"down.weight": (h, d), "down.bias": (h,), "up.weight": (d, h)}
