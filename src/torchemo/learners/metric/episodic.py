"""The learner that all metric papers share: embed the support set, fit a head to it, score queries.

A paper is a head. A head fits a classifier to support features in closed form, so there is no inner loop, and
the outer gradient runs through the classifier into both the support and the query features.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torchemo.config.registry import NoOptions
from torchemo.core.errors import ConfigError, DataError
from torchemo.core.losses import check_labels, cross_entropy
from torchemo.core.tree import expand
from torchemo.core.types import Batch, Model, Params, Start, TaskShape
from torchemo.learners.learner import Fitted, Traits, answering, scoped, within
from torchemo.memory.interface import BoundMemory
from torchemo.models.trunk import Trunk

HEAD, CLASSIFIER = "head/", "classifier/"
"""Prefixes of what a head learns in the outer loop, and of what it fits to a support set."""
SUPPORT, QUERY = 0, 1
"""Steps under which networks keep the normalisation statistics of the two passes."""


class Head(ABC):
    """A classifier on features that is fitted to a support set in closed form.

    Every tensor has a leading task axis, except those of `init`. Subclasses are frozen dataclasses that
    inherit their fields from their ``Options``.
    """

    title: ClassVar[str] = ""
    Options: ClassVar[type] = NoOptions

    @classmethod
    def build(cls, options: Any, model: Model, tasks: TaskShape) -> "EpisodicLearner":
        """Make the learner with this head; regression has no classes and is refused."""
        if tasks.kind != "classification":
            raise ConfigError(
                f"{cls.title} needs classes; these tasks are regression.",
                hint="Use a learner with an inner loop, such as learner.name = maml.",
            )
        return EpisodicLearner(model, cls(**vars(options)), n_way=tasks.n_out)

    def init(self, generator: torch.Generator) -> Params:
        """Draw what the head learns in the outer loop; by default nothing."""
        return {}

    @abstractmethod
    def fit(
        self,
        params: Params,
        z: Float[Tensor, "task n f"],
        y: Int[Tensor, "task n"],
        *,
        n_way: int,
    ) -> Params:
        """Fit the classifier to support features ``z``; every class has an example.

        Args:
            params: What `init` has drawn, with a task axis.
            z: Support features.
            y: Their labels, in any order and number.
            n_way: Classes.
        """

    @abstractmethod
    def logits(
        self, params: Params, classifier: Params, z: Float[Tensor, "task q f"]
    ) -> Float[Tensor, "task q way"]:
        """Score query features ``z`` with what `fit` returned."""

    def losses(
        self,
        params: Params,
        classifier: Params,
        z: Float[Tensor, "task q f"],
        y: Int[Tensor, "task q"],
    ) -> Float[Tensor, " task"]:
        """Return the query loss of each task; by default the mean cross-entropy."""
        return cross_entropy(self.logits(params, classifier, z), y)


class LinearHead(Head):
    """A head whose logits are ``z W^T + b``; its classifier is ``weight [B, N, f]`` and ``bias [B, N]``."""

    def logits(
        self, params: Params, classifier: Params, z: Float[Tensor, "task q f"]
    ) -> Float[Tensor, "task q way"]:
        """Apply the linear classifier."""
        weight, bias = classifier["weight"], classifier["bias"]
        return torch.baddbmm(bias.unsqueeze(1), z, weight.transpose(1, 2))


@final
@dataclass(frozen=True)
class EpisodicLearner:
    """Embed the support set once, fit a head to its features, and score queries.

    The meta-parameters are the network's without its own head, and what the paper's head learns, under
    ``head/``. The fitted classifier is in ``Fitted.state`` under ``classifier/``. A linear one is there a
    second time under the names of the network's head, so that ``model(fitted.state, x)`` answers as well.

    Args:
        model: The network; only its features are used.
        head: The paper.
        n_way: Classes of a task; see `for_classes`.

    Example:
        >>> from torchemo.core.rng import generator_for
        >>> from torchemo.learners.metric.protonet import ProtoNet
        >>> from torchemo.models import MLP
        >>> learner = EpisodicLearner(MLP(n_in=2, hidden=(8,)), ProtoNet(), n_way=3)
        >>> theta = expand(learner.init(generator_for(0, "init")), 4)
        >>> support = Batch(torch.rand(4, 6, 2), torch.arange(6).remainder(3).expand(4, 6))
        >>> learner.predict(learner.fit(Start(theta), support), torch.rand(4, 10, 2)).shape
        torch.Size([4, 10, 3])
    """

    model: Model
    head: Head
    n_way: int

    def __post_init__(self) -> None:
        if self.n_way < 2:
            raise ConfigError(f"{self.title} needs two classes or more, got n_way {self.n_way}.")

    @property
    def title(self) -> str:
        """Name of the paper's method."""
        return self.head.title

    @property
    def traits(self) -> Traits:
        """There is no inner loop, and the classifier is made of support labels."""
        return Traits(second_order=False, reads_labels_at_start=True, inner_loop=False)

    def init(self, generator: torch.Generator) -> Params:
        """Draw the body's parameters, then those of the paper's head."""
        body = Trunk(self.model).init(generator)
        return {**body, **within(HEAD, self.head.init(generator))}

    def start(self, params: Params, support: Batch, *, base: Params) -> Start:
        """Begin at the shared parameters; what the head learns gets a task axis as well."""
        own = {name: p for name, p in params.items() if name.startswith(HEAD)}
        return Start({**base, **expand(own, support.x.shape[0])})

    def fit(
        self,
        start: Start,
        support: Batch,
        *,
        memory: BoundMemory | None = None,
        steps: int | None = None,
        graph: bool = True,
    ) -> Fitted:
        """Fit the head to the features of the support set; ``steps`` is ignored."""
        if memory is not None:
            raise ConfigError(
                f"{self.title} takes no inner steps, so that no recalled gradient could join one.",
                hint="memory.name = offsets adds learned offsets to the start instead.",
            )
        _check_support(support.y, self.n_way)
        seen: dict[int, Params] = {}
        with torch.set_grad_enabled(graph and torch.is_grad_enabled()):
            z = self._at(SUPPORT, seen, stored=not graph).features(start.theta, support.x)
            own = scoped(start.theta, HEAD)
            classifier = self.head.fit(own, z, support.y, n_way=self.n_way)
        state = {**start.theta, **within(CLASSIFIER, classifier), **self._as_network(classifier)}
        return Fitted(state, support_x=support.x, statistics=seen, evaluation=not graph)

    def predict(self, fitted: Fitted, x: Tensor, *, step: int | None = None) -> Tensor:
        """Score queries; there is one answer, whatever ``step`` says."""
        own, classifier = scoped(fitted.state, HEAD), scoped(fitted.state, CLASSIFIER)
        return self.head.logits(own, classifier, self._features(fitted, x))

    def loss(self, fitted: Fitted, query: Batch) -> Float[Tensor, " task"]:
        """Return the query loss of each task."""
        check_labels(query.y, self.n_way, what="query labels")
        own, classifier = scoped(fitted.state, HEAD), scoped(fitted.state, CLASSIFIER)
        return self.head.losses(own, classifier, self._features(fitted, query.x), query.y)

    def for_classes(self, n_way: int) -> "EpisodicLearner":
        """Return this learner for tasks of ``n_way`` classes: nothing learned depends on their number."""
        return replace(self, n_way=n_way)

    def _features(self, fitted: Fitted, x: Tensor) -> Float[Tensor, "task q f"]:
        """Embed queries, normalised as the network says."""
        found = answering(self.model, fitted, fitted.state, step=QUERY)
        if found is not None:
            network, params = found
            return network.features(params, x)
        seen = {} if fitted.statistics is None else fitted.statistics
        return self._at(QUERY, seen, stored=fitted.evaluation).features(fitted.state, x)

    def _at(self, step: int, seen: dict[int, Params], *, stored: bool) -> Model:
        """Return the network of a pass, noting its batch statistics if it averages them."""
        if stored or not self.model.buffers or step in seen:
            return self.model.at(step, stored=stored)
        return self.model.at(step, sink=seen.setdefault(step, {}))

    def _as_network(self, classifier: Params) -> Params:
        """Name a linear classifier as the network names its head, if that has weight and bias."""
        names = self.model.head
        if not isinstance(self.head, LinearHead) or len(names) != 2:
            return {}
        return dict(zip(names, (classifier["weight"], classifier["bias"]), strict=True))


def one_hot(y: Int[Tensor, "task n"], n_way: int, *, like: Tensor) -> Float[Tensor, "task n way"]:
    """Turn labels into indicator rows of the type of ``like``."""
    return F.one_hot(y.long(), n_way).to(like.dtype)


def check_above_zero(**options: float) -> None:
    """Raise `ConfigError` naming the first option that is not a finite number above 0."""
    for name, value in options.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"learner.{name} should be finite and above 0, got {value}.")


def _check_support(y: Tensor, n_way: int) -> None:
    """Raise `DataError` unless labels are whole numbers and every class of every task has an example."""
    if y.is_floating_point() or y.dim() != 2:
        raise DataError(
            f"support labels should be whole numbers [task, n], got {y.dtype} {list(y.shape)}.",
            hint="Metric learners classify; regression needs a learner with an inner loop.",
        )
    check_labels(y, n_way, what="support labels")
    absent = (F.one_hot(y.long(), n_way).sum(1) == 0).nonzero()
    if len(absent):
        b, c = absent[0].tolist()
        raise DataError(
            f"support set of task {b}: class {c} has no example.",
            hint="Metric learners need at least one support example of every class.",
        )
