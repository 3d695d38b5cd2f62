"""A network for features: the head of another one."""

from dataclasses import dataclass
from typing import final

from torch import Generator, Tensor

from torchemo.core.types import Model, Params


@final
@dataclass(frozen=True)
class OnFeatures:
    """A network whose inputs are the features of another one: what is left of it is the head."""

    network: Model

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the head's tensors."""
        return self.network.head

    @property
    def norm(self) -> tuple[str, ...]:
        """Names of scales and shifts, which it does not use."""
        return self.network.norm

    @property
    def buffers(self) -> tuple[str, ...]:
        """Nothing is averaged."""
        return ()

    def init(self, generator: Generator) -> Params:
        """Draw the parameters of the whole network."""
        return self.network.init(generator)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Apply the head."""
        return self.classify(params, x)

    def features(self, params: Params, x: Tensor) -> Tensor:
        """Return the inputs."""
        return x

    def classify(self, params: Params, features: Tensor) -> Tensor:
        """Apply the head."""
        return self.network.classify(params, features)

    def at(self, step: int, *, stored: bool = False, sink: Params | None = None) -> "OnFeatures":
        """Return this network: a head is the same at every step."""
        return self
