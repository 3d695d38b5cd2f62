"""The Transformer aggregator (Eq. 10) in which every coordinate of a gradient is a sequence."""

import math
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from torchemo.aggregator_parts import (
    Init,
    base_weights,
    check_init,
    check_max_neighbors,
    draw_parameters,
    flatten_after,
    mix,
    nearest,
    recall_weights,
    recalled_names,
    weighted_sum,
)
from torchemo.types import Params, Recall

DIM, HEADS, HIDDEN = 16, 2, 32
P = 10.0


def features(x: Tensor) -> Float[Tensor, "2 ..."]:
    """Encode scalars of any magnitude by two numbers of order one, stacked in front.

    ``(log|x| / p, sign x)`` where ``|x| >= e^-p``, else ``(-1, e^p x)``, with p = 10. Written with
    clamps, whose derivatives are finite everywhere, x = 0 included.
    """
    magnitude = x.abs().clamp(min=math.exp(-P)).log() / P
    return torch.stack([magnitude, (x * math.exp(P)).clamp(-1.0, 1.0)])


class _Algebra(NamedTuple):
    """What the layer does to a sequence of scalars, reduced to its affine maps.

    Attributes:
        slope: Attention logits per unit of each feature.
        own: Logit of the token of g beside its features, relative to a token of the memory.
        cls: Logit of the cls token, likewise.
        out: What the attention adds at cls per unit of each head's pooled statistics.
        bias: What it adds in any case, and cls itself.
    """

    slope: Float[Tensor, "head 2"]
    own: Float[Tensor, " head"]
    cls: Float[Tensor, " head"]
    out: Float[Tensor, "dim statistics"]
    bias: Float[Tensor, " dim"]


@final
class CoordinateTransformer(nn.Module):
    """Transformer over the scalars [cls, g_i, V_1i, ..., V_mi] of every coordinate i (Eq. 10).

    The literal reading (A9): one post-norm layer (width 16, 2 heads, 32 hidden units), read at cls,
    gives an increment that is added to the rule ``init``. Its last linear map starts at zero, so
    training starts exactly at that rule. The recall weights a_j enter through the rule alone.

    Only the output at cls is read, the query of cls is constant, and a token is affine in the two
    `features` of its scalar; so are its logit and its value. Attention therefore needs the features
    pooled under each head's weights and the weights of g and of the memory, five numbers per head and
    coordinate, and never forms tokens ``[P, m + 2, 16]``. The result is that of ``layer``, exactly.

    Args:
        init: The rule to start from: ``"own"`` (plain g), ``"mean"`` or ``"sum"``.
        max_neighbors: Use only so many of the nearest slots (9 gives the paper's length of 11).
        chunk: Scalars of the memory that are worked on at a time; bounds the working set.
        seed: Where the initial parameters come from.

    Attributes:
        embed: Features to tokens.
        types: What is added to the token of g, and to those of the memory.
        cls: The cls token.
        layer: Holds the weights of the transformer layer.
        readout: Output at cls to increment.
    """

    def __init__(
        self,
        *,
        init: Init = "own",
        max_neighbors: int | None = None,
        chunk: int = 1 << 17,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_init(init)
        check_max_neighbors(max_neighbors)
        self.init = init
        self.max_neighbors = max_neighbors
        self.chunk = chunk
        with torch.device("meta"):  # leaves the global random state alone
            self.embed = nn.Linear(2, DIM)
            self.types = nn.Parameter(torch.empty(2, DIM))
            self.cls = nn.Parameter(torch.empty(DIM))
            self.layer = nn.TransformerEncoderLayer(
                DIM, HEADS, HIDDEN, dropout=0.0, activation="gelu", batch_first=True
            )
            self.readout = nn.Linear(DIM, 1)
        draw_parameters(self, seed=seed)
        nn.init.zeros_(self.readout.weight)

    def forward(self, grads: Params, recall: Recall, *, step: int = 0) -> Params:
        """Combine own and recalled gradients (Eq. 10); ``step`` makes no difference."""
        recall = nearest(recall, self.max_neighbors)
        names = recalled_names(grads, recall)
        if recall.m == 0 or not names:
            return self.own_only(grads)
        own, recalled = base_weights(self.init, recall.weights)
        values = [flatten_after(recall.values[name], 2) for name in names]
        owns = [flatten_after(grads[name], 1)[:, None] for name in names]
        increments = self._increments(torch.cat(owns, dim=2), torch.cat(values, dim=2))
        return self.own_only(grads) | {
            name: mix(grads[name], recall.values[name], own=own, recalled=recalled)
            + increment.view_as(grads[name])
            for name, increment in zip(
                names, increments.split([x.shape[2] for x in values], dim=1), strict=True
            )
        }

    def recall_only(self, recall: Recall, *, step: int = 0) -> Params:
        """Return the rule ``init`` without an own gradient, plus the increments of [cls, V_1..V_m]."""
        recall = nearest(recall, self.max_neighbors)
        weights = recall_weights(self.init, recall.weights)
        base = {name: weighted_sum(value, weights) for name, value in recall.values.items()}
        if recall.m == 0 or not base:
            return base
        values = [flatten_after(value, 2) for value in recall.values.values()]
        memory = torch.cat(values, dim=2)
        increments = self._increments(memory[:, :0], memory)
        ...

    def own_only(self, grads: Params) -> Params:
        """Return the gradients themselves."""
        return dict(grads)

    def _increments(
        self, own: Float[Tensor, "task own p"], memory: Float[Tensor, "task m p"]
    ) -> Float[Tensor, "task p"]:
        """Return the increment of every coordinate; ``own`` is g, or empty where there is none."""
        algebra = self._algebra()
        size = max(1, self.chunk // memory[..., 0].numel())
        pieces = zip(own.split(size, dim=2), memory.split(size, dim=2), strict=True)
        return torch.cat([self._read(self._attend(a, *piece)) for piece in pieces], dim=1)
