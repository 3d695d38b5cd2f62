"""What a learner is: fit to a support set, predict queries, and the loss that trains it.

Names with a slash belong to the learner (``rate/conv1.weight``), all others to its network. Those that
begin with ``state/`` are kept with the parameters, but no gradient moves them.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.tree import carried_back
from torchemo.core.types import BaseClasses, Batch, Model, Params, Start
from torchemo.memory.bound import BoundMemory
from torchemo.models.alone import Answering, alone, reads_support


class Traits(NamedTuple):
    """What a learner declares about itself; the law suite checks it.

    Attributes:
        exact_meta_gradient: Per-task gradients are the exact gradient of the query loss (finite differences
            agree).
        label_equivariant: Permuting the labels of a task together with its head rows changes no loss.
        second_order: The graph of the inner gradients is kept.
        reads_labels_at_start: Support labels are used before the first step, so that accuracy there may
            exceed 1/N.
        inner_loop: The learner takes gradient steps, which a memory of gradients can join.
    """

    exact_meta_gradient: bool = True
    label_equivariant: bool = True
    second_order: bool = True
    reads_labels_at_start: bool = False
    inner_loop: bool = True


class Fitted(NamedTuple):
    """A learner fitted to the support sets of B tasks.

    Attributes:
        state: What `Learner.predict` and `Learner.loss` need: adapted weights, prototypes, a head.
        path: Parameters theta_0, ..., theta_S of an inner loop, adapted or not; empty without one.
        gradients: Support gradients g_0, ..., g_{S-1} of the adapted tensors, before any recall.
        support_losses: Support losses before each inner step, ``[B, S]``; None without an inner loop.
        extra_values: What the learner wants remembered beside the gradients, ``{name: [B, ...]}``.
        support_x: Support inputs, for networks that normalise a query with them.
        statistics: Normalisation statistics seen at inner steps, for networks that keep running ones.
        evaluation: Fitted without a graph, with stored normalisation statistics.
        alone: Answer each query by itself (`torchemo.models.alone`); keeps the networks that do so, by inner
            step. None answers them together, as the network normalises what it is given at once.
        earlier: Earlier visits of the same tasks, where a support set is taken as several.
    """

    state: Params
    path: tuple[Params, ...] = ()
    gradients: tuple[Params, ...] = ()
    support_losses: Float[Tensor, "task step"] | None = None
    extra_values: Params | None = None
    support_x: Tensor | None = None
    statistics: dict[int, Params] | None = None
    evaluation: bool = False
    alone: dict[int, Answering] | None = None
    earlier: tuple["Fitted", ...] = ()


@runtime_checkable
class Learner(Protocol):
    """A meta-learner on the task axis."""

    @property
    def title(self) -> str:
        """Its name in tables and reports."""
        ...

    @property
    def model(self) -> Model:
        """Its network."""
        ...

    @property
    def traits(self) -> Traits:
        """What it declares about itself."""
        ...

    def init(self, generator: torch.Generator) -> Params:
        """Draw all meta-parameters."""
        ...

    def fit(
        self,
        start: Start,
        support: Batch,
        *,
        memory: BoundMemory | None = None,
        steps: int | None = None,
        graph: bool = True,
    ) -> Fitted:
        """Fit B tasks to their support sets.

        Args:
            start: Where the tasks begin.
            support: Their support sets.
            memory: A memory with their recall, which joins the inner steps.
            steps: Inner steps, by default those of training; a learner without any ignores it.
            graph: Keep what the outer gradient needs. Without it, running statistics are used as stored.
        """
        ...

    def predict(self, fitted: Fitted, x: Tensor, *, step: int | None = None) -> Tensor:
        """Answer queries ``x [B, n, ...]`` after inner step ``step``, by default the last."""
        ...

    def loss(self, fitted: Fitted, query: Batch) -> Float[Tensor, " task"]:
        """Return the outer loss of each task, on the graph."""
        ...


@runtime_checkable
class StartsPerTask(Protocol):
    """A learner whose tasks do not all begin at the shared parameters."""

    def start(self, params: Params, support: Batch, *, base: Params) -> Start:
        """Return where each task begins.

        Args:
            params: Meta-parameters without a task axis.
            support: Support sets of B tasks.
            base: The network's tensors with a task axis: the leaves of the per-task gradients. What a memory
                adds to the start is added to what this returns.
        """
        ...


@runtime_checkable
class OwnGradient(Protocol):
    """A learner whose outer gradient is not that of its loss (Reptile)."""

    def rows(
        self, start: Start, fitted: Fitted, query: Batch, *, leaves: Sequence[Tensor]
    ) -> tuple[Float[Tensor, " task"], list[Tensor]]:
        """Return each task's outer loss, and its gradient for every leaf."""
        ...


