"""The Transformer aggregator (Eq. 10) that reads descriptions of gradients and mixes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from torchemo.config.options import MOST_LAYERS, refuse_above, refuse_below
from torchemo.core.errors import ConfigError, ShapeError
from torchemo.core.rng import generator_for
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

BUCKETS = 62
WIDTH = BUCKETS + 2  # the sketch, the log norm and the cosine


@final
@dataclass(frozen=True)
class GateOptions:
    """Options of the Transformer that mixes gradients."""

    init: Init = "own"
    """The rule it equals before training."""
    layers: int = 6
    """Layers of the Transformer."""
    max_neighbors: int | None = None
    """Use only the nearest slots; 9 gives the paper's length 11 (A10)."""

    def __post_init__(self) -> None:
        refuse_below(1, self, "layers", where="memory.aggregator")
        refuse_above(MOST_LAYERS, self, "layers", where="memory.aggregator")


@final
class CountSketch(nn.Module):
    """A fixed signed random projection of every tensor to 62 numbers, drawn from the tensor's name.

    Coordinate i of tensor l is added with sign s_l(i) to bucket h_l(i). Inner products survive in
    expectation. Nothing is trained or saved: the same names and shapes give the same sketch.
    """

    buckets: Tensor
    signs: Tensor

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        super().__init__()
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        ends = list(accumulate(shape.numel() for shape in self.shapes.values()))
        self.spans = dict(zip(self.shapes, map(slice, [0, *ends], ends), strict=True))
        buckets, signs = [], []
        for name, shape in self.shapes.items():
            generator = generator_for(0, "count-sketch", name)
            buckets.append(torch.randint(BUCKETS, (shape.numel(),), generator=generator))
            signs.append(torch.randint(2, (shape.numel(),), generator=generator) * 2.0 - 1.0)
        self.register_buffer("buckets", torch.cat(buckets), persistent=False)
        self.register_buffer("signs", torch.cat(signs), persistent=False)

    def forward(
        self, name: str, x: Float[Tensor, "task token n"]
    ) -> Float[Tensor, "task token 62"]:
        """Sketch gradients ``x`` of tensor ``name``."""
        span = self.spans[name]
        empty = x.new_zeros(*x.shape[:-1], BUCKETS)
        return empty.index_add(-1, self.buckets[span], x * self.signs[span])


