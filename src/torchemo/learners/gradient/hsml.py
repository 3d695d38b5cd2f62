"""HSML: Hierarchically Structured Meta-learning (Yao, Wei, Huang, Li, ICML 2019)."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Batch, Model, Params, TaskShape
from torchemo.learners.gradient.loop import LoopOptions
from torchemo.learners.gradient.parts import (
    Embedding,
    MeanAutoencoder,
    SequenceAutoencoder,
    SetAutoencoder,
    soft_assignment,
)
from torchemo.learners.gradient.parts.embedding import embedding_for
from torchemo.learners.gradient.parts.initial import linear, uniform
from torchemo.learners.gradient.parts.task_gated import TaskGated, TaskGatedOptions
from torchemo.learners.learner import scoped, within


@final
@dataclass(frozen=True)
class HSML:
    """Describe a task by its code g and by the path of g through a soft tree of clusters.

    An auto-encoder reads the support examples ``[E(x) ; onehot(y)]`` into g; its loss is the reader's.
    Leaf i takes ``u_i = p_i tanh(W_i g + b_i)``, p the soft assignment of g to the leaves' centres. Node
    j of a layer above takes ``v_j = sum_i p_ij tanh(U_j u_i + d_j)``, p_ij a softmax over j of
    ``w_j . u_i + b_j``. The root is ``r = sum_j tanh(R v_j + b)``, and the description [g ; r].

    Choice: the published label code is 1 - onehot by an accident; we use onehot. Its clamp of the outer
    gradients beside the ``mean`` auto-encoder is left to the outer loop's clipping.

    Args:
        embedding: Embeds a support example.
        n_way: Classes of a task; None for regression, where the embedding reads the targets.
        code: d, size of g.
        tree: Clusters of each layer from the leaves up, without the root.
        width: sigma of the assignment to leaves: 10 for images, 2 for regression.
        gate: How nodes are chosen: ``linear``, or ``distance``: by -(||u_i - w_j||^2 + b_j) / 2.
        autoencoder: ``rnn`` (in order) or ``mean`` (of the examples).
        examples: At most this many support examples are read.
    """

    embedding: Embedding
    n_way: int | None
    code: int = 128
    tree: tuple[int, ...] = (4, 2)
    width: float = 10.0
    gate: Literal["linear", "distance"] = "linear"
    autoencoder: Literal["rnn", "mean"] = "rnn"
    examples: int = 10

    def __post_init__(self) -> None:
        if not self.tree or min(self.tree) < 1 or self.examples < 1 or not self.width > 0:
            raise ConfigError(
                "HSML: tree should be one or more layers of at least one cluster, examples 1 or more and"
                f" width above 0, got {self.tree}, {self.examples}, {self.width}."
            )

    @property
    def dim(self) -> int:
        """Size of [g ; r]."""
        return 2 * self.code

    @property
    def reads_labels(self) -> bool:
        """Labels are read with their examples."""
        return self.n_way is not None

    @cached_property
    def _set(self) -> SetAutoencoder:
        kind = SequenceAutoencoder if self.autoencoder == "rnn" else MeanAutoencoder
        return kind(self.embedding.dim + (self.n_way or 0), self.code)

    def init(self, generator: torch.Generator) -> Params:
        """Draw embedding, auto-encoder and tree."""
        d, (leaves, *above) = self.code, self.tree
        parts = {
            "embed/": self.embedding.init(generator),
            "code/": self._set.init(generator),
            "leaf/": {"centre": uniform((leaves, d), generator), **_maps(leaves, d, generator)},
            "root/": linear(d, d, generator),
        }
        for number, nodes in enumerate(above):
            chosen = {
                "gate": uniform((nodes, d), generator),
                "gate_bias": torch.zeros(nodes, device=generator.device),
            }
            parts[f"layer{number}/"] = {**chosen, **_maps(nodes, d, generator)}
        return {n: t for scope, part in parts.items() for n, t in within(scope, part).items()}

    def __call__(
        self, params: Params, support: Batch
    ) -> tuple[Float[Tensor, "task dim"], Float[Tensor, " task"]]:
        """Return [g ; r] and the reconstruction losses."""
        read = Batch(support.x[:, : self.examples], support.y[:, : self.examples])
        examples = self.embedding(scoped(params, "embed/"), read)
        if self.n_way is not None:
            labels = F.one_hot(read.y.long(), self.n_way).to(examples.dtype)
            examples = torch.cat([examples, labels], dim=-1)
        g, losses = self._set(scoped(params, "code/"), examples)
        return torch.cat([g, self.path(params, g)], dim=1), losses

    def path(self, params: Params, g: Float[Tensor, "task dim"]) -> Float[Tensor, "task dim"]:
        """Climb the tree from g to the root."""
        leaf = scoped(params, "leaf/")
        share = soft_assignment(g[:, None], leaf["centre"], width=self.width)
        nodes = share.transpose(1, 2) * _mapped(leaf, g[:, None])[:, 0]
        for number in range(len(self.tree) - 1):
            layer = scoped(params, f"layer{number}/")
            share = self._choice(layer, nodes).softmax(-1)
            nodes = (share[..., None] * _mapped(layer, nodes)).sum(1)
        return F.linear(nodes, params["root/weight"], params["root/bias"]).tanh().sum(1)

    def _choice(self, layer: Params, nodes: Tensor) -> Tensor:
        """Return how much each node prefers each one above it, before the softmax."""
        if self.gate == "linear":
            return F.linear(nodes, layer["gate"], layer["gate_bias"])
        squared = (nodes[:, :, None] - layer["gate"]).square().sum(-1)
        return -0.5 * (squared + layer["gate_bias"])


def _maps(nodes: int, d: int, generator: torch.Generator) -> Params:
    """Draw a linear map per node."""
    drawn = [linear(d, d, generator) for _ in range(nodes)]
    return {part: torch.stack([one[part] for one in drawn]) for part in ("weight", "bias")}


def _mapped(layer: Params, below: Float[Tensor, "task i dim"]) -> Float[Tensor, "task i j dim"]:
    """Apply every node's map j to every vector i below, with tanh."""
    return (torch.einsum("jod,bid->bijo", layer["weight"], below) + layer["bias"]).tanh()


@final
@dataclass(frozen=True)
class HSMLOptions(TaskGatedOptions):
    """Options of HSML."""

    tree: tuple[int, ...] = (4, 2)
    """Clusters of each layer of the tree, from the leaves up, without the root."""
    tree_gate: Literal["linear", "distance"] = "linear"
    """How a node chooses among those above it."""
    autoencoder: Literal["rnn", "mean"] = "rnn"
    """How the support examples become a code."""


@final
@dataclass(frozen=True)
class HSMLLearner(TaskGated):
    """MAML from an initialisation that HSML's description of the task gates."""

    title: ClassVar[str] = "HSML"
    Options: ClassVar[type[LoopOptions]] = HSMLOptions

    @classmethod
    def build(cls, options: HSMLOptions, model: Model, tasks: TaskShape) -> "HSMLLearner":
        """Make the learner from its options."""
        half = len(tasks.x) == 3  # as published: 64 for images beside a code of 128, 40 for points
        reader = HSML(
            embedding_for(tasks, options.task_dim // 2 if half else options.task_dim),
            tasks.n_way,
            code=options.task_dim,
            tree=options.tree,
            width=options.task_width,
            gate=options.tree_gate,
            autoencoder=options.autoencoder,
        )
        return cls(options.loop(model, tasks), reader, options.weight(tasks))
