"""Conv-4: four blocks of convolution, normalisation, activation and halving, then a linear head."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar, Literal, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.tree import task
from torchemo.core.types import Params, TaskShape
from torchemo.models.fused import conv_block, require, usable
from torchemo.models.inputs import (
    check_choice,
    check_examples,
    check_images,
    check_params,
    check_positive,
)
from torchemo.models.layers import (
    ACTIVATIONS,
    from_trunk,
    glorot_uniform,
    kaiming_normal,
    task_conv,
    task_linear,
    to_trunk,
    zeros,
)
from torchemo.models.norm import Affine, Bn, TaskNorm, Usage

BLOCKS = 4

INITIALIZERS: Mapping[str, Callable[[tuple[int, ...], torch.Generator], Tensor]] = {
    "glorot": glorot_uniform,
    "kaiming": kaiming_normal,
}


@final
@dataclass(frozen=True)
class Conv4Options:
    """Options of Conv-4."""

    filters: int = 32
    """Filters per layer."""
    head_pool: Literal["flatten", "mean"] = "flatten"
    """What the head sees of the last map."""
    downsample: Literal["pool", "stride"] = "pool"
    """Max-pooling, or stride 2 (the original Omniglot network)."""
    bn: Bn = "transductive"
    """Whose statistics normalise an image; transductive is the field's habit for MAML."""


