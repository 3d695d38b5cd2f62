"""A network without its head: what is left of it are the features."""

from dataclasses import dataclass
from typing import final

from torch import Generator, Tensor

from torchemo.core.types import Model, Params


@final
@dataclass(frozen=True)
class Trunk:
    """A network whose outputs are the features of another one."""

    network: Model

    @property
    def head(self) -> tuple[str, ...]:
        """Nothing is left of the head."""
        return ()

    @property
    def norm(self) -> tuple[str, ...]:
        """Names of scales and shifts."""
        return self.network.norm

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of running statistics."""
        return self.network.buffers

    def init(self, generator: Generator) -> Params:
        """Draw the parameters of the network, without those of its head."""
        theta = self.network.init(generator)
        return {name: p for name, p in theta.items() if name not in self.network.head}

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Return the features."""
        return self.features(params, x)

    def features(self, params: Params, x: Tensor) -> Tensor:
        """Return the features."""
        return self.network.features(params, x)

    def classify(self, params: Params, features: Tensor) -> Tensor:
        """Return the features as they are."""
        return features

    def at(self, step: int, *, stored: bool = False, sink: Params | None = None) -> "Trunk":
        """Return the trunk of the network as used at inner step ``step``."""
        return Trunk(self.network.at(step, stored=stored, sink=sink))
