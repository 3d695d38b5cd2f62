"""The Transformer aggregator (Eq. 10) in which every coordinate of a gradient is a sequence."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from torchemo.core.errors import ConfigError
from torchemo.core.tree import tree_map
from torchemo.core.types import Params, Recall
from torchemo.memory.aggregators.aggregator import Joined
from torchemo.memory.aggregators.parts import (
    Init,
    OwnAlone,
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

DIM, HEADS, HIDDEN = 16, 2, 32


@final
@dataclass(frozen=True)
class CoordinateOptions:
    """Options of the Transformer over coordinates."""

    init: Init = "own"
    """The rule it equals before training."""
    max_neighbors: int | None = None
    """Use only the nearest slots; 9 gives the paper's length 11 (A10)."""


def features(x: Tensor, *, p: float = 10.0) -> Tensor:
    """Encode scalars of any magnitude by two numbers of order one, ``[*shape] -> [2, *shape]``.

    ``(log|x| / p, sign x)`` where ``|x| >= e^-p``, else ``(-1, e^p x)``. Written with clamps, whose
    derivatives are finite everywhere, x = 0 included.

    Example:
        >>> import torch
        >>> features(torch.tensor([1.0, 0.0]))
        tensor([[ 0., -1.],
                [ 1.,  0.]])
    """
    magnitude = x.abs().clamp(min=math.exp(-p)).log() / p
    return torch.stack([magnitude, (x * math.exp(p)).clamp(-1.0, 1.0)])


class _Algebra(NamedTuple):
    """What the layer does to a sequence of scalars, reduced to its affine maps.

    Attributes:
        slope: What a logit gains per unit of each feature.
        cls: Logit of the cls token, relative to a token of the memory with features 0.
        own: Logit of the token of g with features 0, likewise.
        out: What the output at cls gains per unit of each head's pooled statistics: two features
            and the attention paid to cls, to g, to the memory.
        bias: The output at cls besides.
    """

    slope: Float[Tensor, "head 2"]
    cls: Float[Tensor, " head"]
    own: Float[Tensor, " head"]
    out: Float[Tensor, "dim statistics"]
    bias: Float[Tensor, " dim"]


