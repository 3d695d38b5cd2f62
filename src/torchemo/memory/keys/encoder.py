"""Task keys (Eq. 4): one vector per task, read from its support set.

An embedder turns each support example into e_i, an encoder turns the e_i of a task into its key K.
All weights are drawn from an explicit generator. A key never depends on the order of the support
set, nor on the other tasks of the batch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypeVar, final, runtime_checkable

import torch
from torch import Generator, Tensor, nn

from torchemo.core.errors import DataError, ShapeError
from torchemo.core.types import Batch, Model, Params, TaskShape

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


KeyTraining: TypeAlias = Literal["none", "outer", "self_recognition"]


@dataclass(frozen=True)
class KeyOptions:
    """Options of every key network that can learn."""

    training: KeyTraining = "outer"
    """How keys learn (A3): not at all, by the outer loss through softmax weights, or by recognising their
    own task among others."""
    recognition_older: int = 48
    """self_recognition: older support sets used as negatives."""


@final
class LearnerKey:
    """The learner's own description of a task, as a unit vector: [q ; t] of ARML, [g ; r] of HSML (A1)."""

    @classmethod
    def build(
        cls, options: object, model: Model, tasks: TaskShape, *, generator: Generator
    ) -> None:
        """Make no key network: the learner describes its tasks."""
        return


@runtime_checkable
class Summarizing(Protocol):
    """A key network whose weights see a support set only through numbers that no weight enters.

    Whoever keeps support sets to encode them again can keep these numbers instead.
    """

    def summary(self, support: Batch) -> Tensor:
        """Return the numbers ``[B, s]`` of the support sets of B tasks."""

    def of_summary(self, summary: Tensor) -> Tensor:
        """Return the keys ``[B, dim]`` of support sets with these numbers."""


def check_support(support: Batch) -> None:
    """Refuse support sets that are empty, misshapen or not finite; names the task."""
    x, y = support
    if x.ndim < 3 or x.shape[1] == 0 or x.shape[:2] != y.shape[:2]:
        raise ShapeError(
            "support set: expected x [B, n, ...] and y [B, n, ...] with n > 0,"
            f" got {list(x.shape)} and {list(y.shape)}."
        )
    if not x.is_cpu:
        return  # a recall looks at the keys, together with what it has to fetch from the device anyway
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
    if not keys.is_cpu:
        return keys
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
