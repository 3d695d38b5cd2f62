"""A network cut in two: the trunk that makes features, and the head that reads them."""

from dataclasses import dataclass, replace
from typing import final

from torch import Generator, Tensor

from torchemo.core.types import Model, Params


@dataclass(frozen=True)
class PartOf:
    """A part of a network; what it does not say itself is as in the whole."""

    network: Model

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the head's tensors."""
        return self.network.head

    @property
    def norm(self) -> tuple[str, ...]:
        """Names of scales and shifts."""
        return self.network.norm

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of running statistics."""
        return self.network.buffers

    def init(self, generator: Generator) -> Params:
        """Draw the parameters of the whole network."""
        return self.network.init(generator)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Apply the head to the features."""
        return self.classify(params, self.features(params, x))

    def features(self, params: Params, x: Tensor) -> Tensor:
        """Return the features."""
        return self.network.features(params, x)

    def classify(self, params: Params, features: Tensor) -> Tensor:
        """Apply the head."""
        return self.network.classify(params, features)

    def at(self, step: int, *, stored: bool = False, sink: Params | None = None) -> "PartOf":
        """Return this part of the network as used at inner step ``step``."""
        return replace(self, network=self.network.at(step, stored=stored, sink=sink))


@final
@dataclass(frozen=True)
class Trunk(PartOf):
    """A network whose outputs are the features of another one."""

    @property
    def head(self) -> tuple[str, ...]:
        """Nothing is left of the head."""
        return ()

    def init(self, generator: Generator) -> Params:
        """Draw the parameters of the network, without those of its head."""
        theta = super().init(generator)
        return {name: p for name, p in theta.items() if name not in self.network.head}

    def classify(self, params: Params, features: Tensor) -> Tensor:
        """Return the features as they are."""
        return features


@final
@dataclass(frozen=True)
class OnFeatures(PartOf):
    """A network whose inputs are the features of another one: what is left of it is the head."""

    @property
    def buffers(self) -> tuple[str, ...]:
        """Nothing is averaged."""
        return ()

    def features(self, params: Params, x: Tensor) -> Tensor:
        """Return the inputs."""
        return x
