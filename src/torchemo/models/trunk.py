"""A network cut in two: the trunk that makes features, and the head that reads them."""

import math
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


def feature_map(model: Model) -> tuple[int, int, int]:
    """Return channels, height and width of what a network's head sees; a vector is a map of one place."""
    shape = getattr(model, "feature_map", None)
    if shape is not None:
        channels, height, width = shape
        return channels, height, width
    weights = model.init(Generator())
    return weights[model.head[0]].shape[-1], 1, 1


def feature_count(model: Model) -> int:
    """Return how many numbers a network's head sees of an example."""
    return math.prod(feature_map(model))


def with_levels(model: Model, levels: int) -> Model:
    """Return a network whose features are those of several depths, where it can; see `level_sizes`."""
    made = getattr(model, "with_levels", None)
    return model if made is None else made(levels)


def level_sizes(model: Model) -> tuple[int, ...]:
    """Return the lengths of the features of each depth, the last block's at the end."""
    sizes = getattr(model, "level_sizes", None)
    return (feature_count(model),) if sizes is None else sizes


def in_one_pass(model: Model) -> Model:
    """Return a network as it is fastest for the examples of many tasks with shared parameters."""
    made = getattr(model, "in_one_pass", None)
    return model if made is None else made()
