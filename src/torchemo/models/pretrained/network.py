"""A pretrained network as a function from images to features."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn

from torchemo.core.errors import ConfigError

Triple = tuple[float, float, float]

AT_ONCE = 32
"""Images of one pass: many would need much memory, and few would take longer."""


@final
@dataclass(frozen=True, eq=False)
class FrozenNetwork:
    """A network in evaluation mode: BatchNorm uses its stored statistics, nothing is trained.

    The features of an image therefore depend on no other image.

    Attributes:
        name: How a configuration names it.
        module: The network, made for images of this size.
        size: Side of the images that it sees.
        mean: Subtracted from red, green and blue in 0 .. 255.
        std: What they are then divided by.
        trained_on: What it was trained on, where that is known: test classes should not be among it.
        features: Maps the module and images ``[n, 3, size, size]`` to ``[n, d]``; by default the module does.
        steps: Returns the layers of the module in their order; None takes those that are directly below it.
    """

    name: str
    module: nn.Module
    size: int
    mean: Triple = (0.0, 0.0, 0.0)
    std: Triple = (255.0, 255.0, 255.0)
    features: Callable[[nn.Module, Tensor], Tensor] = lambda module, x: module(x)
    trained_on: str | None = None
    steps: Callable[[nn.Module], list[nn.Module]] | None = None

    def __post_init__(self) -> None:
        self.module.eval().requires_grad_(False)

    def described(self) -> dict[str, Any]:
        """Return what the features depend on."""
        return {"name": self.name, "digest": self.digest, "size": self.size}

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of its weights, statistics and normalisation."""
        digest = hashlib.sha256(repr((self.mean, self.std)).encode())
        for name, tensor in sorted(self.module.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def features_of(self, x: Float32[Tensor, "n 3 h w"]) -> Tensor:
        """Return the features of images 0 .. 255, as one pass of the network."""
        mean, std = (
            torch.tensor(three, device=x.device).view(3, 1, 1) for three in (self.mean, self.std)
        )
        return self.features(self.module, (x - mean) / std)

    def __call__(self, images: UInt8[np.ndarray, "n 3 h w"]) -> Float32[np.ndarray, "n d"]:
        """Compute the features of images, 0 .. 255."""
        with torch.inference_mode():
            x = torch.from_numpy(np.ascontiguousarray(images))
            z = torch.cat([self.features_of(p.float()) for p in torch.split(x, AT_ONCE)])
        if z.ndim != 2 or len(z) != len(x):
            raise ConfigError(
                f"model.name '{self.name}': the network should return features [n, d] for {len(x)} images,"
                f" got {list(z.shape)}.",
                hint="Pool and flatten the maps inside the network.",
            )
        return z.float().numpy()