@runtime_checkable
class ReadsClasses(Protocol):
    """A learner whose outer loss may read which base classes stand behind the labels of training tasks."""

    @property
    def base_examples(self) -> int:
        """How many further examples of base classes each training task should bring."""
        ...

    def class_loss(
        self, fitted: Fitted, query: Batch, *, base: BaseClasses
    ) -> Float[Tensor, " task"]:
        """Return the outer loss of each task, on the graph."""
        ...


@runtime_checkable
class Freezes(Protocol):
    """A learner whose episodes leave some of its meta-parameters as they are, such as a pretrained trunk."""

    def trains(self, name: str) -> bool:
        """Return whether episodes move this meta-parameter or running average."""
        ...


@runtime_checkable
class Stepwise(Protocol):
    """A learner with an inner loop, which can answer after any of its steps."""

    @property
    def steps(self) -> int:
        """Inner steps while training."""
        ...

    def adapted(self, theta: Params) -> list[str]:
        """Return the names of the tensors that inner steps move, among those of ``theta``."""
        ...

    def predict_path(self, fitted: Fitted, x: Tensor, *, steps: Sequence[int]) -> list[Tensor]:
        """Answer ``x`` with the parameters after each of the given numbers of inner steps."""
        ...

    def query_gradient(self, fitted: Fitted, query: Batch) -> Params:
        """Differentiate the query loss at theta_S in theta_S itself."""
        ...


@runtime_checkable
class Curved(Protocol):
    """A learner with an inner loop that knows the curvature of its support loss."""

    def followed(self, fitted: Fitted, support: Batch, *, rates: Params | None = None) -> Params:
        """Return gradient, anchor and curvature, ``{name: [B, 1, part, *shape]}``."""
        ...


@runtime_checkable
class HeadAlone(Protocol):
    """A learner that may adapt nothing but its head, so that features are computed once."""

    def on_features(self) -> "Learner | None":
        """Return this learner for features as inputs; None if its trunk changes during the inner loop."""
        ...


@runtime_checkable
class AnyWay(Protocol):
    """A learner that takes any number of classes, whatever it was trained with."""

    def for_classes(self, n_way: int) -> "Learner":
        """Return this learner for tasks of ``n_way`` classes.

        Raises:
            ConfigError: It cannot be had for them; the message says why.
        """
        ...

    @property
    def keeps_rows(self) -> bool:
        """Whether trained rows of the head stay; else all start at their mean."""
        ...

    def params_for(self, params: Params, n_way: int) -> Params:
        """Return its meta-parameters for tasks of ``n_way`` classes."""
        ...


@runtime_checkable
class Balancing(Protocol):
    """A learner whose support loss can weigh classes alike, however many examples they have."""

    def balanced(self) -> "Learner":
        """Return this learner with such a loss."""
        ...


@runtime_checkable
class Scheduled(Protocol):
    """A learner with switches that are annealed over the outer loop."""

    def scheduled(self, iteration: int) -> Learner:
        """Return this learner as it is at an outer iteration."""
        ...


class Advance(NamedTuple):
    """What a staged learner makes of an outer step.

    Attributes:
        gradients: Gradients of the meta-parameters that step now; all others stay where they are.
        resets: New contents of learned meta-parameters, set after the step.
        state: All ``state/`` tensors from now on.
    """

    gradients: Params
    resets: Params
    state: Params


