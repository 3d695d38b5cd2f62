"""An EMO for any ``nn.Module`` in one line."""

from typing import Any

import torch
from torch import nn

from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.memory.aggregators import AGGREGATORS, Aggregator
from torchemo.memory.aggregators.aggregator import Joined
from torchemo.memory.controllers import Controller, build_controller
from torchemo.memory.emo import EMO
from torchemo.memory.keys.encoder import KeyEncoder
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
    **choices: Any,
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
        choices: What is stored and how it is used: further arguments of `EMO`, such as ``content``. A
            ``recall_step`` also needs `EMO.opening` in the loop; combining alone does not take it.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 1))
        >>> emo = for_module(net, k=5, capacity=100, key_dim=8)
        >>> emo.store.capacity, emo.store.key_dim
        (100, 8)
    """
    shapes, dtype, seed = _trainable(module, head), _dtype(module), choices.get("seed", 0)
    joins = _aggregator(aggregator, Joined(shapes, k, 1, head, generator_for(seed, "aggregator")))
    store = _store(capacity, _key_dim(key_dim, encoder), controller, dtype=dtype, seed=seed)
    emo = EMO(store, Retrieval(k), joins, encoder=encoder, head=head, **choices)
    emo.adapted = shapes
    # Gates and temperatures beside a network in float64 are in float64, too.
    return emo.to(dtype) if dtype == torch.float64 else emo


def _store(
    capacity: int, dim: int, controller: str | Controller, *, dtype: torch.dtype, seed: int
) -> EpisodicMemory:
    if isinstance(controller, str):
        controller = build_controller(Part(controller), seed=seed)
    return EpisodicMemory(capacity, dim, controller=controller, value_dtype=dtype, key_dtype=dtype)


def _aggregator(aggregator: str | Aggregator, joined: Joined) -> Aggregator:
    """Make a named aggregator at its defaults; take one made elsewhere as it is."""
    if not isinstance(aggregator, str):
        return aggregator
    kind, options = AGGREGATORS.resolve(Part(aggregator))
    made: Aggregator = kind.build(options, joined)
    return made


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


def _trainable(module: nn.Module, head: tuple[str, ...]) -> dict[str, torch.Size]:
    """Return the shapes of what can be adapted; refuse a module without, and a head beside it."""
    shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
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
    return shapes
