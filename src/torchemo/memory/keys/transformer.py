"""Keys made of embedded examples: a Transformer over the support set (Eq. 4), or their mean."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor, nn

from torchemo.config.options import MOST_LAYERS, refuse_above, refuse_below
from torchemo.core.errors import ConfigError
from torchemo.core.losses import check_labels
from torchemo.core.prototypes import class_means
from torchemo.core.types import Batch, Model, Params, TaskShape
from torchemo.memory.keys.embedders import build_embedder
from torchemo.memory.keys.encoder import (
    Embedder,
    KeyOptions,
    check_support,
    checked_keys,
    draw_weights,
)

EmbedderName: TypeAlias = Literal["own", "shared", "frozen_random", "pairs"]


@dataclass(frozen=True)
class MeanKeyOptions(KeyOptions):
    """Options of keys that are made of embedded examples."""

    embedder: EmbedderName = "own"
    """Who embeds an example (A1): an own Conv-4, the learner's trunk, a frozen one; pairs for regression."""
    dim: int = 64
    """Dimension of a key."""
    unit: bool = True
    """Keys are unit vectors; needed by softmax weights."""

    def __post_init__(self) -> None:
        refuse_below(1, self, "dim", where="memory.key")


@final
@dataclass(frozen=True)
class TransformerKeyOptions(MeanKeyOptions):
    """Options of the key Transformer."""

    layers: int = 6
    """Layers of the Transformer."""
    heads: int = 4
    """Attention heads (the paper does not say)."""
    ff: int = 128
    """Width of its feed-forward layers (the paper does not say)."""
    use_labels: bool = False
    """Add a label embedding to every example (A2)."""

    def __post_init__(self) -> None:
        refuse_below(1, self, "dim", "layers", "heads", "ff", where="memory.key")
        refuse_above(MOST_LAYERS, self, "layers", where="memory.key")
        if self.dim % self.heads:
            raise ConfigError(
                f"memory.key.dim should be a multiple of memory.key.heads, got {self.dim} and {self.heads}."
            )


class _OfExamples(nn.Module):
    """A key made of embedded examples."""

    def __init__(self, embedder: Embedder, *, unit: bool = True) -> None:
        super().__init__()
        self.dim = embedder.dim
        self.unit = unit
        self.embedder = embedder

    def embed(self, support: Batch, params: Params | None = None) -> Float[Tensor, "task n e"]:
        """Return the embeddings e_i, without labels."""
        check_support(support)
        return self.embedder(support, params)

    def prototypes(self, support: Batch, n_way: int, *, params: Params | None = None) -> Tensor:
        """Return the mean e_i of each class."""
        return class_means(self.embed(support, params), support.y, n_way=n_way)


@final
class TransformerKey(_OfExamples):
    """Compute the task key of Eq. 4: K = Transformer([cls, e_1, ..., e_NK])[0].

    A pre-norm encoder without positions and without dropout, then a LayerNorm on the cls output.

    Choice: the formula has no labels though the text speaks of support pairs, so keys see images
    alone (A2). With ``use_labels`` a learned embedding of y_i is added to e_i; the key then depends
    on which class has which number. Prototypes are means of the plain e_i in both cases.

    Args:
        embedder: Gives e_i, of size ``dim``.
        generator: Source of the weights.
        n_way: Number of labels; needed with ``use_labels``.
        others: See `TransformerKeyOptions`.

    Example:
        >>> from torchemo.core.rng import generator_for
        >>> from torchemo.memory.keys.embedders import OwnConv
        >>> embedder = OwnConv(3, 16, generator=generator_for(0, "embedder"), filters=4, dim=8)
        >>> encoder = TransformerKey(embedder, generator=generator_for(0, "key"), dim=8, layers=1)
        >>> encoder(Batch(torch.rand(2, 5, 3, 16, 16), torch.arange(5).repeat(2, 1))).shape
        torch.Size([2, 8])
    """

    Options: ClassVar[type[KeyOptions]] = TransformerKeyOptions

    @classmethod
    def build(
        cls,
        options: TransformerKeyOptions,
        model: Model,
        tasks: TaskShape,
        *,
        generator: Generator,
    ) -> "TransformerKey":
        """Make the key network from its options."""
        if options.use_labels and tasks.kind == "regression":
            raise ConfigError(
                "memory.key.use_labels is for classes; these tasks are regression.",
                hint="Leave it out; keys of pairs read the targets anyway (memory.key.embedder).",
            )
        return cls(
            build_embedder(options.embedder, model, tasks, dim=options.dim, generator=generator),
            generator=generator,
            dim=options.dim,
            layers=options.layers,
            heads=options.heads,
            ff=options.ff,
            use_labels=options.use_labels,
            n_way=tasks.n_out if options.use_labels else None,
            unit=options.unit,
        )

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
        super().__init__(embedder, unit=unit)
        if embedder.dim != dim or dim % heads:
            raise ConfigError(
                f"key transformer: dim {dim} with {heads} heads, embedder of dim {embedder.dim}.",
                hint="Embedder and key need the same dim, and the number of heads must divide it.",
            )
        if use_labels and n_way is None:
            raise ConfigError("key transformer: use_labels needs n_way, got None.")
        self.cls = _token(dim, generator=generator)
        layer = nn.TransformerEncoderLayer(
            dim, heads, ff, 0.0, F.gelu, batch_first=True, norm_first=True, device="meta"
        )
        stack = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.transformer = draw_weights(stack, generator)
        self.norm = nn.LayerNorm(dim)
        self.labels = _token(n_way or 0, dim, generator=generator) if use_labels else None

    @property
    def any_way(self) -> bool:
        """Return whether tasks may have any number of classes; not if labels have embeddings."""
        return self.labels is None

    def train(self, mode: bool = True) -> "TransformerKey":
        """Set the mode of all parts but the transformer, whose modes mean the same (no dropout)."""
        super().train(mode)
        # In evaluation mode a fused kernel would round keys differently when gradients are off.
        self.transformer.train()
        return self

    def forward(self, support: Batch, params: Params | None = None) -> Float[Tensor, "task dim"]:
        """Return the keys K of Eq. 4."""
        tokens = self.embed(support, params)
        if self.labels is not None:
            check_labels(support.y, len(self.labels), what="support labels")
            tokens = tokens + self.labels[support.y]
        cls = self.cls.expand(len(tokens), 1, self.dim)
        out = self.transformer(torch.cat([cls, tokens], dim=1))
        return checked_keys(self.norm(out[:, 0]), unit=self.unit)


@final
class MeanKey(_OfExamples):
    """Use the mean of the e_i as the key, on the unit sphere if ``unit``: Eq. 4 without a Transformer."""

    Options: ClassVar[type[KeyOptions]] = MeanKeyOptions

    @classmethod
    def build(
        cls, options: MeanKeyOptions, model: Model, tasks: TaskShape, *, generator: Generator
    ) -> "MeanKey":
        """Make the key network from its options."""
        embedder = build_embedder(
            options.embedder, model, tasks, dim=options.dim, generator=generator
        )
        return cls(embedder, unit=options.unit)

    def forward(self, support: Batch, params: Params | None = None) -> Float[Tensor, "task dim"]:
        """Return the mean embedding of each task."""
        return checked_keys(self.embed(support, params).mean(1), unit=self.unit)


def _token(*shape: int, generator: Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=generator) / math.sqrt(shape[-1]))
