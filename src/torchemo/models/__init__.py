"""Networks with a task axis: ``(params {name: [B, *shape]}, x [B, n, ...]) -> [B, n, n_out]``."""

from dataclasses import replace
from typing import Any

from torchemo.config.machine import Precision
from torchemo.config.registry import Part, Registry
from torchemo.core.errors import ConfigError
from torchemo.core.types import Model, TaskShape
from torchemo.models.conv4 import Conv4
from torchemo.models.lift import Lifted, lift
from torchemo.models.mlp import MLP
from torchemo.models.pretrained.network import FrozenNetwork
from torchemo.models.resnet12 import ResNet12

MODELS = Registry(
    "model",
    "model",
    {
        "conv4": "torchemo.models.conv4:Conv4",
        "resnet12": "torchemo.models.resnet12:ResNet12",
        "mlp": "torchemo.models.mlp:MLP",
        "efficientnet-lite0": "torchemo.models.pretrained.part:EFFICIENTNET_LITE0",
    },
    group="torchemo.models",
    named="torchemo.models.pretrained.part:named",
)


def frozen_network(part: Part) -> FrozenNetwork | None:
    """Load the pretrained network that sees the images first; None for networks that see them themselves."""
    kind, options = MODELS.resolve(part)
    return kind.network(options) if is_pretrained(part.name) else None


def is_pretrained(name: str) -> bool:
    """Return whether a network of this name turns images into features first."""
    return hasattr(MODELS[name], "network")


def build_model(part: Part, tasks: TaskShape) -> Model:
    """Make the network that a configuration names, for such tasks."""
    kind, options = MODELS.resolve(part)
    model: Model = kind.build(options, tasks)
    return model


def in_precision(model: Model, precision: Precision) -> Model:
    """Return a network whose products are made in a precision; TF32 is a setting of the device."""
    if precision != "bf16":
        return model
    if not hasattr(model, "half"):
        raise ConfigError(
            f"bf16 is for networks of images, not for {type(model).__name__}.",
            hint="Use --precision float32.",
        )
    network: Any = model
    changed: Model = replace(network, half=True)
    return changed


__all__ = [
    "MLP",
    "MODELS",
    "Conv4",
    "FrozenNetwork",
    "Lifted",
    "ResNet12",
    "build_model",
    "frozen_network",
    "in_precision",
    "is_pretrained",
    "lift",
]