@final
class GateTransformer(OwnAlone):
    """Transformer over [cls, g, V_1, ..., V_m] (Eq. 10) that says how to mix the true gradients.

    Choice: the paper does not say how a gradient of thousands of entries becomes a token (A9).
    Here a token describes a gradient x of a tensor by 64 numbers: a `CountSketch` of x / ||x||,
    log ||x|| and cos(x, g). One transformer without positions serves all tensors. With its output h

        u_j = w^T [h_cls ; h_j]        result = (c_0 + u_0) g + Σ_j (c_j + u_j / m) V_j

    The result is a combination of true gradients, so its shape and scale are safe. w starts at
    zero, so training starts exactly at the rule ``init``, whose weights are c. The recall weights
    a_j enter through c alone: with ``init="own"`` no gradient reaches them.

    Choice: norms are smoothed, ``||x|| = sqrt(Σ x² + floor²)``, so that a gradient of zero (a dead
    unit) has finite derivatives. The direction can be differentiated once, which is what
    second-order learners do; fused attention has no second derivative on every device.

    Args:
        shapes: Shapes of the remembered tensors, without task axis.
        generator: Source of the initial parameters.
        head: Names of the tensors of the last linear layer; they are kinds of their own.
        init: The rule to start from: ``"own"`` (c_0 = 1, c_j = 0), ``"mean"`` or ``"sum"``.
        max_neighbors: Use only so many of the nearest slots (9 gives the paper's length of 11).
        use_distances: Tell the tokens of the memory how far their tasks are.
        layers: Depth of the transformer.
        floor: What a norm is at least. Gradients that are zero but for rounding, such as those of
            biases in front of batch normalisation, are pure noise once normalised; a larger floor
            hides it.
    """

    any_number = False
    Options: ClassVar[type[GateOptions]] = GateOptions

    distance: nn.Parameter | None

    @classmethod
    def build(cls, options: GateOptions, joined: Joined) -> "GateTransformer":
        """Make the aggregator from its options."""
        return cls(joined.shapes, generator=joined.generator, head=joined.head, **vars(options))

    any_way: ClassVar[bool] = False
    """Its sketches are of tensors of the shapes of training."""

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        *,
        generator: Generator,
        head: Sequence[str] = (),
        init: Init = "own",
        max_neighbors: int | None = None,
        use_distances: bool = False,
        layers: int = 6,
        floor: float = 1e-12,
    ) -> None:
        super().__init__()
        check_init(init)
        check_max_neighbors(max_neighbors)
        if not shapes or layers < 1 or not floor > 0:
            raise ConfigError(
                "gate aggregator: needs at least one tensor, at least one layer and a positive"
                f" floor, got {len(shapes)} tensors, {layers} layers, floor {floor}."
            )
        self.init = init
        self.max_neighbors = max_neighbors
        self.floor = floor
        self.kind_of = {name: _kind(name, shape, head=head) for name, shape in shapes.items()}
        with torch.device("meta"):  # leaves the global random state alone
            self.embed = nn.Linear(WIDTH, WIDTH)
            self.cls = nn.Parameter(torch.empty(WIDTH))
            self.types = nn.Parameter(torch.empty(2, WIDTH))
            self.kinds = nn.Parameter(torch.empty(4, WIDTH))
            distance = nn.Parameter(torch.empty(WIDTH)) if use_distances else None
            self.register_parameter("distance", distance)
            self.encoder = _encoder(layers)
            self.readout = nn.Parameter(torch.empty(2, WIDTH))
        draw_parameters(self, generator)
        nn.init.zeros_(self.readout)
        self.sketch = CountSketch(shapes)

    def forward(self, grads: Params, recall: Recall, *, step: int = 0) -> Params:
        """Combine own and recalled gradients (Eq. 10); ``step`` makes no difference."""
        recall = nearest(recall, self.max_neighbors)
        names = recalled_names(grads, recall)
        if recall.m == 0 or not names:
            return self.own_only(grads)
        u = self._increments(names, recall, grads=grads)
        own, recalled = base_weights(self.init, recall.weights)
        return self.own_only(grads) | {
            name: mix(
                grads[name],
                recall.values[name],
                own=own + u_l[:, 0],
                recalled=recalled + u_l[:, 1:] / recall.m,
            )
            for name, u_l in zip(names, u, strict=True)
        }

    def recall_only(self, recall: Recall, *, step: int = 0) -> Params:
        """Return ``Σ_j (c_j + u_j / m) V_j``, read from the sequence without the token of g.

        Choice: cosines with the absent g are 0, and c_j is what the rule ``init`` gives without an
        own gradient: a_j for mean and sum, 0 for own.
        """
        recall = nearest(recall, self.max_neighbors)
        names = list(recall.values)
        weights = recall_weights(self.init, recall.weights)
        if recall.m == 0 or not names:
            return {name: weighted_sum(recall.values[name], weights) for name in names}
        u = self._increments(names, recall, grads=None)
        return {
            name: weighted_sum(recall.values[name], weights + u_l / recall.m)
            for name, u_l in zip(names, u, strict=True)
        }

    def _increments(
        self, names: list[str], recall: Recall, *, grads: Params | None
    ) -> Float[Tensor, "tensor task token"]:
        """Run all tensors of all tasks through the transformer in one call and read u."""
        values = [self._known(name, recall.values[name]) for name in names]
        if grads is None:  # a sequence of no own tokens
            owns = [value[:, :0] for value in values]
        else:
            owns = [flatten_after(grads[name], 1)[:, None] for name in names]
        # g and V are described apart: V is constant, so its long part needs no backward pass.
        own = self.embed(self._describe(names, owns, owns)) + self.types[0]
        memory = self.embed(self._describe(names, values, owns)) + self.types[1]
        if self.distance is not None:
            memory = memory + recall.distances[..., None] * self.distance
        cls = self.cls.expand(*memory.shape[:2], 1, WIDTH)
        kinds = self.kinds[[self.kind_of[name] for name in names]][:, None, None]
        tokens = torch.cat([cls, own, memory], dim=2) + kinds
        hidden: Tensor = self.encoder(tokens.flatten(0, 1)).unflatten(0, tokens.shape[:2])
        return hidden[:, :, 1:] @ self.readout[1] + hidden[:, :, :1] @ self.readout[0]

    def _describe(
        self, names: list[str], gradients: list[Tensor], owns: list[Tensor]
    ) -> Float[Tensor, "tensor task token width"]:
        """Describe gradients ``[B, t, n]`` of each tensor by sketch, log norm and cosine with g.

        Own gradients are ``[B, 1, n]``, or ``[B, 0, n]`` where there are none: cosines are then 0.
        """
        described = []
        for name, x, own in zip(names, gradients, owns, strict=True):
            norm = self._norm(x)
            cosine = (x @ (own / self._norm(own)).mT).sum(-1, keepdim=True) / norm
            described.append(torch.cat([self.sketch(name, x) / norm, norm.log(), cosine], dim=-1))
        return torch.stack(described)

    def _norm(self, x: Float[Tensor, "task token n"]) -> Float[Tensor, "task token 1"]:
        return (x.square().sum(-1, keepdim=True) + self.floor**2).sqrt()

    def _known(self, name: str, value: Tensor) -> Tensor:
        """Return values as ``[B, m, n]``; refuse those of a tensor that has no sketch."""
        if self.sketch.shapes.get(name) != value.shape[2:]:
            raise ShapeError(
                f"gate aggregator: knows tensors {[*self.sketch.shapes]} and their shapes,"
                f" got values of '{name}' of shape {list(value.shape[2:])}.",
                hint="Build the aggregator with the shapes of the tensors that are remembered.",
            )
        return flatten_after(value, 2)


def _kind(name: str, shape: torch.Size, *, head: Sequence[str]) -> int:
    """Number the kinds of tensors: weight 0, bias 1, head weight 2, head bias 3."""
    return 2 * (name in head) + (len(shape) < 2)


def _encoder(layers: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 2 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(
        layer, layers, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False
    )