@final
class CoordinateTransformer(OwnAlone):
    """Transformer over the scalars [cls, g_i, V_1i, ..., V_mi] of every coordinate i (Eq. 10).

    As the paper describes it (A9): one post-norm layer (width 16, 2 heads, 32 hidden units), read at cls,
    gives an increment that is added to the rule ``init``. Its last linear map starts at zero, so
    training starts exactly at that rule. The recall weights a_j enter through the rule alone.

    Only the output at cls is read, the query of cls is constant, and a token is affine in the two
    `features` of its scalar; so are its logit and its value. All that attention needs per head and
    coordinate is five numbers, the pooled features and the attention paid to cls, to g and to the
    memory; tokens ``[P, m + 2, 16]`` are never formed. The result is that of ``layer``, exactly.

    Args:
        generator: Source of the initial parameters.
        init: The rule to start from: ``"own"`` (plain g), ``"mean"`` or ``"sum"``.
        max_neighbors: Use only so many of the nearest slots (9 gives the paper's length of 11).
        chunk: Scalars of the memory that are worked on at a time; bounds the working set.

    Attributes:
        embed: Features to tokens.
        types: What is added to the token of g, and to those of the memory.
        cls: The cls token.
        layer: Holds the weights of the transformer layer.
        readout: Output at cls to increment.
    """

    any_number = False
    Options: ClassVar[type[CoordinateOptions]] = CoordinateOptions

    @classmethod
    def build(cls, options: CoordinateOptions, joined: Joined) -> "CoordinateTransformer":
        """Make the aggregator from its options."""
        return cls(generator=joined.generator, **vars(options))

    def __init__(
        self,
        *,
        generator: Generator,
        init: Init = "own",
        max_neighbors: int | None = None,
        chunk: int = 1 << 18,
    ) -> None:
        super().__init__()
        check_init(init)
        check_max_neighbors(max_neighbors)
        if chunk < 1:
            raise ConfigError(f"coordinate aggregator: chunk should be at least 1, got {chunk}.")
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
        draw_parameters(self, generator)
        nn.init.zeros_(self.readout.weight)

    def forward(self, grads: Params, recall: Recall, *, step: int = 0) -> Params:
        """Combine own and recalled gradients (Eq. 10); ``step`` makes no difference."""
        recall = nearest(recall, self.max_neighbors)
        names = recalled_names(grads, recall)
        if recall.m == 0 or not names:
            return self.own_only(grads)
        own, recalled = base_weights(self.init, recall.weights)
        return self.own_only(grads) | {
            name: mix(grads[name], recall.values[name], own=own, recalled=recalled) + increment
            for name, increment in self._increments(names, recall, grads=grads).items()
        }

    def recall_only(self, recall: Recall, *, step: int = 0) -> Params:
        """Return the rule ``init`` without own gradient, plus the increments of [cls, V_1..V_m].

        Choice: the rule is then ``Σ_j a_j V_j`` for mean and sum, 0 for own.
        """
        recall = nearest(recall, self.max_neighbors)
        names = list(recall.values)
        weights = recall_weights(self.init, recall.weights)
        base = {name: weighted_sum(recall.values[name], weights) for name in names}
        if recall.m == 0 or not names:
            return base
        return tree_map(torch.add, base, self._increments(names, recall, grads=None))

    def _increments(self, names: list[str], recall: Recall, *, grads: Params | None) -> Params:
        """Run all coordinates of all tasks through the layer, a chunk at a time."""
        values = [flatten_after(recall.values[name], 2) for name in names]
        memory = torch.cat(values, dim=2)
        own = memory[:, :0]  # no token of g
        if grads is not None:
            own = torch.cat([flatten_after(grads[name], 1)[:, None] for name in names], dim=2)
        algebra = self._algebra()
        parts = math.ceil(memory.numel() / self.chunk)
        chunks = zip(own.chunk(parts, dim=2), memory.chunk(parts, dim=2), strict=True)
        read = torch.cat([self._read(algebra, *chunk) for chunk in chunks], dim=1)
        pieces = read.split_with_sizes([value.shape[2] for value in values], dim=1)
        return {
            name: piece.view(piece.shape[0], *recall.values[name].shape[2:])
            for name, piece in zip(names, pieces, strict=True)
        }

    def _algebra(self) -> _Algebra:
        attention, size = self.layer.self_attn, DIM // HEADS
        w_q, w_k, w_v = attention.in_proj_weight.chunk(3)
        # The bias of the keys shifts all logits alike: the softmax does not see it.
        b_q, _, b_v = attention.in_proj_bias.chunk(3)
        own, memory = self.types + self.embed.bias
        query = (w_q @ self.cls + b_q).view(HEADS, size) / math.sqrt(size)
        logit = torch.einsum("hk,hkd->hd", query, w_k.view(HEADS, size, DIM))
        w_out = attention.out_proj.weight.view(DIM, HEADS, size)
        value = torch.einsum("ohk,hkd->ohd", w_out, w_v.view(HEADS, size, DIM))
        parts = torch.cat([self.embed.weight, torch.stack([self.cls, own, memory], dim=1)], dim=1)
        return _Algebra(
            slope=logit @ self.embed.weight,
            cls=logit @ (self.cls - memory),
            own=logit @ (own - memory),
            out=(value @ parts).flatten(1),
            bias=self.cls + attention.out_proj.weight @ b_v + attention.out_proj.bias,
        )

    def _read(
        self, algebra: _Algebra, own: Float[Tensor, "task own n"], memory: Float[Tensor, "task m n"]
    ) -> Float[Tensor, "task n"]:
        """Attend at cls, finish the post-norm layer and read the increment of n coordinates."""
        own_features, memory_features = features(own), features(memory)
        cls_logit, own_logit = (x[:, None, None, None] for x in (algebra.cls, algebra.own))
        logits = [
            cls_logit.expand(-1, memory.shape[0], 1, memory.shape[2]),
            own_logit + torch.tensordot(algebra.slope, own_features, 1),
            torch.tensordot(algebra.slope, memory_features, 1),
        ]
        attention = torch.cat(logits, dim=2).softmax(2)
        to_cls, to_own, to_memory = attention.split_with_sizes([x.shape[2] for x in logits], dim=2)
        pooled = _pool(to_own, own_features) + _pool(to_memory, memory_features)
        masses = torch.stack([part.sum(2) for part in (to_cls, to_own, to_memory)], dim=1)
        statistics = torch.cat([pooled, masses], dim=1).flatten(0, 1).flatten(1)
        layer = self.layer
        x = layer.norm1(statistics.mT @ algebra.out.mT + algebra.bias)
        x = layer.norm2(x + layer.linear2(layer.activation(layer.linear1(x))))
        increments: Tensor = self.readout(x)
        return increments.view(memory.shape[0], memory.shape[2])


def _pool(
    attention: Float[Tensor, "head task token n"], values: Float[Tensor, "2 task token n"]
) -> Float[Tensor, "head 2 task n"]:
    return (attention[:, None] * values).sum(3)
