"""ARML: Automated Relational Meta-learning (Yao, Wu, Tao, Li, Ding, Li, Li, ICLR 2020)."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.prototypes import class_means
from torchemo.core.types import Batch, Model, Params, TaskShape
from torchemo.learners.gradient.loop import LoopOptions
from torchemo.learners.gradient.parts import (
    Embedding,
    SequenceAutoencoder,
    soft_assignment,
    soft_clusters,
)
from torchemo.learners.gradient.parts.embedding import embedding_for
from torchemo.learners.gradient.parts.initial import Draw, linear, uniform
from torchemo.learners.gradient.parts.task_gated import TaskGated, TaskGatedOptions
from torchemo.learners.learner import scoped, within


@final
@dataclass(frozen=True)
class ARML:
    """Describe a task by its prototypes, before and after they meet a graph of learned knowledge.

    Prototypes C are the mean embeddings of the classes. A GRU auto-encoder reads ``[c_n ; onehot(n)]`` into
    q (loss L_q). C and G learned vertices H form a graph whose edges are `relations` within C and within H
    and a soft assignment between them; one graph convolution `passed` makes C', which a second auto-encoder
    reads into t (loss L_t). The description is [q ; t], the loss L_q + L_t.

    For regression, prototypes are two soft clusters of the points and the first auto-encoder reads the
    points themselves.

    Choice: the published code draws the convolution, the edges and the projections with deviation 1
    (``draw = "tf"``), which saturates; ``glorot`` is ours. The vertices' draw is not stated. With the single
    convolution of the published code, edges among vertices reach no prototype, so they never learn.

    Args:
        embedding: Embeds a support example.
        n_way: Classes of a task; None for regression.
        vertices: G, learned vertices; 0 leaves the prototypes among themselves.
        width: sigma of the assignment to them: 8 for images, 2 for regression.
        clusters: Soft clusters that stand for classes in regression.
        draw: How the weights begin.
    """

    embedding: Embedding
    n_way: int | None
    vertices: int = 4
    width: float = 8.0
    clusters: int = 2
    draw: Draw = "glorot"

    def __post_init__(self) -> None:
        if self.vertices < 0 or self.clusters < 1 or not self.width > 0:
            raise ConfigError(
                "ARML: vertices should be 0 or more, clusters 1 or more and width above 0,"
                f" got {self.vertices}, {self.clusters}, {self.width}."
            )

    @property
    def dim(self) -> int:
        """Size of [q ; t]."""
        return 2 * self.embedding.dim

    @property
    def reads_labels(self) -> bool:
        """Prototypes are read in label order."""
        return self.n_way is not None

    @cached_property
    def _task(self) -> SequenceAutoencoder:
        return SequenceAutoencoder(
            self.embedding.dim + (self.n_way or 0), self.embedding.dim, self.draw
        )

    @cached_property
    def _graph(self) -> SequenceAutoencoder:
        return SequenceAutoencoder(self.embedding.dim, self.embedding.dim, self.draw)

    def init(self, generator: torch.Generator) -> Params:
        """Draw embedding, auto-encoders, vertices, edges and the graph convolution."""
        d = self.embedding.dim
        parts = {
            "embed/": self.embedding.init(generator),
            "code/": self._task.init(generator),
            "graph-code/": self._graph.init(generator),
            "prototype-edge/": linear(d, 1, generator, draw=self.draw),
            "vertex-edge/": linear(d, 1, generator, draw=self.draw),
            "graph/": linear(d, d, generator, draw=self.draw),
            "vertex/": {"weight": uniform((self.vertices, d), generator)},
        }
        if self.n_way is None:
            parts["cluster/"] = linear(d, self.clusters, generator)
        if self.vertices == 0:
            del parts["vertex-edge/"], parts["vertex/"]
        return {n: t for scope, part in parts.items() for n, t in within(scope, part).items()}

    def __call__(
        self, params: Params, support: Batch
    ) -> tuple[Float[Tensor, "task dim"], Float[Tensor, " task"]]:
        """Return [q ; t] and L_q + L_t."""
        embedded = self.embedding(scoped(params, "embed/"), support)
        if self.n_way is None:
            prototypes, sequence = soft_clusters(scoped(params, "cluster/"), embedded), embedded
        else:
            prototypes = class_means(embedded, support.y, n_way=self.n_way)
            names = torch.eye(self.n_way, dtype=embedded.dtype, device=embedded.device)
            sequence = torch.cat([prototypes, names.expand(len(prototypes), -1, -1)], dim=-1)
        q, loss_q = self._task(scoped(params, "code/"), sequence)
        t, loss_t = self._graph(scoped(params, "graph-code/"), self.passed(params, prototypes))
        return torch.cat([q, t], dim=1), loss_q + loss_t

    def passed(
        self, params: Params, prototypes: Float[Tensor, "task n dim"]
    ) -> Float[Tensor, "task n dim"]:
        """Let the prototypes hear the graph: rows C' of ``tanh(D^-1 (A + I) [C ; H] W + b)``."""
        nodes, adjacency = self.graph(params, prototypes)
        linked = adjacency + torch.eye(nodes.shape[1], dtype=nodes.dtype, device=nodes.device)
        mixed = (linked / linked.sum(-1, keepdim=True)) @ nodes
        heard = F.linear(mixed, params["graph/weight"], params["graph/bias"]).tanh()
        return heard[:, : prototypes.shape[1]]

    def graph(
        self, params: Params, prototypes: Float[Tensor, "task n dim"]
    ) -> tuple[Float[Tensor, "task node dim"], Float[Tensor, "task node node"]]:
        """Return the nodes [C ; H] and the adjacency [[A_C, A_CH], [A_CH^T, A_H]]."""
        among = relations(scoped(params, "prototype-edge/"), prototypes)
        if self.vertices == 0:
            return prototypes, among
        vertices = params["vertex/weight"].expand(len(prototypes), -1, -1)
        across = soft_assignment(prototypes, params["vertex/weight"], width=self.width)
        learned = relations(scoped(params, "vertex-edge/"), vertices)
        upper = torch.cat([among, across], dim=2)
        lower = torch.cat([across.transpose(1, 2), learned], dim=2)
        return torch.cat([prototypes, vertices], dim=1), torch.cat([upper, lower], dim=1)


