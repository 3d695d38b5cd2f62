"""The last blocks of a pretrained network, which train behind features that are computed once."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchemo.core.errors import ConfigError
from torchemo.core.types import Params
from torchemo.models.alone import Answering
from torchemo.models.layers import kaiming_normal, zeros
from torchemo.models.lift import NORMS, Lifted, lift
from torchemo.models.pretrained.network import FrozenNetwork
from torchemo.models.trunk import PartOf

Trains: TypeAlias = Literal["scales", "all"]


@final
@dataclass(frozen=True)
class LastBlocks(PartOf):
    """The last blocks of a network and a head: ``x [B, n, d] -> [B, n, n_out]``; made by `cut`.

    An input holds the maps that the first blocks make of an image. Scales and shifts adapt as other
    tensors do: their layers normalise with stored statistics, so that no image depends on another.
    """

    network: Lifted

    @property
    def reads_support(self) -> bool:
        """Nothing is normalised over examples."""
        return False

    def alone(self, params: Params, support_x: Tensor, *, step: int, frozen: bool) -> Answering:
        """Return this network: it looks at one example at a time."""
        return self, params

    def init(self, generator: torch.Generator) -> Params:
        """Return the pretrained tensors that train, and draw the head."""
        theta, (weight, bias) = self.network.init(generator), self.head
        theta[weight] = kaiming_normal(tuple(theta[weight].shape), generator)
        theta[bias] = zeros(tuple(theta[bias].shape), generator)
        return theta

    def with_outputs(self, n_out: int) -> "LastBlocks":
        """Return this network with ``n_out`` outputs."""
        return replace(self, network=self.network.with_outputs(n_out))


def cut(
    network: FrozenNetwork, last: int, n_out: int, *, trains: Trains
) -> tuple[FrozenNetwork, LastBlocks]:
    """Cut a network before its last blocks: what images go through once, and what trains.

    Args:
        network: A pretrained network.
        last: Number of blocks that train; layers without parameters do not count.
        n_out: Number of outputs of the head.
        trains: ``scales`` (and shifts) of their normalisation layers, or ``all`` of their tensors.

    Raises:
        ConfigError: The network is not made of blocks, or has no more than ``last``.
    """
    steps = _steps(network)
    places = [i for i, step in enumerate(steps) if any(True for _ in step.parameters())]
    if last >= len(places):
        raise ConfigError(
            f"model.last_blocks should be at most {len(places) - 1} for '{network.name}', got {last}."
        )
    place = places[-last]
    front = replace(
        network,
        name=f"{network.name} without its last {last} blocks",
        module=_Steps(steps[:place]),
        features=lambda module, x: module(x).flatten(1),
        steps=None,
    )
    with torch.no_grad():
        maps = front.module(_noise(network)[:1])
        seen = _pooled(_Steps(steps[place:])(maps))
    blocks = [_settled(copy.deepcopy(step)) for step in steps[place:]]
    whole = _Blocks(blocks, tuple(maps.shape[1:]), nn.Linear(seen.shape[1], n_out))
    whole.eval()
    _train(whole.blocks, trains)
    whole.head.requires_grad_(True)
    return front, LastBlocks(lift(whole, head="head"))


@final
class _Steps(nn.Module):
    """Layers one after the other."""

    def __init__(self, steps: Sequence[nn.Module]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Apply them; a linear layer sees vectors."""
        for step in self.steps:
            x = step(x.flatten(1) if isinstance(step, nn.Linear) else x)
        return x


@final
class _Blocks(nn.Module):
    """Rows of maps through blocks and a head."""

    def __init__(self, blocks: Sequence[nn.Module], maps: tuple[int, ...], head: nn.Linear) -> None:
        super().__init__()
        self.blocks, self.maps, self.head = _Steps(blocks), maps, head

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the head."""
        found: Tensor = self.head(_pooled(self.blocks(x.view(-1, *self.maps))))
        return found


@final
class Settled(nn.Module):
    """BatchNorm with stored statistics, from primitives: a scale and a shift of every channel."""

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        mean, var = layer.running_mean, layer.running_var
        if mean is None or var is None:
            raise ConfigError("a pretrained network should have statistics in its BatchNorm.")
        scale = torch.ones_like(mean) if layer.weight is None else layer.weight.detach()
        shift = torch.zeros_like(mean) if layer.bias is None else layer.bias.detach()
        self.weight, self.bias = nn.Parameter(scale.clone()), nn.Parameter(shift.clone())
        self.mean: Tensor
        self.rate: Tensor
        self.register_buffer("mean", mean.detach().clone())
        self.register_buffer("rate", (var.detach() + layer.eps).rsqrt())

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, scale and shift ``x [n, c, ...]``."""
        shape = (-1, *(1,) * (x.ndim - 2))
        normal = (x - self.mean.view(shape)) * self.rate.view(shape)
        return normal * self.weight.view(shape) + self.bias.view(shape)


def _pooled(x: Tensor) -> Tensor:
    """Average maps, where there are any."""
    return x.flatten(2).mean(2) if x.ndim > 2 else x


def _steps(network: FrozenNetwork) -> list[nn.Module]:
    """Return the layers of a network in order; they must do what the network does."""
    steps = (
        list(_unfolded(network.module)) if network.steps is None else network.steps(network.module)
    )
    x = _noise(network)
    with torch.no_grad():
        try:
            found, expected = _pooled(_Steps(steps)(x)), network.features(network.module, x)
            same = torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
        except (RuntimeError, NotImplementedError):  # layers that do not fit one after the other
            same = False
    if not same:
        raise ConfigError(
            f"model.last_blocks: it is not known where the blocks of '{network.name}' begin.",
            hint="Give module:callable with an nn.Sequential, or model.last_blocks=0.",
        )
    return steps


def _noise(network: FrozenNetwork) -> Tensor:
    """Return two images of noise."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(2, 3, network.size, network.size, generator=generator)


def _unfolded(module: nn.Module) -> Sequence[nn.Module]:
    """Return the layers below a network; Sequentials count as what is in them."""
    found: list[nn.Module] = []
    for child in module.children():
        found += _unfolded(child) if isinstance(child, nn.Sequential) else [child]
    return found


def _settled(module: nn.Module) -> nn.Module:
    """Put `Settled` in the place of every BatchNorm."""
    if isinstance(module, _BatchNorm):
        return Settled(module)
    for name, child in module.named_children():
        setattr(module, name, _settled(child))
    return module


def _train(module: nn.Module, trains: Trains) -> None:
    """Make constants of all parameters that do not train."""
    for layer in module.modules():
        scales = isinstance(layer, (Settled, *NORMS))
        for name, p in list(layer.named_parameters(recurse=False)):
            if trains == "all" or scales:
                p.requires_grad_(True)
            else:
                fixed: Any = p.detach()
                delattr(layer, name)
                layer.register_buffer(name, fixed)
