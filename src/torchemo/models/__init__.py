"""Networks with a task axis: ``(params {name: [B, *shape]}, x [B, n, ...]) -> [B, n, n_out]``."""

from torchemo.config.registry import Part, Registry
from torchemo.core.types import Model, TaskShape
from torchemo.models.conv4 import Conv4
from torchemo.models.lift import Lifted, lift
from torchemo.models.mlp import MLP
from torchemo.models.resnet12 import ResNet12

MODELS = Registry(
    "model",
    "model",
    {
        "conv4": "torchemo.models.conv4:Conv4",
        "resnet12": "torchemo.models.resnet12:ResNet12",
        "mlp": "torchemo.models.mlp:MLP",
    },
    group="torchemo.models",
)


def build_model(part: Part, tasks: TaskShape) -> Model:
    """Make the network that a configuration names, for such tasks."""
    kind, options = MODELS.resolve(part)
    model: Model = kind.build(options, tasks)
    return model


__all__ = ["MLP", "MODELS", "Conv4", "Lifted", "ResNet12", "build_model", "lift"]