@runtime_checkable
class Staged(Protocol):
    """A learner whose outer steps depend on what the run has come to (TSA-MAML's two stages)."""

    @property
    def title(self) -> str:
        """Its name in tables and reports."""
        ...

    def staged_until(self, tasks: int) -> int:
        """Return the outer step, of ``tasks`` tasks each, at which its last stage begins."""
        ...

    def advance(
        self, params: Params, gradients: Params, *, about: Params, iteration: int
    ) -> Advance:
        """Decide what an outer step changes; nothing has been changed yet.

        Args:
            params: Meta-parameters, with the learner's ``state/`` tensors.
            gradients: Gradient of the mean outer loss in all learned ones.
            about: What `StartsPerTask.start` found out about the B tasks.
            iteration: Which outer step it is, from 0.
        """
        ...


@runtime_checkable
class Remembers(Protocol):
    """A learner that remembers other tensors than those of its network."""

    def remembered(self, content: str) -> dict[str, torch.Size]:
        """Return names and shapes of what a memory of ``content`` holds for a task."""
        ...


STATE = "state/"
"""Prefix of tensors that are kept with the meta-parameters but not learned by gradients."""


def start_of(learner: Learner, params: Params, support: Batch, *, base: Params) -> Start:
    """Return where each task begins: at ``base``, unless the learner has a start of its own."""
    if isinstance(learner, StartsPerTask):
        return learner.start(params, support, base=base)
    return Start(base)


def answering(model: Model, fitted: Fitted, params: Params, *, step: int) -> Answering | None:
    """Return what answers each query by itself; None if queries are answered together.

    Args:
        model: The learner's network.
        fitted: Tasks it was fitted to.
        params: Their parameters after inner step ``step``.
        step: The step.
    """
    if fitted.support_x is None or (fitted.alone is None and not reads_support(model)):
        return None
    if fitted.alone is None:
        return alone(model, params, fitted.support_x, step=step, frozen=fitted.evaluation)
    if step not in fitted.alone:
        fitted.alone[step] = alone(model, params, fitted.support_x, step=step)
    return fitted.alone[step]


def steps_of(learner: Learner) -> int:
    """Return the inner steps of a learner; 0 without an inner loop."""
    return learner.steps if isinstance(learner, Stepwise) else 0


def outer_rows(
    learner: Learner,
    start: Start,
    fitted: Fitted,
    query: Batch,
    *,
    leaves: Sequence[Tensor],
    base: BaseClasses | None = None,
) -> tuple[Float[Tensor, " task"], list[Tensor]]:
    """Return each task's outer loss and its gradient for every leaf (Eq. 3)."""
    if isinstance(learner, OwnGradient):
        return learner.rows(start, fitted, query, leaves=leaves)
    if base is not None and isinstance(learner, ReadsClasses):
        losses = learner.class_loss(fitted, query, base=base)
    else:
        losses = learner.loss(fitted, query)
    return losses.detach(), gradient_rows(losses, leaves)


def network_names(params: Params) -> list[str]:
    """Names of the tensors that belong to the network."""
    return [name for name in params if "/" not in name]


def learned(learner: Learner, params: Params) -> Params:
    """Keep the meta-parameters that gradients move: no running statistics, no ``state/``."""
    fixed = buffers_of(learner)
    return {n: p for n, p in params.items() if n not in fixed and not n.startswith(STATE)}


def moving(learner: Learner, tensors: Params) -> Params:
    """Keep what episodes move; a learner may leave a pretrained trunk as it is."""
    if not tensors or not isinstance(learner, Freezes):
        return tensors
    return {n: t for n, t in tensors.items() if learner.trains(n)}


def buffers_of(learner: Learner) -> tuple[str, ...]:
    """Name all running statistics: those of the network, and those that the learner keeps itself."""
    return (*learner.model.buffers, *getattr(learner, "own_buffers", ()))


def scoped(params: Params, scope: str) -> Params:
    """Take the tensors of one part, without its name: ``{"gate/w": t} -> {"w": t}``."""
    return {n.removeprefix(scope): p for n, p in params.items() if n.startswith(scope)}


def within(scope: str, params: Params) -> Params:
    """Put the name of a part before its tensors' names: ``{"w": t} -> {"gate/w": t}``."""
    return {scope + n: p for n, p in params.items()}


def gradient_rows(losses: Float[Tensor, " task"], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Differentiate the tasks' losses in all leaves at once; unused leaves get zeros.

    Tasks are independent, so row b of the gradient of the sum is the gradient of task b.
    """
    total = losses.sum()
    return carried_back([(total, torch.ones_like(total))], leaves) if leaves else []
