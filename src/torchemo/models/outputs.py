"""Networks with another number of outputs: tasks of more or fewer classes than those of training."""

from typing import Protocol, runtime_checkable

from torchemo.core.errors import ConfigError
from torchemo.core.types import Model


@runtime_checkable
class AnyOutputs(Protocol):
    """A network that can be had with any number of outputs."""

    def with_outputs(self, n_out: int) -> Model:
        """Return this network with ``n_out`` outputs; nothing but its head has other shapes."""
        ...


def with_outputs(model: Model, n_out: int) -> Model:
    """Return a network with ``n_out`` outputs.

    Raises:
        ConfigError: The network does not say how.
    """
    if not isinstance(model, AnyOutputs):
        raise ConfigError(
            f"a network of type {type(model).__name__} cannot have {n_out} outputs: it has no method"
            " with_outputs.",
            hint="Give as many classes as in training, or give the network that method.",
        )
    return model.with_outputs(n_out)
