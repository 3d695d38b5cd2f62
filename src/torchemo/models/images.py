"""What networks of images share: sizes, normalisation, a linear head, and how options make them."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Literal, cast, final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Model, Params, TaskShape
from torchemo.models.alone import Answering, BesideSupport
from torchemo.models.inputs import check_choice, check_examples, check_params, check_positive
from torchemo.models.layers import from_trunk, task_linear, to_trunk
from torchemo.models.norm import Affine, Bn, TaskNorm, Usage
from torchemo.models.trunk import PartOf


@dataclass(frozen=True)
class ImageNetwork:
    """Four blocks that halve the maps, then a linear head: ``x [B, n, C, H, W] -> [B, n, n_way]``.

    Attributes:
        n_way: Number of outputs.
        in_channels: Channels of the images.
        image_size: Height and width of the images.
        head_pool: ``flatten`` the last maps or take their ``mean``.
        bn: Normalisation, see `TaskNorm`.
        affine: ``both`` scale and shift, or ``shift`` alone (the original MAML code).
        eps: Added to variances.
        groups: Channel groups of ``bn = "group"``.
        bn_steps: Stored inner steps of ``bn = "per_step_running"``.
        usage: Set by `at`.
        half: Let convolutions and the head multiply in bfloat16 (``torch.autocast``); features and outputs
            have the precision of the images.
        channels_last: Keep the channels of a pixel beside each other in memory, where one task is at hand.
            Plain convolutions are then faster on a CPU; results differ by rounding.
        levels: How many of the last blocks give features: means over the maps of all but the last block come
            first. Set by `with_levels`.
    """

    conv_bias: ClassVar[bool] = False
    """Whether its convolutions have biases."""

    n_way: int
    _: KW_ONLY
    in_channels: int = 3
    image_size: int = 84
    head_pool: Literal["flatten", "mean"] = "flatten"
    bn: Bn = "transductive"
    affine: Affine = "both"
    eps: float = 1e-3
    groups: int = 8
    bn_steps: int = 5
    usage: Usage = field(default=Usage(), repr=False, compare=False)
    half: bool = field(default=False, repr=False)
    channels_last: bool = field(default=False, repr=False, compare=False)
    levels: int = field(default=1, repr=False)

    @classmethod
    def build(cls, options: Any, tasks: TaskShape) -> "ImageNetwork":
        """Make the network from its options, for such tasks."""
        if len(tasks.x) != 3:
            raise ConfigError(
                f"model.name '{cls.__name__.lower()}' needs images, these tasks have inputs {tasks.x}.",
                hint="Use model.name = mlp for regression.",
            )
        return cls(tasks.n_out, in_channels=tasks.x[0], image_size=tasks.x[1], **vars(options))

    def __post_init__(self) -> None:
        check_positive(n_way=self.n_way, in_channels=self.in_channels, image_size=self.image_size)
        check_choice("head_pool", self.head_pool, ("flatten", "mean"))
        for width in self.widths:
            self.task_norm.check_channels(width)
        if self.maps[-1] == 0:
            raise ConfigError(
                f"option 'image_size' should be at least 16 for four poolings, got {self.image_size}.",
                hint="Use larger images, or conv4 with downsample = 'stride'.",
            )

    @property
    @abstractmethod
    def widths(self) -> tuple[int, ...]:
        """Channels of the blocks."""

    @property
    @abstractmethod
    def maps(self) -> tuple[int, ...]:
        """Side of the input and of the four blocks' outputs: 84, 42, 21, 10, 5."""

    @abstractmethod
    def layers(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """List every convolution with its normalisation layer and kernel shape."""

    @abstractmethod
    def features(self, params: Params, x: Tensor) -> Float[Tensor, "task n feature"]:
        """Map images ``[B, n, C, H, W]`` to what the head sees, ``[B, n, f]``."""

    @property
    def task_norm(self) -> TaskNorm:
        """The normalisation layers."""
        return TaskNorm(
            bn=self.bn,
            affine=self.affine,
            eps=self.eps,
            groups=self.groups,
            steps=self.bn_steps,
            usage=self.usage,
        )

    @property
    def n_features(self) -> int:
        """How many numbers the head sees for each example."""
        return math.prod(self.feature_map)

    @property
    def feature_map(self) -> tuple[int, int, int]:
        """Channels, height and width of what the head sees."""
        if self.levels > 1:
            return sum(self.level_sizes), 1, 1
        return self._last_map

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Lengths of the features of each level."""
        return (*self.widths[len(self.widths) - self.levels : -1], math.prod(self._last_map))

    @property
    def _last_map(self) -> tuple[int, int, int]:
        side = 1 if self.head_pool == "mean" else self.maps[-1]
        return self.widths[-1], side, side

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the head's tensors."""
        return ("head.weight", "head.bias")

    @property
    def norm(self) -> tuple[str, ...]:
        """Names of the normalisation layers' scales and shifts."""
        return tuple(n for _, layer, _ in self.layers() for n in self.task_norm.names(layer))

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the running statistics; `init` returns them beside the parameters."""
        return tuple(n for _, layer, _ in self.layers() for n in self.task_norm.buffers(layer))

    def __call__(self, params: Params, x: Tensor) -> Float[Tensor, "task n out"]:
        """Map images ``[B, n, C, H, W]`` to logits ``[B, n, n_way]``."""
        return self.classify(params, self.features(params, x))

    def classify(self, params: Params, features: Tensor) -> Float[Tensor, "task n out"]:
        """Apply the head to ``features [B, n, f]``."""
        what = f"{type(self).__name__} head"
        check_examples(features, (self.n_features,), what=what)
        shapes = {"head.weight": (self.n_way, self.n_features), "head.bias": (self.n_way,)}
        check_params(params, shapes, tasks=features.shape[0], what=what)
        with self._multiplying(features):
            return task_linear(params, features, layer="head").to(features.dtype)

    def at(self, step: int, *, stored: bool = False, sink: Params | None = None) -> Model:
        """Return this network as used at inner step ``step``; see `Usage`."""
        return cast(Model, replace(self, usage=Usage(step=step, stored=stored, sink=sink)))

    def with_outputs(self, n_out: int) -> Model:
        """Return this network with ``n_out`` outputs."""
        return cast(Model, replace(self, n_way=n_out))

    @property
    def reads_support(self) -> bool:
        """Whether queries are normalised with the support set in training, too."""
        return self.bn in ("support", "per_query_with_support")

    def alone(self, params: Params, support_x: Tensor, *, step: int, frozen: bool) -> Answering:
        """Return the network and parameters that answer each query by itself."""
        network = cast(Model, self)
        if self.bn == "per_query_with_support":
            return BesideSupport(network, support_x), params
        if self.bn not in ("transductive", "support"):
            return self.at(step, stored=True), params
        if not frozen:
            return _AnchoredOnSupport(network, support_x), params
        # Statistics of the support set, stored where a network keeps its running averages.
        keeping, seen = replace(self, bn="running"), dict[str, Tensor]()
        with torch.no_grad():
            keeping.at(step, sink=seen).features(params, support_x)
        return keeping.at(step, stored=True), {**params, **seen}

    def anchored(self, anchors: int) -> Model:
        """Return this network, normalising everything with the statistics of its first examples."""
        return cast(Model, replace(self, usage=Usage(anchors=anchors)))

    def with_levels(self, levels: int) -> Model:
        """Return this network with features of its last ``levels`` blocks."""
        if not 1 <= levels <= len(self.widths):
            raise ConfigError(
                f"this network has {len(self.widths)} levels, got learner.levels = {levels}."
            )
        return cast(Model, replace(self, levels=levels))

    def in_one_pass(self) -> Model:
        """Return this network for the images of many tasks in one pass with shared parameters."""
        return cast(Model, replace(self, channels_last=True))

    def _laid_out(self, x: Tensor) -> Tensor:
        """Lay the tasks side by side, in the memory layout that convolutions are to work in."""
        maps = to_trunk(x)
        if self.channels_last and x.shape[0] == 1:
            return maps.contiguous(memory_format=torch.channels_last)
        return maps

    def _multiplying(self, x: Tensor) -> AbstractContextManager[object]:
        """Return the context in which products are made."""
        if not self.half:
            return nullcontext()
        # Parameters are new tensors at every inner step: a cache of their casts would only hold memory.
        return torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False)

    def _check(self, params: Params, x: Tensor) -> None:
        """Refuse images and parameters that are not those of this network."""
        what, size, norm = type(self).__name__, self.image_size, self.task_norm
        shapes: dict[str, tuple[int, ...]] = {}
        for conv, layer, shape in self.layers():
            bias = {f"{conv}.bias": shape[:1]} if self.conv_bias else {}
            shapes |= {f"{conv}.weight": shape} | bias | norm.shapes(layer, shape[0])
        check_examples(x, (self.in_channels, size, size), what=what)
        check_params(params, shapes, tasks=x.shape[0], what=what)

    def _pooled(self, maps: Tensor, tasks: int, lower: Sequence[Tensor] = ()) -> Tensor:
        """Turn the last maps into what the head sees, after the means of lower ones that are asked for."""
        last = from_trunk(maps if self.head_pool == "flatten" else maps.mean((2, 3), True), tasks)
        if self.levels == 1:
            return last
        kept = lower[len(lower) - self.levels + 1 :]
        return torch.cat([*(from_trunk(m.mean((2, 3), True), tasks) for m in kept), last], dim=-1)


@final
@dataclass(frozen=True)
class _AnchoredOnSupport(PartOf):
    """A network that normalises queries with the statistics of the support set, on their graph."""

    support_x: Tensor

    def features(self, params: Params, x: Tensor) -> Tensor:
        """Return the features of the queries."""
        n = self.support_x.shape[1]
        network: Any = self.network
        both = torch.cat([self.support_x, x], dim=1)
        found: Tensor = network.anchored(n).features(params, both)[:, n:]
        return found
