"""Task keys (Eq. 4): one vector per task, read from its support set.

An embedder turns each support example into e_i, an encoder turns the e_i of a task into its key K.
All weights are drawn from an explicit generator. A key never depends on the order of the support
set, nor on the other tasks of the batch.
"""

import math
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias, TypeVar, final, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from torchemo.core.errors import ConfigError, DataError, ShapeError
from torchemo.core.losses import check_labels
from torchemo.core.tree import check_same_structure, expand
from torchemo.core.types import Batch, Model, Params
from torchemo.models.conv4 import Conv4

Network: TypeAlias = Callable[[Params, Tensor], Tensor]
AnyModule = TypeVar("AnyModule", bound=nn.Module)


@runtime_checkable
class Embedder(Protocol):
    """Map every support example to its embedding e_i, ``[B, n, dim]``, each task on its own."""

    dim: int

    def __call__(self, support: Batch, params: Params | None = None) -> Tensor:
        """Embed ``support``; ``params`` are the learner's meta-parameters (no task axis)."""


@runtime_checkable
class KeyEncoder(Protocol):
    """Map the support sets of B tasks to their keys K, ``[B, dim]`` (Eq. 4): an ``nn.Module``."""

    dim: int

    def __call__(self, support: Batch, params: Params | None = None) -> Tensor:
        """Return the keys ``[B, dim]``; ``params`` are the learner's meta-parameters."""

    def embed(self, support: Batch, params: Params | None = None) -> Tensor:
        """Return the embeddings e_i ``[B, n, e]`` that the keys are made of."""

    def prototypes(self, support: Batch, n_way: int, *, params: Params | None = None) -> Tensor:
        """Return the mean e_i of each class, ``[B, n_way, e]`` (what heads are aligned on)."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the weights by name, as ``nn.Module`` does."""


@runtime_checkable
class Summarizing(Protocol):
    """A key network whose weights see a support set only through numbers that no weight enters.

    Whoever keeps support sets to encode them again can keep these numbers instead.
    """

    def summary(self, support: Batch) -> Tensor:
        """Return the numbers ``[B, s]`` of the support sets of B tasks."""

    def of_summary(self, summary: Tensor) -> Tensor:
        """Return the keys ``[B, dim]`` of support sets with these numbers."""


@final
class OwnConv(nn.Module):
    """Embed pictures with a Conv-4 of the key network's own: 4 blocks, global mean, linear.

    Reading: the paper writes the image encoder as the learner's f_theta, yet a 64-d embedding needs
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
    """Embed pictures with an `OwnConv` that keeps its random start: a control for learned keys."""

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
        conv = OwnConv(in_channels, image_size, generator=generator, filters=filters, dim=dim)
        self.conv = conv.requires_grad_(False)

    def forward(self, support: Batch, params: Params | None = None) -> Tensor:
        """Embed ``support.x [B, n, C, H, W]``."""
        return self.conv.forward(support)


@final
class SharedTrunk(nn.Module):
    """Embed pictures with the trunk of the learner's ``model`` at theta and a linear layer.

    Reading: the literal f_theta of Eq. 4 (A1). Theta is detached: keys never train the learner.
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


@final
class TransformerKey(nn.Module):
    """Compute the task key of Eq. 4: K = Transformer([cls, e_1, ..., e_NK])[0].

    A pre-norm encoder without positions and without dropout, then a LayerNorm on the cls output.

    Reading: the formula has no labels though the text speaks of support pairs, so keys see pictures
    alone (A2). With ``use_labels`` a learned embedding of y_i is added to e_i; the key then depends
    on which class has which number. Prototypes are means of the plain e_i in both cases.

    Args:
        embedder: Gives e_i, of size ``dim``.
        generator: Source of the weights.
        dim: Size of tokens and of the key.
        layers: Encoder layers.
        heads: Attention heads.
        ff: Width of the feed-forward part.
        use_labels: Let the key see the labels.
        n_way: Number of labels; needed with ``use_labels``.
        unit: Put keys on the unit sphere.
    """

    def __init__(
        self,
        embedder: Embedder,
        *,
        generator: Generator,
        dim: int = 64,
        layers: int = 6,
        heads: int = 4,
        ff: int = 128,
        use_labels: bool = False,
        n_way: int | None = None,
        unit: bool = True,
    ) -> None:
        super().__init__()
        if embedder.dim != dim or dim % heads:
            raise ConfigError(
                f"key transformer: dim {dim} with {heads} heads, embedder of dim {embedder.dim}.",
                hint="Embedder and key need the same dim, and the number of heads must divide it.",
            )
        if use_labels and n_way is None:
            raise ConfigError("key transformer: use_labels needs n_way, got None.")
        self.dim = dim
        self.unit = unit
        self.embedder = embedder
        self.cls = _token(dim, generator=generator)
        layer = nn.TransformerEncoderLayer(
            dim, heads, ff, 0.0, F.gelu, batch_first=True, norm_first=True, device="meta"
        )
        stack = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.transformer = draw_weights(stack, generator)
        self.norm = nn.LayerNorm(dim)
        self.labels = _token(n_way or 0, dim, generator=generator) if use_labels else None

    def train(self, mode: bool = True) -> "TransformerKey":
        """Set the mode of all parts but the transformer, whose modes mean the same (no dropout)."""
        super().train(mode)
        # In evaluation mode a fused kernel would round keys differently when gradients are off.
        self.transformer.train()
        return self

    def embed(self, support: Batch, params: Params | None = None) -> Float[Tensor, "task n e"]:
        """Return the embeddings e_i, without labels."""
        check_support(support)
        return self.embedder(support, params)

    def forward(self, support: Batch, params: Params | None = None) -> Float[Tensor, "task dim"]:
        """Return the keys K of Eq. 4."""
        tokens = self.embed(support, params)
        if self.labels is not None:
            check_labels(support.y, len(self.labels), what="support labels")
            tokens = tokens + self.labels[support.y]
        cls = self.cls.expand(len(tokens), 1, self.dim)
        out = self.transformer(torch.cat([cls, tokens], dim=1))
        return checked_keys(self.norm(out[:, 0]), unit=self.unit)

    def prototypes(self, support: Batch, n_way: int, *, params: Params | None = None) -> Tensor:
        """Return the mean e_i of each class."""
        return class_means(self.embed(support, params), support.y, n_way=n_way)


