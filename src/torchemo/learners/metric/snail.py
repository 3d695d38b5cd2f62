"""SNAIL: A Simple Neural Attentive Meta-Learner (Mishra, Rohaninejad, Chen, Abbeel, ICLR 2018)."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log2
from typing import Any, ClassVar, Literal, NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError, DataError
from torchemo.core.types import Model, Params, TaskShape
from torchemo.learners.head import Features, Head, HeadOptions, Labels, Logits, one_hot
from torchemo.models.inputs import check_positive
from torchemo.models.layers import glorot_uniform, task_linear, zeros
from torchemo.models.trunk import feature_count


@dataclass(frozen=True)
class SNAILOptions(HeadOptions):
    """Options of SNAIL; the defaults are the paper's, for support sets of up to 25 examples."""

    filters: int = 128
    """Channels that a dense block adds."""
    widths: tuple[int, int, int] = (32, 128, 256)
    """Channels that each attention block reads; its keys have twice as many."""
    longest: int = 25
    """Most support examples; the dense blocks reach as far back."""
    first_dilation: Literal[1, 2] = 1
    """1 reaches every example. 2 is the paper's formula taken at its word, which never sees a neighbour."""


class _Sequence(NamedTuple):
    """A task as a sequence: its support examples, then any one of its queries.

    A query is never seen by another position, so that the support part is computed once.
    """

    support: Float[Tensor, "task n c"]
    query: Float[Tensor, "task q c"]


@final
@dataclass(frozen=True)
class SNAIL(SNAILOptions, Head):
    """Read the support set as a sequence of features and labels, and predict the label that comes next.

    Attention blocks and blocks of causal, dilated convolutions alternate: attention, convolutions,
    attention, convolutions, attention, and a linear layer (Section 3 of the paper). A dense block adds
    ``tanh(f) sigmoid(g)`` of a kernel of size two; a convolution block has dilations 1, 2, 4, ...

    Choices: support examples are read in the order in which they are given. Tasks may have fewer classes than
    those of training; they use the first labels.
    """

    title: ClassVar[str] = "SNAIL"
    Options: ClassVar[type] = SNAILOptions
    traits: ClassVar = Head.traits._replace(label_equivariant=False)
    ordered: ClassVar[bool] = True
    learns_to_compare: ClassVar[bool] = True

    features: int = 1
    """Length of a feature vector."""
    n_way: int = 2
    """Classes of training tasks."""

    @classmethod
    def sized(cls, options: Any, model: Model, tasks: TaskShape) -> "SNAIL":
        """Make the head for a network's features and the tasks' classes."""
        return cls(**vars(options), features=feature_count(model), n_way=tasks.n_out)

    def __post_init__(self) -> None:
        check_positive(filters=self.filters, longest=self.longest, widths=min(self.widths))
        if self.first_dilation not in (1, 2):
            raise ConfigError(
                f"learner.first_dilation should be 1 or 2, got {self.first_dilation}."
            )

    @property
    def most_classes(self) -> int | None:
        """Labels are inputs, and there are as many as in training."""
        return self.n_way

    @property
    def dilations(self) -> list[int]:
        """How far back the dense blocks of a convolution block look."""
        blocks = ceil(log2(self.longest + 1))
        return [self.first_dilation * 2**i for i in range(blocks)]

    def init(self, generator: torch.Generator) -> Params:
        """Draw all layers; biases begin at 0."""
        params: Params = {}
        for layer, outs, ins in self._layers():
            params[f"{layer}.weight"] = glorot_uniform((outs, ins), generator)
            params[f"{layer}.bias"] = zeros((outs,), generator)
        return params

    def _layers(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, outputs and inputs of every layer."""
        channels = self.features + self.n_way
        for block, width in enumerate(self.widths):
            for part, outs in (("query", 2 * width), ("key", 2 * width), ("value", width)):
                yield f"attend{block}.{part}", outs, channels
            channels += width
            if block < len(self.widths) - 1:
                for i in range(len(self.dilations)):
                    # A kernel of size two sees two positions; tanh and sigmoid have one half each.
                    yield f"convolve{block}.{i}", 2 * self.filters, 2 * channels
                    channels += self.filters
        yield "label", self.n_way, channels

    def fit(self, params: Params, z: Features, y: Labels, *, n_way: int) -> Params:
        """Put features and labels side by side; the sequence is read when a query is there."""
        if z.shape[1] > self.longest:
            raise DataError(
                f"SNAIL reads at most {self.longest} support examples, got {z.shape[1]}.",
                hint="Give fewer examples, or train it with a larger learner.longest.",
            )
        tokens = torch.cat([z, one_hot(y, self.n_way, like=z)], dim=2)
        return {"tokens": tokens, "classes": z.new_zeros(len(z), n_way)}

    def logits(self, params: Params, classifier: Params, z: Features) -> Logits:
        """Read the sequence with each query at its end."""
        x = _Sequence(classifier["tokens"], F.pad(z, (0, self.n_way)))
        for block in range(len(self.widths)):
            x = _attended(params, x, f"attend{block}")
            if block < len(self.widths) - 1:
                for i, dilation in enumerate(self.dilations):
                    x = _convolved(params, x, f"convolve{block}.{i}", dilation)
        out = task_linear(params, x.query, layer="label")
        return out[..., : classifier["classes"].shape[1]]


def _convolved(params: Params, x: _Sequence, layer: str, dilation: int) -> _Sequence:
    """Add what a causal kernel of size two sees: a position, and the one ``dilation`` before it."""
    n = x.support.shape[1]
    before = F.pad(x.support, (0, 0, dilation, 0))
    pasts = _Sequence(before[:, :n], before[:, n : n + 1].expand(-1, x.query.shape[1], -1))
    grown = []
    for past, now in zip(pasts, x, strict=True):
        f, g = task_linear(params, torch.cat([past, now], 2), layer=layer).chunk(2, -1)
        grown.append(torch.cat([now, f.tanh() * g.sigmoid()], dim=2))
    return _Sequence(*grown)


def _attended(params: Params, x: _Sequence, layer: str) -> _Sequence:
    """Add what each position reads of itself and of those before it."""
    seen = {
        part: [task_linear(params, one, layer=f"{layer}.{part}") for one in x]
        for part in ("query", "key", "value")
    }
    (support, queries), (keys, own_keys), (values, own_values) = seen.values()
    size = keys.shape[-1] ** -0.5
    scores = size * support @ keys.transpose(1, 2)
    future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    read = scores.masked_fill(future, -torch.inf).softmax(-1) @ values
    own = size * (queries * own_keys).sum(-1, keepdim=True)
    weights = torch.cat([size * queries @ keys.transpose(1, 2), own], dim=2).softmax(-1)
    read_by_queries = weights[..., :-1] @ values + weights[..., -1:] * own_values
    return _Sequence(
        torch.cat([x.support, read], dim=2), torch.cat([x.query, read_by_queries], dim=2)
    )
