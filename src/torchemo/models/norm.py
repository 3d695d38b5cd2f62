"""Normalisation per task: the batch at hand, stored averages, groups of channels, or none.

A task's statistics are reductions over its own examples, whoever runs the task axis. Torch's own kernel
serves plain autograd, where its first and second derivatives are right and it saves several passes over the
maps. Under ``vmap`` it gives wrong second-order gradients without a warning, so there everything is
written out.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError, ShapeError
from torchemo.core.types import Model, Params
from torchemo.models.fused import plain_autograd
from torchemo.models.inputs import check_choice, check_positive

Bn: TypeAlias = Literal[
    "transductive",
    "support",
    "per_query_with_support",
    "running",
    "per_step_running",
    "group",
    "layer",
    "none",
]
Affine: TypeAlias = Literal["both", "shift"]


@final
@dataclass(frozen=True)
class Usage:
    """How a network is used in one call; what ``Model.at`` sets.

    Attributes:
        step: Inner step, for per-step statistics.
        stored: Normalise with stored running statistics where the network keeps them.
        sink: Where to put the statistics of the batch at hand, ``{buffer name: [B, C]}``.
        anchors: Take the statistics of the first examples alone, as many as this; 0 takes all.
    """

    step: int = 0
    stored: bool = False
    sink: Params | None = None
    anchors: int = 0

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ConfigError(f"the inner step should be at least 0, got {self.step}.")


@final
@dataclass(frozen=True, kw_only=True)
class TaskNorm:
    """The normalisation layers of one network.

    Attributes:
        bn: Where mean and variance come from.
            ``transductive``: the batch at hand, support or query, in training and evaluation.
            ``support``: the support set, for its queries too.
            ``per_query_with_support``: the batch at hand; queries go through `predict_with_support`.
            ``running``: the batch while training, stored averages in ``Usage(stored=True)``.
            ``per_step_running``: one stored average for each inner step (MAML++).
            ``group``, ``layer``: each example alone, over groups of channels or all of them.
            ``none``: no normalisation and no tensors.
        affine: ``both`` learns scale and shift per channel, ``shift`` fixes the scale at 1 (the original
            MAML code).
        eps: Added to the variance.
        groups: Number of channel groups for ``group``.
        steps: Number of stored inner steps for ``per_step_running``; later steps use the last one.
        usage: How the network is used in this call.

    Choice: stored variances are the unbiased ones (divided by N - 1), as in torch; MAML++'s per-step scale
    and shift are not part of ``per_step_running``, only its per-step statistics are.
    """

    bn: Bn = "transductive"
    affine: Affine = "both"
    eps: float = 1e-3
    groups: int = 8
    steps: int = 5
    usage: Usage = field(default=Usage(), repr=False, compare=False)

    def __post_init__(self) -> None:
        check_choice("bn", self.bn, get_args(Bn))
        check_choice("affine", self.affine, get_args(Affine))
        check_positive(groups=self.groups, steps=self.steps)
        if not self.eps > 0:
            raise ConfigError(f"option 'eps' should be positive, got {self.eps}.")

    def check_channels(self, channels: int) -> None:
        """Raise `ConfigError` unless ``channels`` can be split into the groups of ``bn = "group"``."""
        if self.bn == "group" and channels % self.groups:
            raise ConfigError(
                f"option 'groups' should divide the {channels} channels, got {self.groups}.",
                hint="Choose another number of groups, or bn = 'layer'.",
            )

    def names(self, layer: str) -> tuple[str, ...]:
        """Name the meta-learned tensors of a layer."""
        if self.bn == "none":
            return ()
        shift = (f"{layer}.shift",)
        return shift if self.affine == "shift" else (f"{layer}.scale", *shift)

    def buffers(self, layer: str) -> tuple[str, ...]:
        """Name the running statistics of a layer."""
        keeps = self.bn in ("running", "per_step_running")
        return (f"{layer}.mean", f"{layer}.var") if keeps else ()

    def shapes(self, layer: str, channels: int) -> dict[str, tuple[int, ...]]:
        """Give the shapes, without task axis, of the tensors that a call will read."""
        return self._shapes(layer, channels, self.buffers(layer) if self.usage.stored else ())

    def init(self, layer: str, channels: int, *, device: torch.device) -> Params:
        """Return scale 1, shift 0, and running mean 0 and variance 1 where they are kept."""
        shapes = self._shapes(layer, channels, self.buffers(layer))
        fill = {"scale": 1.0, "shift": 0.0, "mean": 0.0, "var": 1.0}
        return {
            name: torch.full(
                shape, fill[name.rpartition(".")[2]], dtype=torch.float32, device=device
            )
            for name, shape in shapes.items()
        }

    def __call__(
        self, params: Params, x: Tensor, *, layer: str, tasks: int
    ) -> Float[Tensor, "n task_channel height width"]:
        """Compute ``(x - mean) / sqrt(var + eps) * scale + shift`` for each task.

        Args:
            params: The layer's tensors, ``[B, C]``, among others.
            x: Maps ``[n, B*C, H, W]``, tasks side by side in the channels.
            layer: Name of the layer.
            tasks: Number of tasks B.
        """
        if self.bn == "none":
            return x
        if self.bn in ("group", "layer"):
            return self._per_example(params, x, layer=layer, tasks=tasks)
        if self.usage.stored and self.buffers(layer):
            mean, var = (self._stored(params[name]) for name in self.buffers(layer))
            centred = x - mean
        elif self.usage.anchors:
            mean, var = self._anchored(x, layer)
            centred = x - mean
        else:
            count = x.numel() // x.shape[1]
            _check_spread(count, layer)
            if plain_autograd():
                return self._kernel(params, x, layer=layer, tasks=tasks)
            mean = x.mean((0, 2, 3), keepdim=True)
            centred = x - mean
            var = centred.square().mean((0, 2, 3), keepdim=True)
            self._record(layer, tasks, mean=mean, var=var, count=count)
        return self._affine(params, centred, layer=layer, gain=(var + self.eps).rsqrt())

    def _anchored(self, x: Tensor, layer: str) -> tuple[Tensor, Tensor]:
        """Return mean and unbiased variance of the first examples, on the graph."""
        anchors = x[: self.usage.anchors]
        _check_spread(anchors.numel() // x.shape[1], layer)
        var, mean = torch.var_mean(anchors, (0, 2, 3), keepdim=True)
        return mean, var

    def _kernel(self, params: Params, x: Tensor, *, layer: str, tasks: int) -> Tensor:
        """Normalise by torch's kernel; with momentum 1 it leaves the batch's statistics in the buffers."""
        mean, var, shift = None, None, params[f"{layer}.shift"].flatten()
        if self.usage.sink is not None and self.buffers(layer):
            # In the precision of the parameters: maps may have less.
            mean, var = (shift.new_zeros(x.shape[1]) for _ in range(2))
            rows = (mean.view(tasks, -1), var.view(tasks, -1))
            self.usage.sink.update(zip(self.buffers(layer), rows, strict=True))
        # The kernel's second derivative fails without a scale.
        fixed = torch.ones_like(shift)
        scale = params[f"{layer}.scale"].flatten() if self.affine == "both" else fixed
        return F.batch_norm(x, mean, var, scale, shift, True, 1.0, self.eps)

    def _per_example(self, params: Params, x: Tensor, *, layer: str, tasks: int) -> Tensor:
        groups = self.groups if self.bn == "group" else 1
        grouped = x.reshape(x.shape[0], tasks * groups, -1)
        _check_spread(grouped.shape[2], layer)
        centred = grouped - grouped.mean(2, keepdim=True)
        var = centred.square().mean(2, keepdim=True)
        unit = (centred * (var + self.eps).rsqrt()).view(x.shape)
        return self._affine(params, unit, layer=layer, gain=None)

    def _affine(self, params: Params, x: Tensor, *, layer: str, gain: Tensor | None) -> Tensor:
        shift = _per_channel(params[f"{layer}.shift"])
        if self.affine == "both":
            scale = _per_channel(params[f"{layer}.scale"])
            gain = scale if gain is None else gain * scale
        return x + shift if gain is None else torch.addcmul(shift, x, gain)

    def _shapes(
        self, layer: str, channels: int, buffers: tuple[str, ...]
    ) -> dict[str, tuple[int, ...]]:
        per_step = (self.steps,) if self.bn == "per_step_running" else ()
        affine = dict.fromkeys(self.names(layer), (channels,))
        return {**affine, **dict.fromkeys(buffers, (*per_step, channels))}

    def _stored(self, buffer: Tensor) -> Tensor:
        if self.bn == "per_step_running":
            buffer = buffer[:, min(self.usage.step, self.steps - 1)]
        return _per_channel(buffer)

    def _record(self, layer: str, tasks: int, *, mean: Tensor, var: Tensor, count: int) -> None:
        if self.usage.sink is not None and self.buffers(layer):
            unbiased = var * (count / (count - 1))
            for name, value in zip(self.buffers(layer), (mean, unbiased), strict=True):
                self.usage.sink[name] = value.detach().reshape(tasks, -1)


def _per_channel(value: Tensor) -> Tensor:
    return value.reshape(1, -1, 1, 1)


def _check_spread(count: int, layer: str) -> None:
    if count == 1:
        raise ShapeError(
            f"{layer}: one number has no variance, so every input would give the same output.",
            hint="Pass several examples at once, use predict_with_support, or another bn option.",
        )


def update_running(buffers: Params, sink: Params, *, step: int, momentum: float = 0.1) -> Params:
    """Move running statistics towards those of a batch of tasks; returns new tensors.

    ``new = (1 - momentum) * old + momentum * mean over tasks``. Per-step statistics ``[steps, C]`` change in
    row ``min(step, steps - 1)`` only.

    Args:
        buffers: Running statistics, ``{name: [C]}`` or ``{name: [steps, C]}``, no task axis.
        sink: What ``Model.at(step, sink=sink)`` collected, ``{name: [B, C]}``.
        step: Inner step at which it was collected.
        momentum: Weight of the new batch.

    Example:
        >>> old, new = {"norm1.mean": torch.zeros(2)}, {"norm1.mean": torch.tensor([[1.0, 3.0]])}
        >>> update_running(old, new, step=0)["norm1.mean"]
        tensor([0.1000, 0.3000])
    """
    for name, value in sink.items():
        if name not in buffers or value.shape[1:] != buffers[name].shape[-1:]:
            shapes = {known: list(buffer.shape) for known, buffer in buffers.items()}
            raise ShapeError(
                f"statistics '{name}' {list(value.shape)} should have a running average to go to,"
                f" got {shapes}.",
                hint="Pass the buffers of the network that filled the sink, without a task axis.",
            )
    updated = dict(buffers)
    for name, value in sink.items():
        old = buffers[name]
        row = min(step, old.shape[0] - 1) if old.ndim == 2 else ...
        updated[name] = old.clone()
        updated[name][row] = (1 - momentum) * old[row] + momentum * value.mean(0)
    return updated


def predict_with_support(
    model: Model, params: Params, support_x: Tensor, query_x: Tensor, *, chunk: int = 8
) -> Float[Tensor, "task query out"]:
    """Classify each query in a batch made of itself and the support set: not transductive.

    The queries of a task become tasks of their own that share its parameters and support set, so a query
    never sees another one. The support set goes through the network once per query.

    Args:
        model: Any network with a task axis.
        params: Per-task parameters ``{name: [B, *shape]}``.
        support_x: Support inputs ``[B, n, ...]``.
        query_x: Query inputs ``[B, q, ...]``.
        chunk: Queries of each task to run at once; bounds the memory, does not change the result.
    """
    check_positive(chunk=chunk)
    if support_x.ndim < 3 or support_x.shape[0] != query_x.shape[0]:
        raise ShapeError(
            "support and query inputs should be [task, example, ...] of the same tasks,"
            f" got {list(support_x.shape)} and {list(query_x.shape)}."
        )
    return torch.cat(
        [
            _one_by_one(model, params, support_x, part)
            for part in torch.split(query_x, chunk, dim=1)
        ],
        dim=1,
    )


def _one_by_one(model: Model, params: Params, support_x: Tensor, query_x: Tensor) -> Tensor:
    queries = query_x.shape[1]

    def fold(value: Tensor) -> Tensor:
        repeated = value.unsqueeze(1).expand(-1, queries, *(-1 for _ in value.shape[1:]))
        return repeated.flatten(0, 1)

    x = torch.cat([fold(support_x), query_x.flatten(0, 1).unsqueeze(1)], dim=1)
    out = model({name: fold(value) for name, value in params.items()}, x)
    return out[:, -1].reshape(-1, queries, out.shape[-1])