@final
class MeanKey(nn.Module):
    """Use the mean of the e_i as the key, on the unit sphere if ``unit``: Eq. 4 without a Transformer."""

    def __init__(self, embedder: Embedder, *, unit: bool = True) -> None:
        super().__init__()
        self.dim = embedder.dim
        self.unit = unit
        self.embedder = embedder

    def embed(self, support: Batch, params: Params | None = None) -> Float[Tensor, "task n e"]:
        """Return the embeddings e_i."""
        check_support(support)
        return self.embedder(support, params)

    def forward(self, support: Batch, params: Params | None = None) -> Float[Tensor, "task dim"]:
        """Return the mean embedding of each task."""
        return checked_keys(self.embed(support, params).mean(1), unit=self.unit)

    def prototypes(self, support: Batch, n_way: int, *, params: Params | None = None) -> Tensor:
        """Return the mean e_i of each class."""
        return class_means(self.embed(support, params), support.y, n_way=n_way)


def class_means(
    embedded: Float[Tensor, "task n e"], y: Int[Tensor, "task n"], *, n_way: int
) -> Float[Tensor, "task way e"]:
    """Average the embeddings of each class; every class of every task needs an example."""
    check_labels(y, n_way, what="support labels")
    member = F.one_hot(y.long(), n_way).to(embedded.dtype)
    count = member.sum(1)
    if (count == 0).any():
        b, c = (count == 0).nonzero()[0].tolist()
        raise DataError(
            f"support set of task {b}: class {c} has no example.",
            hint="Prototypes need at least one support example of every class.",
        )
    return member.transpose(1, 2) @ embedded / count[..., None]


def check_support(support: Batch) -> None:
    """Refuse support sets that are empty, misshapen or not finite; names the task."""
    x, y = support
    if x.ndim < 3 or x.shape[1] == 0 or x.shape[:2] != y.shape[:2]:
        raise ShapeError(
            "support set: expected x [B, n, ...] and y [B, n, ...] with n > 0,"
            f" got {list(x.shape)} and {list(y.shape)}."
        )
    bad = ~(x.flatten(1).isfinite().all(1) & y.flatten(1).isfinite().all(1))
    if bad.any():
        raise DataError(
            f"support set of task {int(bad.nonzero()[0])}: it holds NaN or infinity.",
            hint="Look for damaged files, or for a division by zero in the preparation.",
        )


def checked_keys(keys: Tensor, *, unit: bool) -> Tensor:
    """Put keys on the unit sphere if asked, and refuse those that are not finite."""
    if unit:
        keys = keys / keys.norm(dim=1, keepdim=True)
    bad = ~keys.isfinite().all(1)
    if bad.any():
        raise DataError(
            f"key of task {int(bad.nonzero()[0])}: it holds NaN or infinity.",
            hint="The key network has weights that are not finite, or the key has length zero.",
        )
    return keys


def join_pairs(support: Batch, x_dim: int, y_dim: int) -> Tensor:
    """Return the pairs (x_i, y_i) of regression tasks as vectors, ``[B, n, x_dim + y_dim]``."""
    x, y = support.x.flatten(2), support.y.reshape(*support.y.shape[:2], -1)
    if (x.shape[2], y.shape[2]) != (x_dim, y_dim):
        raise ShapeError(
            f"support pairs should have {x_dim} inputs and {y_dim} targets,"
            f" got {x.shape[2]} and {y.shape[2]}."
        )
    return torch.cat([x, y.to(x.dtype)], dim=-1)


def _task_by_task(network: Network, weights: Params, x: Tensor) -> Tensor:
    # On a CPU the compiled block takes one task at a time, and its maps stay in the cache.
    tasks = 1 if x.device.type == "cpu" else x.shape[0]
    return torch.cat([network(expand(weights, len(part)), part) for part in torch.split(x, tasks)])


def _token(*shape: int, generator: Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=generator) / math.sqrt(shape[-1]))


def draw_weights(module: AnyModule, generator: Generator) -> AnyModule:
    """Give a module built on the meta device its weights; torch's own draws would be global."""
    module.to_empty(device="cpu")
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            part.reset_parameters()
        elif isinstance(part, nn.MultiheadAttention):
            nn.init.xavier_uniform_(part.in_proj_weight, generator=generator)
            nn.init.zeros_(part.in_proj_bias)
        elif isinstance(part, nn.Linear):
            bound = 1 / math.sqrt(part.in_features)
            for p in part.parameters():
                nn.init.uniform_(p, -bound, bound, generator=generator)
    return module


EMBEDDERS = {
    "own": OwnConv,
    "shared": SharedTrunk,
    "frozen_random": FrozenRandom,
    "pairs": PairEmbedder,
}
