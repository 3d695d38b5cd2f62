"""A multilayer perceptron for regression families and tiny tests."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Params, TaskShape
from torchemo.models.alone import OneByOne
from torchemo.models.inputs import check_choice, check_examples, check_params, check_positive
from torchemo.models.layers import (
    ACTIVATIONS,
    Activation,
    kaiming_normal,
    task_linear,
    truncated_normal,
    zeros,
)

INITIALIZERS: Mapping[str, Callable[[tuple[int, ...], torch.Generator], Tensor]] = {
    "truncated": truncated_normal,
    "kaiming": kaiming_normal,
}


@final
@dataclass(frozen=True)
class MLPOptions:
    """Options of the MLP."""

    hidden: tuple[int, ...] = (40, 40)
    """Widths of the hidden layers."""


@final
@dataclass(frozen=True)
class MLP(OneByOne):
    """Linear layers with activations between them: ``x [B, n, n_in] -> [B, n, n_out]``.

    Per-task parameters: ``layer1.weight [B, hidden[0], n_in]``, ``layer1.bias``, ..., ``head.weight``,
    ``head.bias``. The defaults are MAML's sinusoid network, 1 761 parameters.

    Attributes:
        n_out: Number of outputs.
        n_in: Numbers in one input.
        hidden: Widths of the hidden layers.
        activation: ``relu``, ``softplus`` or ``tanh``.
        initializer: ``truncated`` (normal, σ = 0.01, cut at 2 σ) or ``kaiming`` (normal, fan in); biases
            start at 0.

    Example:
        >>> from torchemo.core.rng import generator_for
        >>> from torchemo.core.tree import expand
        >>> model = MLP()
        >>> params = expand(model.init(generator_for(0, "init")), 3)
        >>> model(params, torch.rand(3, 10, 1)).shape
        torch.Size([3, 10, 1])
    """

    n_out: int = 1
    _: KW_ONLY
    n_in: int = 1
    hidden: tuple[int, ...] = (40, 40)
    activation: Activation = "relu"
    initializer: Literal["truncated", "kaiming"] = "truncated"

    Options: ClassVar[type[MLPOptions]] = MLPOptions

    @classmethod
    def build(cls, options: MLPOptions, tasks: TaskShape) -> "MLP":
        """Make the network from its options, for such tasks."""
        if len(tasks.x) != 1:
            raise ConfigError(
                f"model.name 'mlp' needs vectors, these tasks have inputs {tasks.x}.",
                hint="Use model.name = conv4 or resnet12 for images.",
            )
        return cls(tasks.n_out, n_in=tasks.x[0], hidden=options.hidden, initializer="kaiming")

    def __post_init__(self) -> None:
        check_positive(n_out=self.n_out, n_in=self.n_in)
        check_positive(**{f"hidden[{i}]": width for i, width in enumerate(self.hidden)})
        check_choice("activation", self.activation, tuple(ACTIVATIONS))
        check_choice("initializer", self.initializer, tuple(INITIALIZERS))

    @property
    def n_features(self) -> int:
        """How many numbers the head sees for each example."""
        return self.hidden[-1] if self.hidden else self.n_in

    def init(self, generator: torch.Generator) -> Params:
        """Draw the weights, layer by layer; biases 0."""
        draw = INITIALIZERS[self.initializer]
        shapes = self._body_shapes | self._head_shapes
        return {
            name: (zeros if name.endswith("bias") else draw)(shape, generator)
            for name, shape in shapes.items()
        }

    def __call__(self, params: Params, x: Tensor) -> Float[Tensor, "task n out"]:
        """Map ``x [B, n, n_in]`` to outputs ``[B, n, n_out]``."""
        return self.classify(params, self.features(params, x))

    def features(self, params: Params, x: Tensor) -> Float[Tensor, "task n feature"]:
        """Map ``x [B, n, n_in]`` to what the head sees, ``[B, n, f]``."""
        check_examples(x, (self.n_in,), what="MLP")
        check_params(params, self._body_shapes, tasks=x.shape[0], what="MLP")
        for i in range(len(self.hidden)):
            x = ACTIVATIONS[self.activation](task_linear(params, x, layer=f"layer{i + 1}"))
        return x

    def classify(self, params: Params, features: Tensor) -> Float[Tensor, "task n out"]:
        """Apply the head to ``features [B, n, f]``."""
        check_examples(features, (self.n_features,), what="MLP head")
        check_params(params, self._head_shapes, tasks=features.shape[0], what="MLP head")
        return task_linear(params, features, layer="head")

    def with_outputs(self, n_out: int) -> "MLP":
        """Return this network with ``n_out`` outputs."""
        return replace(self, n_out=n_out)

    # Cached: in a network this small the checks would cost as much as the layers.
    @cached_property
    def _body_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for i, (inside, out) in enumerate(
            zip((self.n_in, *self.hidden), self.hidden, strict=False)
        ):
            shapes[f"layer{i + 1}.weight"] = (out, inside)
            shapes[f"layer{i + 1}.bias"] = (out,)
        return shapes

    @cached_property
    def _head_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"head.weight": (self.n_out, self.n_features), "head.bias": (self.n_out,)}
