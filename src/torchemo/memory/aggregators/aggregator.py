"""What an aggregator is."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from torchemo.core.types import Params, Recall


class Joined(NamedTuple):
    """What an aggregator is made for.

    Attributes:
        shapes: Names and shapes of the tensors that are remembered.
        k: Neighbours that a full memory recalls.
        steps: Inner steps of training, for gates per step.
        head: Names of the head tensors.
        generator: Source of its weights.
    """

    shapes: dict[str, torch.Size]
    k: int
    steps: int
    head: tuple[str, ...]
    generator: torch.Generator


@runtime_checkable
class Aggregator(Protocol):
    """``Aggr(g, V)`` of Eq. 7: a direction with the structure of the gradient.

    Tensors without recalled values go the way of `own_only`, and so does everything when nothing
    was recalled (m = 0). `Recall.active` is the caller's business: its choice is between `forward`
    and `own_only`.
    """

    any_number: bool
    """Whether tasks may recall different numbers of slots, the others having weight zero."""

    def forward(self, grads: Params, recall: Recall, *, step: int = 0) -> Params:
        """Combine own and recalled gradients.

        Args:
            grads: Support gradients g, ``{name: [B, *shape]}``.
            recall: Recalled values V_j, ``{name: [B, m, *shape]}``, and weights a_j, ``[B, m]``.
            step: Inner step s, counted from 0.
        """
        ...

    def __call__(self, grads: Params, recall: Recall, *, step: int = 0) -> Params:
        """Run `forward`."""
        ...

    def recall_only(self, recall: Recall, *, step: int = 0) -> Params:
        """Return the direction where there is no support gradient yet; zero when m = 0."""
        ...

    def own_only(self, grads: Params) -> Params:
        """Return the direction where the memory is not used."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield what the outer loss trains, as any `nn.Module` does."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the same with names."""
        ...
