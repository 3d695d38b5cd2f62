"""RelationNet: Learning to Compare (Sung, Yang, Zhang, Xiang, Torr, Hospedales, CVPR 2018)."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, final, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.losses import cross_entropy
from torchemo.core.prototypes import class_means
from torchemo.core.types import Model, Params, TaskShape
from torchemo.learners.head import (
    BnOver,
    Features,
    Head,
    HeadOptions,
    Labels,
    Logits,
    TaskLosses,
    one_hot,
)
from torchemo.models.inputs import check_choice, check_positive
from torchemo.models.layers import (
    from_trunk,
    kaiming_normal,
    task_conv,
    task_linear,
    to_trunk,
    zeros,
)
from torchemo.models.norm import TaskNorm, Usage
from torchemo.models.trunk import feature_map

LAYERS = ("norm1", "norm2")
Pool = Literal["sum", "mean"]
Loss = Literal["mse", "cross_entropy"]


@dataclass(frozen=True)
class RelationNetOptions(HeadOptions):
    """Options of RelationNet; the defaults are the paper's."""

    filters: int = 64
    """Channels of the comparing network."""
    units: int = 8
    """Units of its hidden linear layer."""
    pool: Pool = "sum"
    """How the maps of a class are joined."""
    loss: Loss = "mse"
    """Squared error of the score from 1 for the right class and 0 for others, or cross-entropy."""


@final
@dataclass(frozen=True)
class RelationNet(RelationNetOptions, Head):
    """Classify a query by a learned comparison of its map with the map of each class.

    ``r_k = sigmoid(g([P_k ; map(x)]))`` with P_k the sum of the class's support maps and g two convolutions
    and two linear layers (Eq. 1 of the paper). The loss is ``mean_k (r_k - [k = y])^2`` (Eq. 2). Logits are
    those of the sigmoid, so the largest r_k answers.

    Choice: g normalises by the statistics of all pairs of a task in training (of the whole meta-batch with
    ``bn_over = batch``), and by running averages of these in answers. The authors' code uses the pairs at
    hand there too, so that its queries see each other.
    """

    title: ClassVar[str] = "RelationNet"
    Options: ClassVar[type] = RelationNetOptions
    learns_to_compare: ClassVar[bool] = True

    map: tuple[int, int, int] = (1, 1, 1)
    """Channels, height and width of the network's last map."""
    usage: Usage = field(default=Usage(stored=True), repr=False, compare=False)
    """Whether pairs are normalised by running averages or by their own statistics; set by `noting`."""
    merges: bool = field(default=False, repr=False, compare=False)
    """Whether those are of all tasks; set by `noting`."""

    @classmethod
    def sized(cls, options: Any, model: Model, tasks: TaskShape) -> "RelationNet":
        """Make the head for a network's maps."""
        return cls(**vars(options), map=feature_map(model))

    def __post_init__(self) -> None:
        check_positive(filters=self.filters, units=self.units)
        check_choice("pool", self.pool, get_args(Pool))
        check_choice("loss", self.loss, get_args(Loss))

    @property
    def _sides(self) -> tuple[int, int, int]:
        """Height of the maps before, between and after the two convolutions."""
        first = self.map[1]
        second = max(first // 2, 1)
        return first, second, max(second // 2, 1)

    def init(self, generator: torch.Generator) -> Params:
        """Draw the comparing network."""
        channels, filters = self.map[0], self.filters
        flat = filters * self._sides[2] ** 2
        shapes = {
            # The first kernel cut in two: the class's half of the channels, and the query's.
            "class.weight": (filters, channels, 3, 3),
            "query.weight": (filters, channels, 3, 3),
            "conv.weight": (filters, filters, 3, 3),
            "hidden.weight": (self.units, flat),
            "score.weight": (1, self.units),
        }
        params = {name: kaiming_normal(shape, generator) for name, shape in shapes.items()}
        biases = {"hidden": self.units, "score": 1}
        params |= {f"{name}.bias": zeros((n,), generator) for name, n in biases.items()}
        for layer in LAYERS:
            params |= self._norm.init(layer, filters, device=generator.device)
        return params

    @property
    def buffers(self) -> tuple[str, ...]:
        """Running statistics of the pairs."""
        return tuple(name for layer in LAYERS for name in self._norm.buffers(layer))

    def noting(self, sink: Params, *, over: BnOver = "task") -> "RelationNet":
        """Return the head as it is in training: pairs are normalised by their own statistics."""
        return replace(self, usage=Usage(sink=sink), merges=over == "batch")

    @property
    def _norm(self) -> TaskNorm:
        return TaskNorm(bn="running", eps=1e-5, usage=self.usage)

    def fit(self, params: Params, z: Features, y: Labels, *, n_way: int) -> Params:
        """Join the maps of each class, and send them through the class's half of the first kernel."""
        joined = class_means(z, y, n_way=n_way)
        if self.pool == "sum":
            joined = joined * one_hot(y, n_way, like=z).sum(1).unsqueeze(-1)
        return {"seen": self._convolved(params, joined, "class")}

    def logits(self, params: Params, classifier: Params, z: Features) -> Logits:
        """Compare every query with every class."""
        query, classes = self._convolved(params, z, "query"), classifier["seen"]
        # The convolution of two halves side by side is the sum of the halves' convolutions.
        pairs = query.unsqueeze(2) + classes.unsqueeze(1)
        tasks, queries, way = pairs.shape[:3]
        maps, merged = to_trunk(pairs.flatten(1, 2)), tasks
        if self.merges:
            # All tasks have the same parameters then: their pairs become examples of one task.
            maps, merged = pairs.flatten(0, 2), 1
        shared = {name: p[:merged] for name, p in params.items()}
        maps = self._halved(shared, maps, "norm1", tasks=merged)
        maps = task_conv(shared, maps, layer="conv")
        maps = self._halved(shared, maps, "norm2", tasks=merged)
        flat = from_trunk(maps, merged).reshape(tasks, queries * way, -1)
        hidden = task_linear(params, flat, layer="hidden").relu()
        return task_linear(params, hidden, layer="score").view(tasks, queries, way)

    def losses(self, params: Params, classifier: Params, z: Features, y: Labels) -> TaskLosses:
        """Return the paper's squared error, or the cross-entropy."""
        logits = self.logits(params, classifier, z)
        if self.loss == "cross_entropy":
            return cross_entropy(logits, y)
        right = one_hot(y, logits.shape[-1], like=logits)
        return (logits.sigmoid() - right).square().mean((1, 2))

    def _convolved(
        self, params: Params, z: Features, layer: str
    ) -> Float[Tensor, "task n filter h w"]:
        maps = z.view(*z.shape[:2], *self.map)
        return _from_channels(task_conv(params, to_trunk(maps), layer=layer), len(z))

    def _halved(self, params: Params, maps: Tensor, layer: str, *, tasks: int) -> Tensor:
        """Normalise maps, cut off what is negative, and halve them if there is something to halve."""
        maps = self._norm(params, maps, layer=layer, tasks=tasks).relu()
        return maps if maps.shape[-1] == 1 else F.max_pool2d(maps, 2)


def _from_channels(maps: Tensor, tasks: int) -> Float[Tensor, "{tasks} n c h w"]:
    """Bring the task axis back to the front, and keep the maps."""
    n, _, height, width = maps.shape
    return maps.view(n, tasks, -1, height, width).transpose(0, 1)
