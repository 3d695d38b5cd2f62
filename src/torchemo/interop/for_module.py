"""An EMO for any ``nn.Module`` in one line."""

from typing import cast

import torch
from torch import nn

from torchemo.config.run import AggregatorConfig, AggregatorKind
from torchemo.core.errors import ConfigError
from torchemo.memory.aggregators import AGGREGATORS, Aggregator
from torchemo.memory.aggregators.build import build_aggregator
from torchemo.memory.controllers import CONTROLLERS, Controller
from torchemo.memory.emo import EMO
from torchemo.memory.keys.encoder import KeyEncoder
from torchemo.memory.policy import Policy
from torchemo.memory.recall import Retrieval
from torchemo.memory.store import EpisodicMemory


def for_module(
    module: nn.Module,
    *,
    k: int,
    capacity: int,
    aggregator: str | Aggregator = "sum",
    controller: str | Controller = "lru",
    key_dim: int | None = None,
    encoder: KeyEncoder | None = None,
    head: tuple[str, ...] = (),
    policy: Policy | None = None,
) -> EMO:
    """Build the memory optimizer for the trainable parameters of ``module``, which is only looked at.

    Args:
        module: The network that is adapted; the memory knows its tensors by ``named_parameters``.
        k: Neighbours to recall.
        capacity: Slots T; 0 switches the memory off.
        aggregator: ``mean``, ``sum``, ``gated``, ``gate``, ``coordinate`` (at their defaults), or one made
            elsewhere.
        controller: ``fifo``, ``lru``, ``clock``, or one made elsewhere.
        key_dim: Dimension of the task keys, if they come from elsewhere; an encoder knows its own.
        encoder: Key network, for `EMO.encode`.
        head: Names of the tensors of the last layer, for head alignment and the ``gate`` aggregator.
        policy: What is stored and how it is used. `recall_step` and consolidation also need
            `EMO.opening` and `EMO.offset` in the loop; combining alone does not do them.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 1))
        >>> emo = for_module(net, k=5, capacity=100, key_dim=8)
        >>> emo.memory.capacity, emo.memory.key_dim
        (100, 8)
    """
    shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
    _check_tensors(shapes, head)
    policy = Policy() if policy is None else policy
    dtype = _dtype(module)
    if isinstance(aggregator, str):
        aggregator = _aggregator(aggregator, shapes, k=k, head=head, policy=policy)
    memory = EpisodicMemory(
        capacity,
        _key_dim(key_dim, encoder),
        controller=_controller(controller) if isinstance(controller, str) else controller,
        value_dtype=dtype,
        key_dtype=dtype,
    )
    emo = EMO(memory, Retrieval(k), aggregator, encoder=encoder, policy=policy, head=head)
    return emo.to(dtype) if dtype == torch.float64 else emo


def _dtype(module: nn.Module) -> torch.dtype:
    """Keep keys and values in float64 for a network in float64, otherwise in float32."""
    double = any(p.dtype == torch.float64 for p in module.parameters())
    return torch.float64 if double else torch.float32


def _key_dim(key_dim: int | None, encoder: KeyEncoder | None) -> int:
    if key_dim is not None:
        return key_dim
    if encoder is None:
        raise ConfigError(
            "the dimension of the task keys is unknown.",
            hint="Pass key_dim=... for keys of your own, or encoder=... to have them computed.",
        )
    return encoder.dim


def _aggregator(
    name: str, shapes: dict[str, torch.Size], *, k: int, head: tuple[str, ...], policy: Policy
) -> Aggregator:
    if name not in AGGREGATORS:
        raise ConfigError(f"aggregator should be one of {list(AGGREGATORS)}, got '{name}'.")
    config = AggregatorConfig(kind=cast(AggregatorKind, name))
    return build_aggregator(config, shapes, k=k, steps=1, head=head, seed=policy.seed)


def _controller(name: str) -> Controller:
    if name not in CONTROLLERS:
        raise ConfigError(f"controller should be one of {list(CONTROLLERS)}, got '{name}'.")
    return CONTROLLERS[name]()


def _check_tensors(shapes: dict[str, torch.Size], head: tuple[str, ...]) -> None:
    if not shapes:
        raise ConfigError(
            "the module has no trainable parameter, so there is nothing to adapt or remember.",
            hint="Set requires_grad of the parameters to adapt.",
        )
    unknown = [name for name in head if name not in shapes]
    if unknown:
        raise ConfigError(
            f"head tensors {unknown} are not among the trainable parameters {list(shapes)}.",
            hint="Name tensors, not layers: 'fc.weight' and 'fc.bias'.",
        )
