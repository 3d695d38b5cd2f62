"""Networks that answer each query by itself: normalised with the support set, never with other queries."""

from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, TypeAlias, cast, final, runtime_checkable

from torch import Tensor

from torchemo.core.types import Model, Params
from torchemo.models.norm import predict_with_support
from torchemo.models.trunk import PartOf, Trunk

Answering: TypeAlias = tuple[Model, Params]
"""A network and the parameters it answers with."""


@runtime_checkable
class StandsAlone(Protocol):
    """A network that knows how to answer a query without looking at others."""

    @property
    def reads_support(self) -> bool:
        """Whether it normalises queries with the support set in training, too."""
        ...

    def alone(self, params: Params, support_x: Tensor, *, step: int, frozen: bool) -> Answering:
        """Return the network and parameters that answer queries; see `alone`."""
        ...


class OneByOne:
    """What networks share that look at one example at a time and end with a linear head."""

    head: ClassVar[tuple[str, ...]] = ("head.weight", "head.bias")
    norm: ClassVar[tuple[str, ...]] = ()
    buffers: ClassVar[tuple[str, ...]] = ()
    reads_support: ClassVar[bool] = False

    def alone(self, params: Params, support_x: Tensor, *, step: int, frozen: bool) -> Answering:
        """Return this network."""
        return cast(Model, self), params

    def at(self, step: int, *, stored: bool = False, sink: Params | None = None) -> Self:
        """Return this network: it is the same at every inner step."""
        return self


@final
@dataclass(frozen=True)
class BesideSupport(PartOf):
    """A network that looks at every query in a batch made of itself and the support set."""

    support_x: Tensor

    def features(self, params: Params, x: Tensor) -> Tensor:
        """Return the features of each query, next to those of the support set."""
        # Every query gets a copy of what is passed: the trunk's tensors, not the head.
        body = {n: p for n, p in params.items() if n not in self.head and "/" not in n}
        return predict_with_support(Trunk(self.network), body, self.support_x, x)


def alone(
    model: Model, params: Params, support_x: Tensor, *, step: int = 0, frozen: bool = True
) -> Answering:
    """Return the network and parameters that answer each query of B tasks by itself.

    A network that normalises what it is given at once takes the statistics of the support set for its
    queries too. One that does not say how it treats examples sees every query beside the support set.

    Args:
        model: Any network with a task axis.
        params: Per-task parameters ``{name: [B, *shape]}``.
        support_x: Support inputs ``[B, n, ...]``.
        step: Inner step after which the parameters are.
        frozen: Compute statistics of the support set now, once, and without a graph.
    """
    if isinstance(model, StandsAlone):
        return model.alone(params, support_x, step=step, frozen=frozen)
    return BesideSupport(model, support_x), params


def reads_support(model: Model) -> bool:
    """Return whether a network normalises queries with the support set in training, too."""
    return isinstance(model, StandsAlone) and model.reads_support
