"""Embedders: a vector e_i for each support example, from which a task key is made (A1)."""

from collections.abc import Callable
from typing import Any, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from torchemo.core.errors import ConfigError
from torchemo.core.tree import check_same_structure, expand
from torchemo.core.types import Batch, Model, Params, TaskShape
from torchemo.memory.keys.encoder import Embedder, draw_weights, join_pairs
from torchemo.models.conv4 import Conv4

Network: TypeAlias = Callable[[Params, Tensor], Tensor]


@final
class OwnConv(nn.Module):
    """Embed images with a Conv-4 of the key network's own: 4 blocks, global mean, linear.

    Choice: the paper writes the image encoder as the learner's f_theta, yet a 64-d embedding needs
    another head (A1). This is a separate network, trained with the keys; it normalises within each
    task. ``filters`` is the width of a block, ``dim`` the size of e_i.
    """

    def __init__(
        self,
        in_channels: int,
        image_size: int,
        *,
        generator: Generator,
        filters: int = 32,
        dim: int = 64,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.network = Conv4(
            dim, in_channels=in_channels, image_size=image_size, filters=filters, head_pool="mean"
        )
        drawn = self.network.init(generator)
        self.names = tuple(drawn)
        self.weights = nn.ParameterList(nn.Parameter(drawn[name]) for name in self.names)

    def forward(self, support: Batch, params: Params | None = None) -> Tensor:
        """Embed ``support.x [B, n, C, H, W]``; neither labels nor ``params`` are looked at."""
        weights = dict(zip(self.names, self.weights, strict=True))
        return _task_by_task(self.network, weights, support.x)


@final
class FrozenRandom(nn.Module):
    """Embed images with an `OwnConv` that keeps its random start: a control for learned keys."""

    def __init__(self, *size: int, **others: Any) -> None:
        super().__init__()
        self.conv = OwnConv(*size, **others).requires_grad_(False)
        self.dim = self.conv.dim

    def forward(self, support: Batch, params: Params | None = None) -> Tensor:
        """Embed ``support.x [B, n, C, H, W]``."""
        return self.conv.forward(support)


@final
class SharedTrunk(nn.Module):
    """Embed images with the trunk of the learner's ``model`` at theta and a linear layer.

    Choice: the literal f_theta of Eq. 4 (A1). Theta is detached: keys never train the learner.
    """

    def __init__(self, model: Model, *, generator: Generator, dim: int = 64) -> None:
        super().__init__()
        self.dim = dim
        self.model = model
        # A throw-away draw: the widths are a fact of the network, not of its weights.
        drawn = model.init(Generator())
        not_read = {*model.head, *model.buffers}
        self.trunk = {name: p.shape for name, p in drawn.items() if name not in not_read}
        width = drawn[model.head[0]].shape[-1]
        self.linear = draw_weights(nn.Linear(width, dim, device="meta"), generator)

    def forward(self, support: Batch, params: Params | None = None) -> Tensor:
        """Embed ``support.x`` at theta = ``params {name: [*shape]}`` (no task axis)."""
        if params is None:
            raise ConfigError(
                "the shared key embedder reads the learner's trunk, and got no parameters.",
                hint="Pass params=theta when keys are computed, or use an embedder of its own.",
            )
        theta = {name: params[name] for name in self.trunk if name in params}
        check_same_structure(self.trunk, theta, what="trunk of the learner", leading=0)
        with torch.no_grad():
            features = _task_by_task(self.model.features, params, support.x)
        return F.linear(features, self.linear.weight, self.linear.bias)


@final
class PairEmbedder(nn.Module):
    """Embed the pairs (x, y) of regression tasks by a linear map (A30)."""

    def __init__(self, x_dim: int, y_dim: int, *, generator: Generator, dim: int = 64) -> None:
        super().__init__()
        self.dim = dim
        self.sizes = (x_dim, y_dim)
        self.linear = draw_weights(nn.Linear(x_dim + y_dim, dim, device="meta"), generator)

    def forward(self, support: Batch, params: Params | None = None) -> Tensor:
        """Embed ``x [B, n, ...]`` with ``y [B, n]`` or ``[B, n, y_dim]``."""
        return F.linear(join_pairs(support, *self.sizes), self.linear.weight, self.linear.bias)


def _task_by_task(network: Network, weights: Params, x: Tensor) -> Tensor:
    # On a CPU the compiled block takes one task at a time, and its maps stay in the cache.
    tasks = 1 if x.device.type == "cpu" else x.shape[0]
    return torch.cat([network(expand(weights, len(part)), part) for part in torch.split(x, tasks)])


def build_embedder(
    name: str, model: Model, tasks: TaskShape, *, dim: int, generator: Generator
) -> Embedder:
    """Make the embedder that ``memory.key.embedder`` names."""
    if name == "pairs":
        if tasks.kind != "regression":
            raise ConfigError(
                "memory.key.embedder 'pairs' reads targets and is for regression.",
                hint="Labels are arbitrary in every task; use memory.key.embedder = own.",
            )
        return PairEmbedder(tasks.x[0], tasks.n_out, generator=generator, dim=dim)
    if name == "shared":
        return SharedTrunk(model, generator=generator, dim=dim)
    if len(tasks.x) != 3:
        raise ConfigError(
            f"memory.key.embedder '{name}' needs images, these tasks have inputs {tasks.x}.",
            hint="Use memory.key.embedder = pairs for regression.",
        )
    kind = OwnConv if name == "own" else FrozenRandom
    return kind(tasks.x[0], tasks.x[1], generator=generator, dim=dim)