@final
@dataclass(frozen=True)
class Conv4:
    """The four-block convolutional network of the few-shot literature, with a task axis.

    ``x [B, n, in_channels, image_size, image_size] -> [B, n, n_way]`` with per-task parameters
    ``conv1.weight [B, filters, in_channels, 3, 3]``, ``conv1.bias``, ``norm1.scale``, ``norm1.shift``, ...,
    ``head.weight [B, n_way, f]``, ``head.bias``. With 84 px and 32 filters the maps are 84-42-21-10-5,
    f = 800, and a 5-way network has 32 901 parameters.

    Attributes:
        n_way: Number of outputs.
        in_channels: Channels of the images.
        image_size: Height and width of the images.
        filters: Channels of every block.
        downsample: ``pool`` (max-pool 2x2, floor) or ``stride`` (convolutions with stride 2, no pooling:
            the Omniglot network of MAML).
        head_pool: ``flatten`` the last maps or take their ``mean``.
        bn: Normalisation, see `TaskNorm`.
        affine: ``both`` scale and shift, or ``shift`` alone (the original MAML code).
        eps: Added to variances.
        groups: Channel groups of ``bn = "group"``.
        bn_steps: Stored inner steps of ``bn = "per_step_running"``.
        activation: ``relu``; smooth ones are for finite-difference checks.
        initializer: ``glorot`` (uniform) or ``kaiming`` (normal, fan in); biases start at 0.
        path: How the blocks are computed: ``fused`` compiled kernels, the ``reference`` of torch
            operations, or ``auto``: fused where `torchemo.models.fused` can (one task at a time on a CPU,
            pooling, ReLU, transductive normalisation), else the reference. The results agree up to rounding.
        usage: Set by `at`.

    Example:
        >>> from torchemo.core.rng import generator_for
        >>> from torchemo.core.tree import expand
        >>> model = Conv4(5, image_size=16, filters=4)
        >>> params = expand(model.init(generator_for(0, "init")), 2)
        >>> model(params, torch.rand(2, 10, 3, 16, 16)).shape
        torch.Size([2, 10, 5])
    """

    n_way: int
    _: KW_ONLY
    in_channels: int = 3
    image_size: int = 84
    filters: int = 32
    downsample: Literal["pool", "stride"] = "pool"
    head_pool: Literal["flatten", "mean"] = "flatten"
    bn: Bn = "transductive"
    affine: Affine = "both"
    eps: float = 1e-3
    groups: int = 8
    bn_steps: int = 5
    activation: Literal["relu", "softplus", "tanh"] = "relu"
    initializer: Literal["glorot", "kaiming"] = "glorot"
    path: Literal["auto", "fused", "reference"] = "auto"
    usage: Usage = field(default=Usage(), repr=False, compare=False)

    Options: ClassVar[type[Conv4Options]] = Conv4Options

    @classmethod
    def build(cls, options: Conv4Options, tasks: TaskShape) -> "Conv4":
        """Make the network from its options, for such tasks."""
        check_images(tasks, name="conv4")
        return cls(
            tasks.n_out,
            in_channels=tasks.x[0],
            image_size=tasks.x[1],
            filters=options.filters,
            head_pool=options.head_pool,
            downsample=options.downsample,
            bn=options.bn,
        )

    def __post_init__(self) -> None:
        check_positive(n_way=self.n_way, in_channels=self.in_channels, filters=self.filters)
        check_positive(image_size=self.image_size)
        check_choice("downsample", self.downsample, ("pool", "stride"))
        check_choice("head_pool", self.head_pool, ("flatten", "mean"))
        check_choice("activation", self.activation, tuple(ACTIVATIONS))
        check_choice("initializer", self.initializer, tuple(INITIALIZERS))
        self.task_norm.check_channels(self.filters)
        self._check_path()
        if self.maps[-1] == 0:
            raise ConfigError(
                f"option 'image_size' should be at least 16 for four poolings, got {self.image_size}.",
                hint="Use larger images, or downsample = 'stride'.",
            )

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
    def maps(self) -> tuple[int, ...]:
        """Side of the input and of the four blocks' outputs: 84, 42, 21, 10, 5."""
        sides = [self.image_size]
        for _ in range(BLOCKS):
            sides.append(sides[-1] // 2 if self.downsample == "pool" else (sides[-1] + 1) // 2)
        return tuple(sides)

    @property
    def n_features(self) -> int:
        """How many numbers the head sees for each example."""
        return self.filters * (1 if self.head_pool == "mean" else self.maps[-1] ** 2)

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the head's tensors."""
        return ("head.weight", "head.bias")

    @property
    def norm(self) -> tuple[str, ...]:
        """Names of the normalisation layers' scales and shifts."""
        return tuple(n for i in range(BLOCKS) for n in self.task_norm.names(f"norm{i + 1}"))

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the running statistics; `init` returns them beside the parameters."""
        return tuple(n for i in range(BLOCKS) for n in self.task_norm.buffers(f"norm{i + 1}"))

    def init(self, generator: torch.Generator) -> Params:
        """Draw kernels and head, block by block; biases and shifts 0, scales 1."""
        draw, norm, params = INITIALIZERS[self.initializer], self.task_norm, {}
        for i in range(BLOCKS):
            for name, shape in self._conv_shapes(i).items():
                params[name] = (zeros if name.endswith("bias") else draw)(shape, generator)
            params |= norm.init(f"norm{i + 1}", self.filters, device=generator.device)
        params["head.weight"] = draw((self.n_way, self.n_features), generator)
        params["head.bias"] = zeros((self.n_way,), generator)
        return params

    def __call__(self, params: Params, x: Tensor) -> Float[Tensor, "task n out"]:
        """Map images ``[B, n, C, H, W]`` to logits ``[B, n, n_way]``."""
        return self.classify(params, self.features(params, x))

    def features(self, params: Params, x: Tensor) -> Float[Tensor, "task n feature"]:
        """Map images ``[B, n, C, H, W]`` to what the head sees, ``[B, n, f]``."""
        check_examples(x, (self.in_channels, self.image_size, self.image_size), what="Conv4")
        tasks, norm = x.shape[0], self.task_norm
        check_params(params, self._body_shapes(), tasks=tasks, what="Conv4")
        if self._fuses(x):
            if tasks == 1:
                return self._fused(params, x)
            return torch.cat([self._fused(task(params, b), x[b : b + 1]) for b in range(tasks)])
        maps = to_trunk(x)
        for i in range(BLOCKS):
            stride = 1 if self.downsample == "pool" else 2
            maps = task_conv(params, maps, layer=f"conv{i + 1}", stride=stride)
            maps = norm(params, maps, layer=f"norm{i + 1}", tasks=tasks)
            # Activations are monotone, so pooling first gives the same maps with a quarter of the work.
            maps = F.max_pool2d(maps, 2) if self.downsample == "pool" else maps
            maps = ACTIVATIONS[self.activation](maps)
        return self._flat(maps, tasks)

    def classify(self, params: Params, features: Tensor) -> Float[Tensor, "task n out"]:
        """Apply the head to ``features [B, n, f]``."""
        check_examples(features, (self.n_features,), what="Conv4 head")
        shapes = {"head.weight": (self.n_way, self.n_features), "head.bias": (self.n_way,)}
        check_params(params, shapes, tasks=features.shape[0], what="Conv4 head")
        return task_linear(params, features, layer="head")

    def at(self, step: int, *, stored: bool = False, sink: Params | None = None) -> "Conv4":
        """Return this network as used at inner step ``step``; see `Usage`."""
        return replace(self, usage=Usage(step=step, stored=stored, sink=sink))

    @property
    def _fusible(self) -> bool:
        """Whether the compiled block is this network's block."""
        block = (self.downsample, self.bn, self.activation)
        return block == ("pool", "transductive", "relu")

    def _check_path(self) -> None:
        check_choice("path", self.path, ("auto", "fused", "reference"))
        if self.path == "fused" and not self._fusible:
            raise ConfigError(
                "path = 'fused' needs downsample = 'pool', bn = 'transductive' and activation = 'relu',"
                f" got '{self.downsample}', '{self.bn}' and '{self.activation}'.",
                hint="Use path = 'auto', or one of these options.",
            )

    def _fuses(self, x: Tensor) -> bool:
        if self.path == "fused":
            require(x)
            return True
        # Many tasks in one call ask for the batched path, which grouped convolutions serve.
        return self.path == "auto" and self._fusible and x.shape[0] == 1 and usable(x)

    def _fused(self, params: Params, x: Tensor) -> Tensor:
        """Compute the features of one task by the compiled block, ``[1, n, f]``."""
        # Views, where indexing would copy zeros around every gradient on the way back.
        own, maps = {name: value.squeeze(0) for name, value in params.items()}, x.squeeze(0)
        for i in range(1, BLOCKS + 1):
            shift = own[f"norm{i}.shift"]
            scale = own[f"norm{i}.scale"] if self.affine == "both" else torch.ones_like(shift)
            kernel, bias = own[f"conv{i}.weight"], own[f"conv{i}.bias"]
            vectors = {"bias": bias, "scale": scale, "shift": shift}
            maps = conv_block(maps, kernel, **vectors, eps=self.eps, pictures=i == 1)
        return self._flat(maps, 1)

    def _flat(self, maps: Tensor, tasks: int) -> Tensor:
        return from_trunk(maps if self.head_pool == "flatten" else maps.mean((2, 3), True), tasks)

    def _conv_shapes(self, block: int) -> dict[str, tuple[int, ...]]:
        inside = self.in_channels if block == 0 else self.filters
        name = f"conv{block + 1}"
        return {f"{name}.weight": (self.filters, inside, 3, 3), f"{name}.bias": (self.filters,)}

    def _body_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(BLOCKS):
            norm = self.task_norm.shapes(f"norm{i + 1}", self.filters)
            shapes |= self._conv_shapes(i) | norm
        return shapes