def relations(params: Params, nodes: Float[Tensor, "task n dim"]) -> Float[Tensor, "task n n"]:
    """Return the edges ``sigmoid(w . |x_i - x_j| + b)``; none from a node to itself."""
    apart = (nodes[:, :, None] - nodes[:, None]).abs()
    edges = F.linear(apart, params["weight"], params["bias"]).squeeze(-1).sigmoid()
    return edges * (1 - torch.eye(nodes.shape[1], dtype=nodes.dtype, device=nodes.device))


@final
@dataclass(frozen=True)
class ARMLOptions(TaskGatedOptions):
    """Options of ARML."""

    vertices: int = 4
    """G, vertices of the meta-knowledge graph."""
    task_init: Draw = "glorot"
    """How graph and projections begin; tf is the published code's wide draw."""


@final
@dataclass(frozen=True)
class ARMLLearner(TaskGated):
    """MAML from an initialisation that ARML's description of the task gates."""

    title: ClassVar[str] = "ARML"
    Options: ClassVar[type[LoopOptions]] = ARMLOptions

    @classmethod
    def build(cls, options: ARMLOptions, model: Model, tasks: TaskShape) -> "ARMLLearner":
        """Make the learner from its options."""
        reader = ARML(
            embedding_for(tasks, options.task_dim),
            tasks.n_way,
            vertices=options.vertices,
            width=options.task_width,
            draw=options.task_init,
        )
        return cls(options.loop(model, tasks), reader, options.weight(tasks))
