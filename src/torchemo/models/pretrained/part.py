"""Pretrained networks as parts of a run: a frozen network, and what trains on its features."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from torchemo.core.errors import ConfigError
from torchemo.core.types import Model, TaskShape
from torchemo.models.inputs import check_choice, check_positive
from torchemo.models.mlp import MLP
from torchemo.models.pretrained.blocks import LastBlocks, cut
from torchemo.models.pretrained.network import FrozenNetwork
from torchemo.models.pretrained.residual import ResidualAdapter
from torchemo.models.pretrained.sources import efficientnet_lite0, source_of


@final
@dataclass(frozen=True)
class PretrainedOptions:
    """Options of a pretrained network."""

    size: int | None = None
    """Side of the images that the network sees; None takes its own. Smaller is faster."""
    hidden: tuple[int, ...] = (128,)
    """Widths of an adapter, hidden layers between the features and the head; empty for a head alone."""
    adapter: Literal["layers", "residual"] = "layers"
    """layers: hidden layers in place of the features. residual: one hidden layer whose outputs are added to
    the features, and are zero before training."""
    last_blocks: int = 0
    """Blocks at the end of the network that train too, from their pretrained values; images go through the
    others once. There is no adapter then: the head reads the last block. EfficientNet-Lite0 has 18."""
    blocks_train: Literal["scales", "all"] = "scales"
    """What trains of the last blocks: scales and shifts of their normalisation, or all tensors."""
    weights: str | None = None
    """File of weights (.safetensors, .pth); None takes those that come with the network, if any."""
    allow_leak: bool = False
    """Accept test classes that the network may have been trained on, such as those of miniImageNet."""

    def __post_init__(self) -> None:
        check_positive(**{} if self.size is None else {"model.size": self.size})
        check_choice("model.adapter", self.adapter, ("layers", "residual"))
        check_choice("model.blocks_train", self.blocks_train, ("scales", "all"))
        if self.last_blocks < 0:
            raise ConfigError(f"model.last_blocks should be 0 or more, got {self.last_blocks}.")
        if self.last_blocks and self.adapter == "residual":
            raise ConfigError(
                f"model.last_blocks {self.last_blocks} has no adapter, got model.adapter 'residual'.",
                hint="Set model.adapter=layers (the head then reads the last block), or model.last_blocks=0.",
            )
        if self.adapter == "residual" and len(self.hidden) != 1:
            raise ConfigError(
                f"model.adapter 'residual' has one hidden layer, got model.hidden {list(self.hidden)}.",
                hint="Give one width, such as model.hidden=[128].",
            )


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
        """Load the frozen network, without the blocks that train."""
        whole = self.load(self.name, size=options.size, weights=options.weights)
        return self._cut(whole, options, 1)[0] if options.last_blocks else whole

    def build(self, options: PretrainedOptions, tasks: TaskShape) -> Model:
        """Make what trains on features."""
        if tasks.kind != "classification" or len(tasks.x) != 1:
            raise ConfigError(
                f"model.name '{self.name}' needs images or features of images; these tasks have inputs"
                f" {tasks.x}.",
                hint="Give image sets with --data.",
            )
        if options.last_blocks:
            whole = self.load(self.name, size=options.size, weights=options.weights)
            return self._cut(whole, options, tasks.n_out)[1]
        if options.adapter == "residual":
            return ResidualAdapter(tasks.n_out, n_in=tasks.x[0], hidden=options.hidden[0])
        return MLP(tasks.n_out, n_in=tasks.x[0], hidden=options.hidden, initializer="kaiming")

    def _cut(
        self, whole: FrozenNetwork, options: PretrainedOptions, n_out: int
    ) -> tuple[FrozenNetwork, LastBlocks]:
        return cut(whole, options.last_blocks, n_out, trains=options.blocks_train)


EFFICIENTNET_LITE0 = Pretrained("efficientnet-lite0", efficientnet_lite0)


def named(name: str) -> Pretrained:
    """Return the part ``timm:NAME``, ``torchvision:NAME`` or ``module:callable``."""
    return Pretrained(name, source_of(name))
