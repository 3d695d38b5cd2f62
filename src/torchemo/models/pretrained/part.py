"""Pretrained networks as parts of a run: a frozen network, and what trains on its features."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

from torchemo.core.errors import ConfigError
from torchemo.core.types import Model, TaskShape
from torchemo.models.inputs import check_positive
from torchemo.models.mlp import MLP
from torchemo.models.pretrained.network import FrozenNetwork
from torchemo.models.pretrained.sources import efficientnet_lite0, source_of


@final
@dataclass(frozen=True)
class PretrainedOptions:
    """Options of a pretrained network."""

    size: int | None = None
    """Side of the images that the network sees; None takes its own. Smaller is faster."""
    hidden: tuple[int, ...] = (128,)
    """Widths of an adapter, hidden layers between the features and the head; empty for a head alone."""
    weights: str | None = None
    """File of weights (.safetensors, .pth); None takes those that come with the network, if any."""
    allow_leak: bool = False
    """Accept test classes that the network may have been trained on, such as those of miniImageNet."""

    def __post_init__(self) -> None:
        check_positive(**{} if self.size is None else {"model.size": self.size})


@final
@dataclass(frozen=True)
class Pretrained:
    """A pretrained network as a part: images go through it once, and tasks are made of its features.

    Attributes:
        name: How a configuration names it.
        load: Makes the network from its name, ``size`` and ``weights``.
    """

    name: str
    load: Callable[..., FrozenNetwork]

    Options: ClassVar[type[PretrainedOptions]] = PretrainedOptions

    def network(self, options: PretrainedOptions) -> FrozenNetwork:
        """Load the frozen network."""
        return self.load(self.name, size=options.size, weights=options.weights)

    def build(self, options: PretrainedOptions, tasks: TaskShape) -> Model:
        """Make what trains on features."""
        if tasks.kind != "classification" or len(tasks.x) != 1:
            raise ConfigError(
                f"model.name '{self.name}' needs images or features of images; these tasks have inputs"
                f" {tasks.x}.",
                hint="Give image sets with --data.",
            )
        return MLP(tasks.n_out, n_in=tasks.x[0], hidden=options.hidden, initializer="kaiming")


EFFICIENTNET_LITE0 = Pretrained("efficientnet-lite0", efficientnet_lite0)


def named(name: str) -> Pretrained:
    """Return the part ``timm:NAME``, ``torchvision:NAME`` or ``module:callable``."""
    return Pretrained(name, source_of(name))
