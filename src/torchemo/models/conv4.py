"""Conv-4: four blocks of convolution, normalisation, activation and halving, then a linear head."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.task_axis import take
from torchemo.core.types import Params
from torchemo.models.fused import conv_block, require, usable
from torchemo.models.images import ImageNetwork
from torchemo.models.inputs import check_choice, check_positive
from torchemo.models.layers import (
    ACTIVATIONS,
    glorot_uniform,
    kaiming_normal,
    task_conv,
    zeros,
)
from torchemo.models.norm import Bn

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
class Conv4(ImageNetwork):
    """The four-block convolutional network of the few-shot literature, with a task axis.

    ``x [B, n, in_channels, image_size, image_size] -> [B, n, n_way]`` with per-task parameters
    ``conv1.weight [B, filters, in_channels, 3, 3]``, ``conv1.bias``, ``norm1.scale``, ``norm1.shift``, ...,
    ``head.weight [B, n_way, f]``, ``head.bias``. With 84 px and 32 filters the maps are 84-42-21-10-5,
    f = 800, and a 5-way network has 32 901 parameters.

    Attributes:
        filters: Channels of every block.
        downsample: ``pool`` (max-pool 2x2, floor) or ``stride`` (convolutions with stride 2, no pooling:
            the Omniglot network of MAML).
        activation: ``relu``; smooth ones are for finite-difference checks.
        initializer: ``glorot`` (uniform) or ``kaiming`` (normal, fan in); biases start at 0.
        path: How the blocks are computed: ``fused`` compiled kernels, the ``reference`` of torch
            operations, or ``auto``: fused where `torchemo.models.fused` can (one task at a time on a CPU,
            pooling, ReLU, transductive normalisation), else the reference. The results agree up to rounding.
        others: See `ImageNetwork`.

    Example:
        >>> from torchemo.core.rng import generator_for
        >>> from torchemo.core.tree import expand
        >>> model = Conv4(5, image_size=16, filters=4)
        >>> params = expand(model.init(generator_for(0, "init")), 2)
        >>> model(params, torch.rand(2, 10, 3, 16, 16)).shape
        torch.Size([2, 10, 5])
    """

    Options: ClassVar[type[Conv4Options]] = Conv4Options
    conv_bias: ClassVar[bool] = True

    _: KW_ONLY
    filters: int = 32
    downsample: Literal["pool", "stride"] = "pool"
    activation: Literal["relu", "softplus", "tanh"] = "relu"
    initializer: Literal["glorot", "kaiming"] = "glorot"
    path: Literal["auto", "fused", "reference"] = "auto"

    def __post_init__(self) -> None:
        check_positive(filters=self.filters)
        check_choice("downsample", self.downsample, ("pool", "stride"))
        check_choice("activation", self.activation, tuple(ACTIVATIONS))
        check_choice("initializer", self.initializer, tuple(INITIALIZERS))
        self._check_path()
        super().__post_init__()

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of the blocks: all the same."""
        return (self.filters,) * BLOCKS

    @property
    def maps(self) -> tuple[int, ...]:
        """Side of the input and of the four blocks' outputs: 84, 42, 21, 10, 5."""
        sides = [self.image_size]
        for _ in range(BLOCKS):
            sides.append(sides[-1] // 2 if self.downsample == "pool" else (sides[-1] + 1) // 2)
        return tuple(sides)

    def init(self, generator: torch.Generator) -> Params:
        """Draw kernels and head, block by block; biases and shifts 0, scales 1."""
        draw, norm, params = INITIALIZERS[self.initializer], self.task_norm, {}
        for conv, layer, shape in self.layers():
            params[f"{conv}.weight"] = draw(shape, generator)
            params[f"{conv}.bias"] = zeros(shape[:1], generator)
            params |= norm.init(layer, shape[0], device=generator.device)
        params["head.weight"] = draw((self.n_way, self.n_features), generator)
        params["head.bias"] = zeros((self.n_way,), generator)
        return params

    def features(self, params: Params, x: Tensor) -> Float[Tensor, "task n feature"]:
        """Map images ``[B, n, C, H, W]`` to what the head sees, ``[B, n, f]``."""
        self._check(params, x)
        tasks, norm = x.shape[0], self.task_norm
        if self._fuses(x):
            if tasks == 1:
                return self._fused(params, x)
            each = (take((params, x), slice(b, b + 1)) for b in range(tasks))
            return torch.cat([self._fused(own, images) for own, images in each])
        maps, lower = self._laid_out(x), list[Tensor]()
        with self._multiplying(x):
            for i in range(BLOCKS):
                stride = 1 if self.downsample == "pool" else 2
                maps = task_conv(params, maps, layer=f"conv{i + 1}", stride=stride)
                maps = norm(params, maps, layer=f"norm{i + 1}", tasks=tasks)
                # Activations are monotone: pooling first gives the same maps with a quarter of the work.
                maps = F.max_pool2d(maps, 2) if self.downsample == "pool" else maps
                maps = ACTIVATIONS[self.activation](maps)
                if self.levels > 1:
                    lower.append(maps)
        return self._pooled(maps, tasks, lower[:-1]).to(x.dtype)

    def layers(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """List every convolution with its normalisation layer and kernel shape."""
        inside = (self.in_channels, *self.widths)
        return [
            (f"conv{i + 1}", f"norm{i + 1}", (self.filters, inside[i], 3, 3)) for i in range(BLOCKS)
        ]

    @property
    def _fusible(self) -> bool:
        """Whether the compiled block is this network's block."""
        batch = self.bn in ("transductive", "support") and not self.usage.anchors
        return batch and self.levels == 1 and (self.downsample, self.activation) == ("pool", "relu")

    def _check_path(self) -> None:
        check_choice("path", self.path, ("auto", "fused", "reference"))
        if self.path == "fused" and not self._fusible:
            raise ConfigError(
                "path = 'fused' needs downsample = 'pool', bn = 'transductive' or 'support' and activation ="
                " 'relu',"
                f" got '{self.downsample}', '{self.bn}' and '{self.activation}'.",
                hint="Use path = 'auto', or one of these options.",
            )

    def _fuses(self, x: Tensor) -> bool:
        if self.half:
            return False  # the kernels multiply in the precision of the images
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
        return self._pooled(maps, 1)
