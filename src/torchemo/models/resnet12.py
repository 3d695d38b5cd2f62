"""ResNet-12 in the form of MetaOptNet (Lee et al. 2019): four residual blocks, then a linear head."""

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Params
from torchemo.models.dropout import DropConfig, drop_block, dropout
from torchemo.models.images import ImageNetwork
from torchemo.models.inputs import check_choice, check_positive
from torchemo.models.layers import (
    glorot_uniform,
    kaiming_normal,
    task_conv,
    zeros,
)
from torchemo.models.norm import Bn

Widths: TypeAlias = tuple[int, int, int, int]

WIDE: Widths = (64, 160, 320, 640)
NARROW: Widths = (64, 128, 256, 512)

SLOPE = 0.1


@final
@dataclass(frozen=True)
class ResNet12Options:
    """Options of ResNet-12."""

    channels: Literal["wide", "narrow"] = "narrow"
    """64-160-320-640 or 64-128-256-512."""
    bn: Bn = "transductive"
    """Whose statistics normalise an image; transductive is the field's habit for MAML."""


@final
@dataclass(frozen=True)
class ResNet12(ImageNetwork):
    """Four residual blocks with a task axis: ``x [B, n, C, H, W] -> [B, n, n_way]``.

    A block is three times 3x3 convolution (no bias) and normalisation, LeakyReLU(0.1) after the first two and
    after the sum with a 1x1 convolution and normalisation of its input, then max-pool 2x2. Per-task
    parameters: ``block1.conv1.weight``, ``block1.norm1.scale``, ``block1.norm1.shift``, ...,
    ``block1.shortcut.weight``, ``block1.shortcut_norm.scale``, ..., ``head.weight``, ``head.bias``.

    Attributes:
        channels: ``wide`` (64-160-320-640, 12.42 M), ``narrow`` (64-128-256-512, 8.00 M) or four widths.
        head_pool: ``mean`` of the last maps (640 features) or ``flatten`` (16 000 at 84 px).
        drop: What is dropped while training; nothing is dropped without a generator.
        generator: Set by `with_generator`.
        others: See `ImageNetwork`.

    Choice: ``eps`` is torch's 1e-5, with which the form was published; the head is drawn as in Conv-4.

    Example:
        >>> from torchemo.core.rng import generator_for
        >>> from torchemo.core.tree import expand
        >>> model = ResNet12(5, image_size=16, channels=(4, 8, 8, 8))
        >>> params = expand(model.init(generator_for(0, "init")), 2)
        >>> model(params, torch.rand(2, 10, 3, 16, 16)).shape
        torch.Size([2, 10, 5])
    """

    Options: ClassVar[type[ResNet12Options]] = ResNet12Options

    _: KW_ONLY
    channels: Literal["wide", "narrow"] | Widths = "wide"
    head_pool: Literal["flatten", "mean"] = "mean"
    drop: DropConfig | None = None
    eps: float = 1e-5
    generator: torch.Generator | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.channels, str):
            check_choice("channels", self.channels, ("wide", "narrow"))
        if len(self.widths) != 4:
            raise ConfigError(
                f"option 'channels' should be wide, narrow or four widths, got {self.channels}."
            )
        check_positive(**{f"channels[{i}]": width for i, width in enumerate(self.widths)})
        super().__post_init__()

    @property
    def widths(self) -> Widths:
        """Channels of the four blocks."""
        if isinstance(self.channels, str):
            return WIDE if self.channels == "wide" else NARROW
        return self.channels

    @property
    def maps(self) -> tuple[int, ...]:
        """Side of the input and of the four blocks' outputs: 84, 42, 21, 10, 5."""
        return tuple(self.image_size // 2**i for i in range(5))

    def init(self, generator: torch.Generator) -> Params:
        """Draw kernels (Kaiming normal, fan out) and head, block by block; shifts 0, scales 1."""
        norm, params = self.task_norm, {}
        for conv, layer, shape in self.layers():
            params[f"{conv}.weight"] = kaiming_normal(shape, generator, fan="out")
            params |= norm.init(layer, shape[0], device=generator.device)
        params["head.weight"] = glorot_uniform((self.n_way, self.n_features), generator)
        params["head.bias"] = zeros((self.n_way,), generator)
        return params

    def with_generator(self, generator: torch.Generator) -> "ResNet12":
        """Return this network as trained: what ``drop`` says is dropped, drawn from ``generator``.

        Masks are drawn in the order of the calls. Give every task its own copy and generator where the result
        must not depend on how tasks are batched.
        """
        return replace(self, generator=generator)

    def features(self, params: Params, x: Tensor) -> Float[Tensor, "task n feature"]:
        """Map images ``[B, n, C, H, W]`` to what the head sees, ``[B, n, f]``."""
        self._check(params, x)
        tasks, maps, lower = x.shape[0], self._laid_out(x), list[Tensor]()
        with self._multiplying(x):
            for block in range(4):
                maps = self._residual(params, maps, block=block, tasks=tasks)
                # The activation is monotone, so pooling first gives the same maps with less work.
                maps = F.leaky_relu(F.max_pool2d(maps, 2), SLOPE)
                maps = self._dropped(maps, block=block, tasks=tasks)
                if self.levels > 1:
                    lower.append(maps)
        return self._pooled(maps, tasks, lower[:-1]).to(x.dtype)

    def _residual(self, params: Params, x: Tensor, *, block: int, tasks: int) -> Tensor:
        norm, prefix, maps = self.task_norm, f"block{block + 1}", x
        for i in (1, 2, 3):
            maps = task_conv(params, maps, layer=f"{prefix}.conv{i}")
            maps = norm(params, maps, layer=f"{prefix}.norm{i}", tasks=tasks)
            maps = F.leaky_relu(maps, SLOPE) if i < 3 else maps
        shortcut = task_conv(params, x, layer=f"{prefix}.shortcut")
        return maps + norm(params, shortcut, layer=f"{prefix}.shortcut_norm", tasks=tasks)

    def _dropped(self, maps: Tensor, *, block: int, tasks: int) -> Tensor:
        if self.drop is None or self.generator is None:
            return maps
        if block < 2:
            return dropout(maps, self.drop.dropout, generator=self.generator)
        return drop_block(maps, self.drop, tasks=tasks, generator=self.generator)

    def layers(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """List every convolution with its normalisation layer and kernel shape."""
        layers: list[tuple[str, str, tuple[int, ...]]] = []
        inside = self.in_channels
        for i, width in enumerate(self.widths, start=1):
            for j, channels in enumerate((inside, width, width), start=1):
                layers.append((f"block{i}.conv{j}", f"block{i}.norm{j}", (width, channels, 3, 3)))
            shortcut = (width, inside, 1, 1)
            layers.append((f"block{i}.shortcut", f"block{i}.shortcut_norm", shortcut))
            inside = width
        return layers
