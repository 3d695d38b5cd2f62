"""The vocabulary: parameters, episodes, recalls, models. Nothing here computes.

Everything that belongs to a task carries a leading task axis B. Meta-parameters have their own shape,
per-task parameters are ``[B, *shape]``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]
"""Named tensors: meta-parameters ``{name: [*shape]}`` or per-task ones ``{name: [B, *shape]}``."""

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``(out [B, n, n_out], target [B, n, ...]) -> losses [B]``, the mean over the n examples of a task."""

Statistics: TypeAlias = Literal["inductive", "transductive"]
"""How queries are answered: each by itself, or together, as a network normalises what it is given at once."""

Direction: TypeAlias = Callable[[Params, int, Params], Params]
"""``(gradients {name: [B, *shape]}, inner step, parameters) -> direction`` like the gradients: EMO's seam."""


class Batch(NamedTuple):
    """Examples of B tasks: inputs ``x [B, n, ...]`` and targets ``y [B, n]`` or ``[B, n, n_out]``."""

    x: Tensor
    y: Tensor


class BaseClasses(NamedTuple):
    """What training knows about the classes of B tasks, and what no test task tells.

    Base classes are those of the training split, counted from 0.

    Attributes:
        labels: Base class behind each label.
        examples: Further examples of any base classes, labelled by these; None if nobody asked for them.
    """

    labels: Int[Tensor, "task way"]
    examples: Batch | None = None


@dataclass(frozen=True)
class Episode:
    """B few-shot tasks: a support set to adapt on and a query set to be judged on.

    Attributes:
        support: What the tasks are adapted on.
        query: What they are judged on.
        domain: Which domain or family each task comes from, for analysis.
        index: Which episode of its split each task is.
        classes: Which class of the data stands behind each label; classes of all splits are counted together.
        task: Which recurring task of a stream it is, -1 for a task that never comes back
            (`torchemo.data.streams`).
        visit: How often that task was there before.
        base: Base classes behind the labels, in training tasks alone. Losses may read them, `fit` cannot.

    Example:
        >>> x, y = torch.rand(2, 5, 3, 32, 32), torch.arange(5).repeat(2, 1)  # two 5-way 1-shot tasks
        >>> Episode(support=Batch(x, y), query=Batch(x, y)).support.x.shape
        torch.Size([2, 5, 3, 32, 32])
    """

    support: Batch
    query: Batch
    domain: Int[Tensor, " task"] | None = None
    index: Int[Tensor, " task"] | None = None
    classes: Int[Tensor, "task way"] | None = None
    task: Int[Tensor, " task"] | None = None
    visit: Int[Tensor, " task"] | None = None
    base: BaseClasses | None = None


class Recall(NamedTuple):
    """What the memory recalls for B tasks, nearest slot first; ``m = min(k, filled slots)``.

    Attributes:
        keys: Task keys K (Eq. 4), on the graph of the key network.
        slots: Slot numbers of the m nearest remembered tasks.
        distances: Euclidean distances to them.
        weights: Recall weights a_j >= 0; uniform (1/m) or softmax, then on the graph of the keys.
        values: Recalled values V_j, detached, ``{name: [B, m, *shape]}``.
        generations: How often each slot had been overwritten when it was read.
        active: Tasks that may use their recall; the others are adapted without it (recall dropout,
            `torchemo.memory.selective`).
        slot_keys: Keys of all filled slots as a leaf that collects their gradient; all tasks share it.
        notes: What else is remembered with the slots (domain, prototypes), ``{name: [B, m, ...]}``.
        own_notes: The same of the tasks at hand, to be remembered with them, ``{name: [B, ...]}``.
        near: Slots close enough to be used (``Retrieval(max_distance=...)``); the others hold zeros of weight
            zero. None: all of them.
        host_slots: ``slots`` of a device on the host, where controllers are; fetched once.
        host_active: ``active`` of a device on the host, where it is known there.

    Example:
        >>> from torchemo import for_module
        >>> emo = for_module(torch.nn.Linear(2, 1), k=5, capacity=10, key_dim=3)
        >>> recall: Recall = emo.recall(torch.zeros(4, 3))  # four tasks, nothing remembered yet
        >>> recall.m, recall.slots.shape
        (0, torch.Size([4, 0]))
    """

    keys: Float[Tensor, "task dim"]
    slots: Int[Tensor, "task m"]
    distances: Float[Tensor, "task m"]
    weights: Float[Tensor, "task m"]
    values: Params
    generations: Int[Tensor, "task m"]
    active: Bool[Tensor, " task"]
    slot_keys: Float[Tensor, "slot dim"] | None = None
    notes: Params | None = None
    own_notes: Params | None = None
    near: Bool[Tensor, "task m"] | None = None
    host_slots: Int[Tensor, "task m"] | None = None
    host_active: Bool[Tensor, " task"] | None = None

    def on_host(self) -> tuple[Int[Tensor, "task m"], Bool[Tensor, " task"]]:
        """Return slots and active tasks on the host."""
        if self.slots.is_cpu:
            return self.slots, self.active
        slots = self.slots if self.host_slots is None else self.host_slots
        active = self.active if self.host_active is None else self.host_active
        return slots.cpu(), active.cpu()

    @property
    def m(self) -> int:
        """How many slots were recalled for each task."""
        return self.slots.shape[1]

    def __repr__(self) -> str:
        used = int(self.active.sum())
        return f"Recall({self.m} slots for each of {len(self.keys)} tasks, used by {used})"

    def shared_fields(self) -> tuple[str, ...]:
        """Name the fields without a task axis (`torchemo.core.task_axis`)."""
        return ("slot_keys",)


