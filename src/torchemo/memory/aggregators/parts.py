"""What the aggregators share: linear rules as mixing weights, and how to draw parameters.

Mean and Sum are linear combinations ``c_0 g + Σ_j c_j V_j`` of a task's own gradient g and the
recalled values V_j. A rule is therefore its weights ``(c_0, c_j)``, and a learned aggregator that
starts from a rule starts from the very same numbers.
"""

from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from torchemo.core.errors import ConfigError, ShapeError
from torchemo.core.tree import norms
from torchemo.core.types import Params, Recall

Init: TypeAlias = Literal["own", "mean", "sum"]
"""The rule a learned aggregator equals before training: plain g, Mean (Eq. 8) or Sum (Eq. 9)."""


class OwnAlone(nn.Module):
    """An aggregator that leaves the own gradient as it is where the memory is not used."""

    def own_only(self, grads: Params) -> Params:
        """Return the gradients themselves."""
        return dict(grads)


def mean_weights(
    weights: Float[Tensor, "task m"], divisor: int
) -> tuple[float, Float[Tensor, "task m"]]:
    """Return (c_0, c_j) of ``(g + m Σ_j a_j V_j) / divisor``, where ``weights`` is a_j."""
    return 1 / divisor, weights * (weights.shape[1] / divisor)


def base_weights(
    init: Init, weights: Float[Tensor, "task m"]
) -> tuple[float, Float[Tensor, "task m"]]:
    """Return (c_0, c_j) of the rule ``init``, where ``weights`` is a_j."""
    if init == "mean":
        return mean_weights(weights, weights.shape[1] + 1)
    return 1.0, weights if init == "sum" else torch.zeros_like(weights)


def recall_weights(init: Init, weights: Float[Tensor, "task m"]) -> Float[Tensor, "task m"]:
    """Return c_j of the rule ``init`` without own gradient: a_j for mean and sum, 0 for own."""
    return torch.zeros_like(weights) if init == "own" else weights


def flatten_after(tensor: Tensor, leading: int) -> Tensor:
    """Lay all but the ``leading`` axes end to end; they may be empty, or none."""
    return tensor.reshape(*tensor.shape[:leading], tensor.shape[leading:].numel())


def weighted_sum(values: Tensor, weights: Float[Tensor, "task m"]) -> Tensor:
    """Return ``Σ_j c_j V_j [B, *shape]`` of one tensor's values ``[B, m, *shape]``; 0 for m = 0."""
    summed = torch.bmm(weights[:, None], flatten_after(values, 2))
    return summed.view(values.shape[0], *values.shape[2:])


def mix(
    grad: Tensor, values: Tensor, *, own: float | Tensor, recalled: Float[Tensor, "task m"]
) -> Tensor:
    """Return ``c_0 g + Σ_j c_j V_j`` of one tensor."""
    if isinstance(own, Tensor):
        own = own.view(-1, *(1 for _ in grad.shape[1:]))
    return own * grad + weighted_sum(values, recalled)


def nearest(recall: Recall, count: int | None) -> Recall:
    """Keep the ``count`` nearest slots of every task (A10).

    Choice: the weights of the kept slots are scaled up to the sum of all, so that a uniform recall
    stays uniform.
    """
    if count is None or recall.m <= count:
        return recall
    kept = recall.weights[:, :count]
    total = kept.sum(1, keepdim=True)
    # Weights may all be zero: a task without recall, or a null slot that takes everything.
    scale = recall.weights.sum(1, keepdim=True) / torch.where(total > 0, total, 1.0)
    return recall._replace(
        slots=recall.slots[:, :count],
        distances=recall.distances[:, :count],
        weights=kept * scale,
        values={name: value[:, :count] for name, value in recall.values.items()},
        generations=recall.generations[:, :count],
    )


def clip(value: Tensor, own: Tensor, factor: float) -> Tensor:
    """Scale each recalled tensor down to at most ``factor`` times the own gradient's norm (A25)."""
    slots = value.flatten(0, 1)
    size = norms({"": slots}).clamp_min(torch.finfo(value.dtype).tiny).view(value.shape[:2])
    scale: Tensor = (factor * norms({"": own.detach()})[:, None] / size).clamp_max(1.0)
    return value * scale.view(*scale.shape, *(1,) * (value.dim() - 2))


def recalled_names(grads: Params, recall: Recall) -> list[str]:
    """Name the tensors that have both a gradient and recalled values, in the order of ``grads``."""
    names = [name for name in grads if name in recall.values]
    for name in names:
        tasks, *shape = grads[name].shape
        expected, got = [tasks, recall.m, *shape], list(recall.values[name].shape)
        if got != expected:
            raise ShapeError(
                f"recalled values of tensor '{name}': expected shape {expected}, got {got}.",
                hint="Use the same network, and the same set of adapted tensors, as before.",
            )
    return names


def check_init(init: str) -> None:
    """Raise `ConfigError` unless ``init`` names a rule."""
    if init not in get_args(Init):
        raise ConfigError(
            f"aggregator init: expected one of {list(get_args(Init))}, got '{init}'.",
            hint="Use 'own' to start as plain gradient descent.",
        )


def check_max_neighbors(count: int | None) -> None:
    """Raise `ConfigError` unless ``count`` is None or at least 1."""
    if count is not None and count < 1:
        raise ConfigError(
            f"aggregator max_neighbors: expected None or at least 1, got {count}.",
            hint="Use a memory of capacity 0 to do without recall.",
        )


def draw_parameters(module: nn.Module, generator: Generator) -> None:
    """Give a module built on the meta device its memory and its initial parameters.

    Matrices are Xavier uniform, scales of normalisation one, biases zero, and free vectors normal
    with standard deviation 1/sqrt(d).
    """
    module.to_empty(device="cpu")
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "norm" in name:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=parameter.numel() ** -0.5, generator=generator)
