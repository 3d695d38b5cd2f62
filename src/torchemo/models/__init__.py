"""Networks with a task axis: ``(params {name: [B, *shape]}, x [B, n, ...]) -> [B, n, n_out]``."""

from collections.abc import Callable, Mapping

from torchemo.core.types import Model
from torchemo.models.conv4 import Conv4
from torchemo.models.lift import Lifted, lift
from torchemo.models.mlp import MLP
from torchemo.models.resnet12 import ResNet12

MODELS: Mapping[str, Callable[..., Model]] = {
    "conv4": Conv4,
    "resnet12": ResNet12,
    "mlp": MLP,
}
"""Networks that can be named in a configuration; the options are the constructors' arguments."""

__all__ = ["MLP", "MODELS", "Conv4", "Lifted", "ResNet12", "lift"]
