"""The learner that all metric papers share: embed the support set, fit a head to it, score queries.

A paper is a head. A head fits a classifier to support features in closed form, so there is no inner loop, and
the outer gradient runs through the classifier into both the support and the query features.
"""

from dataclasses import dataclass, replace
from typing import final, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from torchemo.core.errors import ConfigError, DataError
from torchemo.core.losses import check_labels
from torchemo.core.tree import expand
from torchemo.core.types import BaseClasses, Batch, Episode, Model, Params, Start
from torchemo.learners.at_once import Together
from torchemo.learners.head import BnOver, Features, Head, LinearHead, TaskLosses
from torchemo.learners.learner import (
    STATE,
    Fitted,
    Traits,
    answering,
    network_names,
    scoped,
    within,
)
from torchemo.memory.bound import BoundMemory
from torchemo.models.inputs import check_choice
from torchemo.models.trunk import Trunk, in_one_pass

HEAD, CLASSIFIER = "head/", "classifier/"
"""Prefixes of what a head learns in the outer loop, and of what it fits to a support set."""
SUPPORT, QUERY, CONDITIONED = 0, 1, 2
"""Steps under which networks keep the normalisation statistics of the passes."""


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
        check_choice("bn_over", self.head.bn_over, get_args(BnOver))
        if self.runs_at_once and self.head.conditions:
            raise ConfigError(
                f"{self.title} gives each task a network of its own, so that tasks cannot share a pass.",
                hint="Set learner.bn_over = task.",
            )
        if self.n_way < 2:
            raise ConfigError(f"{self.title} needs two classes or more, got n_way {self.n_way}.")
        most = self.head.most_classes
        if most is not None and self.n_way > most:
            raise ConfigError(
                f"{self.title} was trained for at most {most} classes, got {self.n_way}.",
                hint="Ask for fewer classes, or train it with more.",
            )

    @property
    def title(self) -> str:
        """Name of the paper's method."""
        return self.head.title

    @property
    def traits(self) -> Traits:
        """There is no inner loop, and the classifier is made of support labels."""
        declared = self.head.traits
        exact = declared.exact_meta_gradient and not self.head.frozen_trunk
        return declared._replace(exact_meta_gradient=exact)

    def init(self, generator: torch.Generator) -> Params:
        """Draw the body's parameters, then those of the paper's head."""
        body = Trunk(self.model).init(generator)
        own = within(HEAD, self.head.init(generator))
        return {**body, **own, **within(STATE, self.head.init_state(generator))}

    def start(self, params: Params, support: Batch, *, base: Params) -> Start:
        """Begin at the shared parameters; what the head learns gets a task axis as well."""
        own = {name: p for name, p in params.items() if name.startswith((HEAD, STATE))}
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
            theta, own = self._body(start.theta), _own(start.theta)
            z = self._at(SUPPORT, seen, stored=not graph).features(theta, support.x)
            if self.head.conditions:
                theta |= self.head.conditioned(own, theta, z, support.y, n_way=self.n_way)
                z = self._at(CONDITIONED, seen, stored=not graph).features(theta, support.x)
            classifier = self.head.fit(own, z, support.y, n_way=self.n_way)
        state = {**theta, **within(CLASSIFIER, classifier), **self._as_network(classifier)}
        return Fitted(state, support_x=support.x, statistics=seen, evaluation=not graph)

    def predict(self, fitted: Fitted, x: Tensor, *, step: int | None = None) -> Tensor:
        """Score queries; there is one answer, whatever ``step`` says."""
        own, classifier = _own(fitted.state), scoped(fitted.state, CLASSIFIER)
        return self.head.logits(own, classifier, self._features(fitted, x))

    def loss(self, fitted: Fitted, query: Batch) -> TaskLosses:
        """Return the query loss of each task."""
        check_labels(query.y, self.n_way, what="query labels")
        own, classifier = _own(fitted.state), scoped(fitted.state, CLASSIFIER)
        z, sink = self._features(fitted, query.x), dict[str, Tensor]()
        losses = self.head.noting(sink).losses(own, classifier, z, query.y)
        _note(sink, fitted.statistics)
        return losses

    @property
    def base_examples(self) -> int:
        """How many further examples of base classes each training task should bring."""
        return self.head.base_examples

    def class_loss(self, fitted: Fitted, query: Batch, *, base: BaseClasses) -> TaskLosses:
        """Return the query loss of each training task; the head may read its base classes."""
        check_labels(query.y, self.n_way, what="query labels")
        own, classifier = _own(fitted.state), scoped(fitted.state, CLASSIFIER)
        x, further = query.x, base.examples
        # One pass for both, so that a network that normalises by the batch sees them together.
        z = self._features(fitted, x if further is None else torch.cat([x, further.x], dim=1))
        if further is not None:
            base = base._replace(examples=Batch(z[:, x.shape[1] :], further.y))
        sink: Params = {}
        head, z = self.head.noting(sink), z[:, : x.shape[1]]
        losses = head.class_losses(own, classifier, z, query.y, base=base)
        _note(sink, fitted.statistics)
        return losses

    @property
    def own_buffers(self) -> tuple[str, ...]:
        """Names of what the head keeps without learning it."""
        state = within(STATE, self.head.init_state(torch.Generator()))
        return (*(HEAD + name for name in self.head.buffers), *state)

    @property
    def runs_at_once(self) -> bool:
        """Whether all tasks of an outer step go through the network together (``bn_over = batch``)."""
        return self.head.bn_over == "batch"

    def at_once(self, params: Params, episode: Episode) -> Together:
        """Score all tasks with one pass of the network, support and query images in the same batch.

        Nothing is adapted, so the network needs no copy per task: its task axis has length one.

        Args:
            params: Meta-parameters without a task axis, as leaves of the graph.
            episode: B tasks.
        """
        (x, y), (asked, target) = episode.support, episode.query
        _check_support(y, self.n_way)
        check_labels(target, self.n_way, what="query labels")
        base = episode.base
        further = None if base is None else base.examples
        images = [x, asked] if further is None else [x, asked, further.x]
        z, seen = self._shared_features(params, images)
        own = expand(_own(params), len(y))
        classifier = self.head.fit(own, z[0], y, n_way=self.n_way)
        sink: Params = {}
        head = self.head.noting(sink, over="batch")
        if base is None:
            losses = head.losses(own, classifier, z[1], target)
        else:
            known = base if further is None else base._replace(examples=Batch(z[2], further.y))
            losses = head.class_losses(own, classifier, z[1], target, base=known)
        _note(sink, seen)
        state = scoped(params, STATE)
        if state and base is not None:
            state = self.head.written(state, classifier, base)
        return Together(losses, seen, within(STATE, state))

    def _shared_features(
        self, params: Params, images: list[Tensor]
    ) -> tuple[list[Features], dict[int, Params]]:
        """Send images of all tasks through one network, and part their features again."""
        seen: dict[int, Params] = {}
        own = self._body({name: params[name] for name in network_names(params)})
        body = {name: p.unsqueeze(0) for name, p in own.items()}
        x = torch.cat(images, dim=1)
        network = in_one_pass(self._at(SUPPORT, seen, stored=False))
        z = network.features(body, x.flatten(0, 1).unsqueeze(0)).view(*x.shape[:2], -1)
        return list(torch.split(z, [part.shape[1] for part in images], dim=1)), seen

    def trains(self, name: str) -> bool:
        """Return whether episodes move this meta-parameter."""
        return "/" in name or not self.head.frozen_trunk

    def after_dense(self, params: Params, classifier: Params) -> Params:
        """Return what the head takes over from the dense classifier of all base classes."""
        return within(HEAD, self.head.after_dense(classifier))

    def for_classes(self, n_way: int) -> "EpisodicLearner":
        """Return this learner for tasks of ``n_way`` classes, if its head takes so many."""
        return replace(self, n_way=n_way)

    @property
    def keeps_rows(self) -> bool:
        """There is no learned head."""
        return False

    def params_for(self, params: Params, n_way: int) -> Params:
        """Return the parameters as they are."""
        return params

    def _body(self, theta: Params) -> Params:
        """Cut a trunk that episodes do not move from the graph."""
        if not self.head.frozen_trunk:
            return dict(theta)
        return {n: t if "/" in n else t.detach() for n, t in theta.items()}

    def _features(self, fitted: Fitted, x: Tensor) -> Features:
        """Embed queries, normalised as the network says."""
        found = answering(self.model, fitted, fitted.state, step=QUERY)
        if found is not None:
            network, params = found
            return network.features(params, x)
        seen = {} if fitted.statistics is None else fitted.statistics
        return self._at(QUERY, seen, stored=fitted.evaluation).features(fitted.state, x)

    def _at(self, step: int, seen: dict[int, Params], *, stored: bool) -> Model:
        """Return the network of a pass, noting its batch statistics if it averages them."""
        stored = stored or self.head.frozen_trunk
        if stored or not self.model.buffers or step in seen:
            return self.model.at(step, stored=stored)
        return self.model.at(step, sink=seen.setdefault(step, {}))

    def _as_network(self, classifier: Params) -> Params:
        """Name a linear classifier as the network names its head, if that has weight and bias."""
        names = self.model.head
        if not isinstance(self.head, LinearHead) or len(names) != 2:
            return {}
        return dict(zip(names, (classifier["weight"], classifier["bias"]), strict=True))


def _own(params: Params) -> Params:
    """Return what the head reads: what it learns, and what it keeps."""
    return {**scoped(params, HEAD), **scoped(params, STATE)}


def _note(sink: Params, statistics: dict[int, Params] | None) -> None:
    """Keep what a head saw with the queries beside what the network did; the first time counts."""
    if sink and statistics is not None:
        statistics[QUERY] = {**within(HEAD, sink), **statistics.get(QUERY, {})}


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
