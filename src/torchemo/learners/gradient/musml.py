"""MUSML: Subspace Learning for Effective Meta-Learning (Jiang, Kwok, Zhang, ICML 2022)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.prototypes import class_means
from torchemo.core.types import Batch, Model, Params, Start, TaskShape
from torchemo.learners.gradient.base import GradientLearner, How
from torchemo.learners.gradient.inner import adapt
from torchemo.learners.gradient.loop import LoopOptions
from torchemo.learners.learner import Fitted, Traits, scoped, within
from torchemo.models.alone import reads_support

COLUMNS, COORDINATES, FIT, NETWORKS = "columns/", "coordinates", "fit", "networks/"


@final
@dataclass(frozen=True)
class MUSMLOptions(LoopOptions):
    """Options of MUSML; no settings are public, and these are ours."""

    subspaces: int = 4
    """K_s, subspaces."""
    subspace_dim: int = 2
    """m, columns of a subspace."""
    temperature: tuple[float, float] = (1.0, 0.1)
    """gamma of the choice of a subspace, at the beginning and at the end."""
    anneal: int = 1000
    """Outer steps from one gamma to the other."""


@final
@dataclass(frozen=True)
class MUSML(GradientLearner):
    """Learn several subspaces of parameters, and adapt a task's coordinates in each.

    Subspace k has m columns, each a whole network: ``w = S_k v``. A task begins at ``v_k = 1/m`` and takes
    steps ``v_k <- v_k - alpha S_k^T grad L_S(S_k v_k)`` in every subspace. While training, the outer loss is
    ``sum_k pi_k L_Q(S_k v_k)`` with ``pi = softmax(-L_S(S_k v_k) / gamma)``, and gamma falls linearly; to
    answer, a task takes the subspace with the smallest support loss.

    With ``n_way`` the columns hold no head: a network answers by the mean squared distance of features to the
    support set's prototypes p_c under the same network, ``W_c = 2 p_c / f``, ``b_c = -||p_c||^2 / f`` for f
    features. A few coordinates cannot follow classes that come in any order, as a head among the columns
    would have to.

    EMO remembers gradients in the coordinates, ``K_s m`` numbers.

    Choice: no code is public. Four subspaces of two columns, gamma from 1 to 0.1, columns drawn as
    independent networks, the head of prototypes, and the preset's inner steps, rates and tasks are our own
    choices.

    Args:
        loop: The inner loop; its rate is that of the coordinates.
        subspaces: See `MUSMLOptions`, as for the next three.
        subspace_dim: m.
        temperature: gamma.
        anneal: Outer steps.
        progress: How far the annealing is, 0 to 1; `scheduled` sets it.
        n_way: Classes of a task, for a head of prototypes; None leaves the head in the columns.
    """

    title: ClassVar[str] = "MUSML"
    Options: ClassVar[type[LoopOptions]] = MUSMLOptions

    subspaces: int = 4
    subspace_dim: int = 2
    temperature: tuple[float, float] = (1.0, 0.1)
    anneal: int = 1000
    progress: float = 0.0
    n_way: int | None = None

    def __post_init__(self) -> None:
        if (
            self.subspaces < 1
            or self.subspace_dim < 1
            or self.anneal < 1
            or min(self.temperature) <= 0
        ):
            raise ConfigError(
                "MUSML: subspaces, subspace_dim and anneal should be 1 or more and temperatures above 0, got"
                f" {self.subspaces}, {self.subspace_dim}, {self.anneal}, {self.temperature}."
            )
        if self.loop.model.buffers or self.loop.adapts != "all":
            raise ConfigError(
                "MUSML: subspaces hold whole networks without running statistics.",
                hint="Use model.bn = transductive.",
            )
        if reads_support(self.loop.model):
            raise ConfigError(
                "MUSML: queries are normalised together, all subspaces in one call.",
                hint="Use model.bn = transductive.",
            )

    @classmethod
    def build(cls, options: MUSMLOptions, model: Model, tasks: TaskShape) -> "MUSML":
        """Make the learner from its options."""
        return cls(options.loop(model, tasks), n_way=tasks.n_way, **options.own())

    @property
    def traits(self) -> Traits:
        """With one subspace, what is trained is what answers; among several, labels choose.

        Prototypes read labels too.
        """
        second, one = self.loop.order == 2, self.subspaces == 1
        reads = not one or self.n_way is not None
        return Traits(second and one, second_order=second, reads_labels_at_start=reads)

    def remembered(self, content: str) -> dict[str, torch.Size]:
        """Return what a memory holds for a task: its coordinates."""
        if content == "query":
            raise ConfigError("MUSML has no query gradient in its coordinates.")
        return {COORDINATES: torch.Size((self.subspaces, self.subspace_dim))}

    def init(self, generator: torch.Generator) -> Params:
        """Draw a network for every column: ``columns/{name} [K_s, m, *shape]``."""
        drawn = [self.loop.model.init(generator) for _ in range(self.subspaces * self.subspace_dim)]
        size = (self.subspaces, self.subspace_dim)
        built = () if self.n_way is None else self.loop.model.head
        return {
            COLUMNS + name: torch.stack([one[name] for one in drawn]).view(*size, *p.shape)
            for name, p in drawn[0].items()
            if name not in built
        }

    def for_classes(self, n_way: int) -> "MUSML":
        """Return this learner for tasks of ``n_way`` classes: its heads are made of prototypes."""
        return replace(self, loop=self.loop.for_classes(n_way), n_way=n_way)

    def start(self, params: Params, support: Batch, *, base: Params) -> Start:
        """Begin at the mean of each subspace's columns."""
        tasks = support.x.shape[0]
        columns = scoped(params, COLUMNS)
        like = next(iter(columns.values()))
        v = like.new_full((tasks, self.subspaces, self.subspace_dim), 1 / self.subspace_dim)
        spread = {n: c.expand(tasks, *c.shape) for n, c in columns.items()}
        return Start({COORDINATES: v, **within(COLUMNS, spread)})

    def inner(self, start: Start, support: Batch, how: How) -> Fitted:
        """Move the coordinates in every subspace; to answer, keep the best one's networks."""
        scale = self.loop.loss_scale
        fitted = adapt(
            lambda theta, x, step: self._on_support(theta, support)[1],
            self.loop.opened(start, how.memory),
            support,
            # The subspaces share no coordinates: the gradient of the sum is each one's own.
            loss=lambda out, y: scale * self._losses(out, y).sum(1),
            rule=self.loop.rule,
            steps=self.loop.steps if how.steps is None else how.steps,
            names=[COORDINATES],
            order=how.order,
            direction=None if how.memory is None else how.memory.direction,
        )
        with torch.set_grad_enabled(how.order > 0):
            whole, out = self._on_support(fitted.path[-1], support)
            fit = self._losses(out, support.y)
        if how.order > 0:
            return fitted._replace(state={FIT: fit, **within(NETWORKS, whole)})
        best = fit.argmin(1)
        nets = (self._on_support(theta, support)[0] for theta in fitted.path)
        path = tuple(_of_subspace(whole, best) for whole in nets)
        return fitted._replace(state=path[-1], path=path, support_x=support.x, evaluation=True)

    def predict(self, fitted: Fitted, x: Tensor, *, step: int | None = None) -> Tensor:
        """Answer with the network of the best subspace; while training, after the last step alone."""
        if FIT not in fitted.state:
            return super().predict(fitted, x, step=step)
        best = fitted.state[FIT].argmin(1)
        return self.loop.model(_of_subspace(scoped(fitted.state, NETWORKS), best), x)

    def loss(self, fitted: Fitted, query: Batch) -> Float[Tensor, " task"]:
        """Return ``sum_k pi_k L_Q(S_k v_k)``; its gradient runs through the coordinates and through pi."""
        first, last = self.temperature
        gamma = first + self.progress * (last - first)
        share = (-fitted.state[FIT] / gamma).softmax(1)
        answers = self._answers(scoped(fitted.state, NETWORKS), query.x)
        return (share * self._losses(answers, query.y)).sum(1)

    def scheduled(self, iteration: int) -> "MUSML":
        """Move gamma to where it is at ``iteration``."""
        return replace(self, progress=min(1.0, iteration / self.anneal))

    def _on_support(
        self, theta: Params, support: Batch
    ) -> tuple[Params, Float[Tensor, "task subspace n out"]]:
        """Return ``w = S_k v_k [B, K_s, ...]``, with heads of prototypes if any, and its answers."""
        whole, model = networks(theta), self.loop.model
        if self.n_way is None:
            return whole, self._answers(whole, support.x)
        features = self._each(model.features, whole, support.x)
        each = features.flatten(0, 1)
        labels = support.y.repeat_interleave(self.subspaces, dim=0)
        prototypes = class_means(each, labels, n_way=self.n_way)
        weight, bias = model.head
        head = {weight: 2 / each.shape[-1] * prototypes, bias: -prototypes.square().mean(-1)}
        size, out = features.shape[:2], model.classify(head, each)
        heads = {name: t.view(*size, *t.shape[1:]) for name, t in head.items()}
        return {**whole, **heads}, out.view(*size, *out.shape[1:])

    def _answers(self, whole: Params, x: Tensor) -> Float[Tensor, "task subspace n out"]:
        return self._each(self.loop.model, whole, x)

    def _each(
        self, call: Callable[[Params, Tensor], Tensor], whole: Params, x: Tensor
    ) -> Float[Tensor, "task subspace n out"]:
        """Call every subspace's network: one by one for a single task, otherwise all together."""
        tasks = x.shape[0]
        if tasks == 1:
            # Networks have a faster path for one task at a time.
            each = [{n: w[:, k] for n, w in whole.items()} for k in range(self.subspaces)]
            return torch.stack([call(own, x) for own in each], dim=1)
        folded = {n: w.flatten(0, 1) for n, w in whole.items()}
        out = call(folded, x.repeat_interleave(self.subspaces, dim=0))
        return out.view(tasks, self.subspaces, *out.shape[1:])

    def _losses(
        self, out: Float[Tensor, "task subspace n out"], y: Tensor
    ) -> Float[Tensor, "task subspace"]:
        each = [self.loop.loss(out[:, k], y) for k in range(self.subspaces)]
        return torch.stack(each, dim=1)


def networks(theta: Params) -> Params:
    """Return ``w = S_k v_k``: ``{name: [B, K_s, *shape]}``."""
    v = theta[COORDINATES]
    return {
        name: torch.einsum("bkm,bkm...->bk...", v, columns)
        for name, columns in scoped(theta, COLUMNS).items()
    }


def _of_subspace(whole: Params, k: Tensor) -> Params:
    task = torch.arange(len(k), device=k.device)
    return {name: w[task, k] for name, w in whole.items()}