class Start(NamedTuple):
    """Where the inner loop of B tasks begins.

    Attributes:
        theta: Per-task parameters ``{name: [B, *shape]}``.
        rates: Per-task inner rates ``{name: [B, R, *r]}`` or None for the rule's own constant. R is the
            step axis (1 = shared by all steps; step s uses entry min(s, R - 1)); r broadcasts to shape.
        auxiliary: What the learner adds to the outer loss of each task before any adaptation (ARML's
            reconstruction losses), on the graph of its own parameters.
        about: What the learner has found out about each task, detached, ``{name: [B, ...]}``: ``key`` may
            serve EMO as the task's key, ``group`` keep memories apart; the rest is for `Staged.advance`.
        gates: What the learner has multiplied tensors of the initialisation by, ``{name: [B, *shape]}``, on
            the graph of its own parameters; offsets of a memory are added before that.
    """

    theta: Params
    rates: Params | None = None
    auxiliary: Float[Tensor, " task"] | None = None
    about: Params | None = None
    gates: Params | None = None


@runtime_checkable
class Model(Protocol):
    """A network as a function with a task axis: ``(params {name: [B, ...]}, x [B, n, ...]) -> out``.

    Calling it equals ``classify(params, features(params, x))``.
    """

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the last linear layer's tensors: weight, then bias."""
        ...

    @property
    def norm(self) -> tuple[str, ...]:
        """Names of the scale and shift of normalisation layers."""
        ...

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of running statistics: no gradient, never adapted."""
        ...

    def init(self, generator: torch.Generator) -> Params:
        """Draw meta-parameters (no task axis)."""
        ...

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Map ``x [B, n, ...]`` to outputs ``[B, n, n_out]``."""
        ...

    def features(self, params: Params, x: Tensor) -> Tensor:
        """Map ``x [B, n, ...]`` to what the head sees, ``[B, n, f]``."""
        ...

    def classify(self, params: Params, features: Tensor) -> Tensor:
        """Apply the head to ``features [B, n, f]``."""
        ...

    def at(self, step: int, *, stored: bool = False, sink: Params | None = None) -> "Model":
        """Return this model as used at inner step ``step``.

        Args:
            step: Inner step, for per-step normalisation statistics.
            stored: Normalise with stored running statistics where the model keeps them.
            sink: Where to put this batch's normalisation statistics, ``{buffer name: [B, ...]}``.
        """
        ...


@final
@dataclass(frozen=True)
class TaskShape:
    """What the tasks look like, as far as parts must know.

    Args:
        kind: Classification (cross-entropy) or regression (squared error).
        x: Shape of one input.
        n_out: Classes of a task, or dimension of a regression target.
        n_shot: Support examples per class, or in all for regression.
        n_query: Queries per class, or in all for regression.
        base_classes: Classes of the training split, with their turned copies; 0 if there are none.

    Example:
        >>> TaskShape("classification", x=(3, 32, 32), n_out=5, n_shot=1).support
        5
    """

    kind: Literal["classification", "regression"]
    x: tuple[int, ...]
    n_out: int
    n_shot: int = 1
    n_query: int = 15
    base_classes: int = 0

    @property
    def support(self) -> int:
        """Number of support examples of a task, N K."""
        return self.n_shot * (self.n_out if self.kind == "classification" else 1)

    @property
    def n_way(self) -> int | None:
        """Number of classes; None for regression."""
        return self.n_out if self.kind == "classification" else None
