"""Plain torch networks with the same weights, and derivatives taken one task at a time."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from jaxtyping import TypeCheckError
from torch import Tensor, nn
from torch.func import functional_call

from torchemo.core.errors import ConfigError

# Where annotations are enforced, a wrong literal is caught before the constructor sees it.
REFUSALS = (ConfigError, TypeCheckError)


def conv4_module(model) -> nn.Sequential:
    """Conv-4 as textbooks write it: conv, batch norm, activation, pool."""
    layers = OrderedDict()
    channels = model.in_channels
    stride = 1 if model.downsample == "pool" else 2
    for i in (1, 2, 3, 4):
        layers[f"conv{i}"] = nn.Conv2d(channels, model.filters, 3, stride=stride, padding=1)
        layers[f"norm{i}"] = nn.BatchNorm2d(model.filters, eps=model.eps, track_running_stats=False)
        layers[f"act{i}"] = nn.ReLU() if model.activation == "relu" else nn.Softplus()
        if stride == 1:
            layers[f"pool{i}"] = nn.MaxPool2d(2)
        channels = model.filters
    if model.head_pool == "mean":
        layers["mean"] = nn.AdaptiveAvgPool2d(1)
    layers["flat"] = nn.Flatten()
    layers["head"] = nn.Linear(model.n_features, model.n_way)
    return nn.Sequential(layers)


class ResidualBlock(nn.Module):
    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        channels = inside
        for i in (1, 2, 3):
            self.add_module(f"conv{i}", nn.Conv2d(channels, width, 3, padding=1, bias=False))
            self.add_module(f"norm{i}", nn.BatchNorm2d(width, track_running_stats=False))
            channels = width
        self.shortcut = nn.Conv2d(inside, width, 1, bias=False)
        self.shortcut_norm = nn.BatchNorm2d(width, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.norm1(self.conv1(x)), 0.1)
        y = F.leaky_relu(self.norm2(self.conv2(y)), 0.1)
        y = self.norm3(self.conv3(y)) + self.shortcut_norm(self.shortcut(x))
        return F.max_pool2d(F.leaky_relu(y, 0.1), 2)


def resnet12_module(model) -> nn.Sequential:
    layers = OrderedDict()
    inside = model.in_channels
    for i, width in enumerate(model.widths, start=1):
        layers[f"block{i}"] = ResidualBlock(inside, width)
        inside = width
    if model.head_pool == "mean":
        layers["mean"] = nn.AdaptiveAvgPool2d(1)
    layers["flat"] = nn.Flatten()
    layers["head"] = nn.Linear(model.n_features, model.n_way)
    return nn.Sequential(layers)


def module_names(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename our scale and shift to the weight and bias of torch's norm layers."""
    return {
        name.replace(".scale", ".weight").replace(".shift", ".bias"): value
        for name, value in params.items()
    }


def randomised(params: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Double precision parameters in general position (no zero biases, no unit scales)."""
    return {
        name: value.double() + 0.1 * torch.randn(value.shape, generator=generator).double()
        for name, value in params.items()
    }


def per_task(params: dict[str, Tensor], tasks: int, generator: torch.Generator):
    """Parameters that differ from task to task, as leaves."""
    return {
        name: (value + 0.05 * torch.randn(tasks, *value.shape, generator=generator).double())
        .detach()
        .requires_grad_()
        for name, value in params.items()
    }


def derivatives(function, params: dict[str, Tensor], directions: dict[str, Tensor]):
    """Value, gradient and Hessian-vector product of a scalar function of named tensors."""
    value = function(params)
    first = torch.autograd.grad(value, list(params.values()), create_graph=True)
    inner = sum((g * directions[name]).sum() for g, name in zip(first, params, strict=True))
    second = torch.autograd.grad(inner, list(params.values()))
    names = list(params)
    return (
        value.detach(),
        dict(zip(names, (g.detach() for g in first), strict=True)),
        dict(zip(names, second, strict=True)),
    )


def module_loss(module: nn.Module, x: Tensor, y: Tensor):
    """Cross-entropy of a plain module as a function of parameters without a task axis."""

    def loss(params: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(functional_call(module, module_names(params), (x,)), y)

    return loss


def assert_trees_close(got, expected, *, tolerance: float) -> None:
    assert list(got) == list(expected)
    for name in expected:
        torch.testing.assert_close(
            got[name],
            expected[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, name=name: f"{name}: {m}",
        )
