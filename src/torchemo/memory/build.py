"""From options to what all memories are made of (slots, search, keys), and whether it fits a learner."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch

from torchemo.config.registry import Part, Registry
from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.core.types import TaskShape
from torchemo.memory.aggregators.aggregator import Aggregator
from torchemo.memory.controllers import Controller
from torchemo.memory.interface import Host, remembers
from torchemo.memory.keys import KEYS
from torchemo.memory.keys.encoder import KeyEncoder
from torchemo.memory.recall import Retrieval
from torchemo.memory.search import INDICES, ExactIndex
from torchemo.memory.selective import SkipUnfamiliar
from torchemo.memory.store import EpisodicMemory

RATE = "rate/"
"""Prefix of the gradient of an inner rate among remembered values (Meta-SGD)."""


@dataclass(frozen=True)
class MemoryOptions:
    """Options of every memory."""

    PARTS: ClassVar[dict[str, Registry]] = {"key": KEYS}

    capacity: int = 100
    """T, slots; 0 switches the memory off. The paper: 100 (1-shot), 200 (5-shot)."""
    k: int | None = 20
    """Neighbours. The paper: 20 (1-shot), 15 (5-shot). None recalls all slots."""
    weights: Literal["uniform", "softmax"] = "softmax"
    """uniform: the paper, and the key network then never learns (A3)."""
    null_distance: float | None = None
    """Distance of an extra empty slot in the softmax: tasks unlike everything remembered recall less."""
    index: Literal["exact", "random", "approximate", "ivfpq"] = "exact"
    """random: a control that recalls arbitrary slots. approximate: for 10^5 slots and more, with the extra
    ``ann``; exact below 10^4. ivfpq: the same with keys of 24 bytes, for 10^6 and more."""
    tensors: Literal["all", "norm"] = "all"
    """norm: remember scale and shift of normalisation layers only, too few to memorise classes."""
    recall_dropout: float = 0.0
    """Probability that a meta-training task is adapted without its recall."""
    control: Literal["none", "random_values"] = "none"
    """random_values: a control that stores random directions of the same norm."""
    skip_unfamiliar: float | None = None
    """Share of tasks like those of training, such as 0.95, that use their recall in evaluation. Tasks whose
    keys lie further out skip it (ours). None recalls for all tasks."""
    value_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """How values are kept."""
    values_dir: str | None = None
    """Keep values in files in this folder, so that they may exceed RAM; checkpoints then name a version in
    it. None: in RAM."""
    key: Part = field(default_factory=lambda: Part("transformer"))
    """The task key (Eq. 4)."""

    def encoder(self, host: Host, tasks: TaskShape, *, seed: int) -> KeyEncoder | None:
        """Make the key network; None if the learner describes its tasks itself."""
        kind, options = KEYS.resolve(self.key, where="memory.key")
        if self.weights == "softmax" and not getattr(options, "unit", True):
            raise ConfigError(
                "softmax weights need unit keys, got memory.key.unit = false.",
                hint="Set memory.key.unit to true, or memory.weights to uniform.",
            )
        generator = generator_for(seed, "key-network")
        built: KeyEncoder | None = kind.build(options, host.model, tasks, generator=generator)
        return built

    def store(
        self,
        encoder: KeyEncoder | None,
        host: Host,
        *,
        controller: Controller | None = None,
        dtype: torch.dtype,
    ) -> EpisodicMemory:
        """Make the slots."""
        if encoder is None and host.key_dim is None:
            raise ConfigError(
                "memory.key.name = 'learner' needs a learner that describes its tasks: arml or hsml.",
                hint="Use memory.key.name = transformer.",
            )
        dim = host.key_dim if encoder is None else encoder.dim
        return EpisodicMemory(
            self.capacity,
            dim or 0,
            controller=controller,
            value_dtype=getattr(torch, self.value_dtype),
            key_dtype=dtype,
            values_dir=None if self.values_dir is None else Path(self.values_dir),
        )

    def retrieval(self) -> Retrieval:
        """Make search and weights."""
        return Retrieval(
            self.k,
            weights=self.weights,
            null_distance=self.null_distance,
            index=INDICES[self.index](),
        )

    def shared(self, encoder: KeyEncoder | None, host: Host, *, seed: int) -> dict[str, Any]:
        """Return what every memory takes beside slots and search, as arguments."""
        skip = self.skip_unfamiliar
        dim = host.key_dim if encoder is None else encoder.dim
        return {
            "encoder": encoder,
            "head": head_names(host),
            "norm": host.model.norm,
            "tensors": self.tensors,
            "recall_dropout": self.recall_dropout,
            "control": self.control,
            "train_keys": self.trains_keys_outside,
            "skip_unfamiliar": None if skip is None else SkipUnfamiliar(dim or 0, share=skip),
            "seed": seed,
        }

    @property
    def trains_keys_outside(self) -> bool:
        """Whether the outer loss trains the key network, through softmax weights."""
        _, options = KEYS.resolve(self.key, where="memory.key")
        return getattr(options, "training", "none") == "outer"


@final
class NoMemory:
    """The learner alone."""

    @classmethod
    def build(
        cls, options: object, host: Host, tasks: TaskShape, *, seed: int, train_steps: int | None
    ) -> None:
        """Make no memory."""
        return


def head_names(host: Host) -> tuple[str, ...]:
    """Return the names of the head tensors; rows of their rate gradients are classes too."""
    names = host.model.head
    return (*names, *(RATE + name for name in names))


def remembered_shapes(
    host: Host, content: str, *, tensors: str = "all", drop_head: bool = False
) -> dict[str, torch.Size]:
    """Return the names and shapes of what is remembered of a task."""
    head, norm = head_names(host), host.model.norm
    shapes = {
        name: shape
        for name, shape in host.remembered(content).items()
        if remembers(name, tensors=tensors, drop_head=drop_head, head=head, norm=norm)
    }
    if not shapes:
        raise ConfigError(
            f"nothing is left to remember of {host.title}: what it adapts is left out by memory.head_align"
            f" or by memory.tensors '{tensors}'.",
            hint="Set memory.tensors to all, or memory.content to meta, which is not limited to what is"
            " adapted.",
        )
    return shapes


def check_host(host: Host, *, scope: str) -> None:
    """Refuse a memory of gradients for a learner that cannot use one, or that does not group tasks."""
    if not host.inner_loop:
        raise ConfigError(
            f"{host.title} takes no gradient steps that a memory of gradients could join.",
            hint="Use memory.name = offsets, or no memory.",
        )
    if scope == "group" and not host.groups:
        raise ConfigError(
            "a memory per group needs a learner that groups tasks (tsa-maml).",
            hint="Set memory.scope to shared.",
        )


def check_joins(
    host: Host, shapes: dict[str, torch.Size], aggregator: Aggregator, *, name: str
) -> None:
    """Refuse a memory that could never join a gradient, or whose aggregator could never learn."""
    if host.adapted and not shapes.keys() & set(host.adapted) and "coordinates" not in shapes:
        raise ConfigError(
            "what would be remembered is not adapted, so that no recall could ever join a gradient.",
            hint="Set learner.adapt_bn to true, or use memory.name = offsets.",
        )
    if not host.differentiable and any(p.requires_grad for p in aggregator.parameters()):
        raise ConfigError(
            f"{host.title} has no outer gradient to train the aggregator '{name}' with.",
            hint="Set memory.aggregator.name to mean or sum.",
        )


def check_groups(aggregator: Aggregator, retrieval: Retrieval) -> None:
    """Refuse parts of a memory per group that need as many slots for every task."""
    if not aggregator.any_number:
        raise ConfigError(
            "a memory per group recalls a different number of slots for every task, which only the"
            " aggregators sum and gated take.",
            hint="Set memory.aggregator.name to sum or gated, or memory.scope to shared.",
        )
    if not isinstance(retrieval.index, ExactIndex):
        raise ConfigError(
            "a memory per group is searched exactly.", hint="Set memory.index to exact."
        )
