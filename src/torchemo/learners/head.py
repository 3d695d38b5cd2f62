"""What a metric paper is: a head, which fits a classifier to support features in closed form."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy
from torchemo.core.types import BaseClasses, Model, Params, TaskShape
from torchemo.learners.learner import Traits

if TYPE_CHECKING:
    from torchemo.learners.metric.episodic import EpisodicLearner

Features: TypeAlias = Float[Tensor, "task n f"]
Labels: TypeAlias = Int[Tensor, "task n"]
Logits: TypeAlias = Float[Tensor, "task n way"]
TaskLosses: TypeAlias = Float[Tensor, " task"]
BnOver: TypeAlias = Literal["task", "batch"]


@dataclass(frozen=True)
class HeadOptions:
    """What every head can be told."""

    bn_over: BnOver = field(default="task", kw_only=True)
    """Whose images share their normalisation statistics while training: those of a task, support and queries
    each for themselves, or all of the meta-batch, which then goes through the network at once."""


class Head(HeadOptions, ABC):
    """A classifier on features that is fitted to a support set in closed form.

    Every tensor has a leading task axis, except those of `init`. Subclasses are frozen dataclasses that
    inherit their fields from their ``Options``.
    """

    title: ClassVar[str] = ""
    Options: ClassVar[type] = HeadOptions
    traits: ClassVar[Traits] = Traits(
        second_order=False, reads_labels_at_start=True, inner_loop=False
    )
    ordered: ClassVar[bool] = False
    """Whether the order of the support examples matters."""
    learns_to_compare: ClassVar[bool] = False
    """Whether answers are at chance until the head itself is trained."""

    @classmethod
    def build(cls, options: Any, model: Model, tasks: TaskShape) -> "EpisodicLearner":
        """Make the learner with this head; regression has no classes and is refused."""
        from torchemo.learners.metric.episodic import EpisodicLearner  # it takes heads

        if tasks.kind != "classification":
            raise ConfigError(
                f"{cls.title} needs classes; these tasks are regression.",
                hint="Use a learner with an inner loop, such as learner.name = maml.",
            )
        network = cls.network(options, model)
        return EpisodicLearner(network, cls.sized(options, network, tasks), n_way=tasks.n_out)

    @classmethod
    def network(cls, options: Any, model: Model) -> Model:
        """Return the network as the head needs it; by default as it is."""
        return model

    @classmethod
    def sized(cls, options: Any, model: Model, tasks: TaskShape) -> "Head":
        """Make the head; one whose tensors depend on the network or the tasks takes their sizes."""
        return cls(**vars(options))

    @property
    def most_classes(self) -> int | None:
        """The most classes that a task may have; None if there is no limit."""
        return None

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names, among those of `init`, of running statistics that the head keeps; by default none."""
        return ()

    def noting(self, sink: Params, *, over: BnOver = "task") -> "Head":
        """Return the head as it is in training: it normalises by the statistics at hand.

        Answers never use these: a query would see the others.

        Args:
            sink: Where to put them.
            over: Whether they are of each task, or of all tasks, whose parameters are then the same.
        """
        return self

    def init(self, generator: torch.Generator) -> Params:
        """Draw what the head learns in the outer loop; by default nothing."""
        return {}

    def init_state(self, generator: torch.Generator) -> Params:
        """Return what the head keeps from step to step without learning it; by default nothing.

        `fit` and `logits` find it among ``params``, with a task axis.
        """
        return {}

    def written(self, state: Params, classifier: Params, base: BaseClasses) -> Params:
        """Return new contents of ``state`` after a step of training tasks; by default the same."""
        return state

    @abstractmethod
    def fit(self, params: Params, z: Features, y: Labels, *, n_way: int) -> Params:
        """Fit the classifier to support features ``z``; every class has an example.

        Args:
            params: What `init` has drawn, with a task axis.
            z: Support features.
            y: Their labels, in any order and number.
            n_way: Classes.
        """

    @abstractmethod
    def logits(self, params: Params, classifier: Params, z: Features) -> Logits:
        """Score query features ``z`` with what `fit` returned."""

    def losses(self, params: Params, classifier: Params, z: Features, y: Labels) -> TaskLosses:
        """Return the query loss of each task; by default the mean cross-entropy."""
        return cross_entropy(self.logits(params, classifier, z), y)

    @property
    def frozen_trunk(self) -> bool:
        """Whether episodes leave the network as it is, with its stored normalisation statistics."""
        return False

    @property
    def conditions(self) -> bool:
        """Whether the support set is embedded a second time, by the network that `conditioned` gives."""
        return False

    def conditioned(
        self, params: Params, theta: Params, z: Features, y: Labels, *, n_way: int
    ) -> Params:
        """Return the tensors of the network that depend on the task.

        Args:
            params: What `init` has drawn, with a task axis.
            theta: The network's tensors.
            z: Support features of a first pass.
            y: Their labels.
            n_way: Classes.
        """
        return {}

    def after_dense(self, classifier: Params) -> Params:
        """Return what the head takes over from the dense classifier of all base classes."""
        return {}

    @property
    def base_examples(self) -> int:
        """How many further examples of base classes `class_losses` wants for each training task."""
        return 0

    def class_losses(
        self, params: Params, classifier: Params, z: Features, y: Labels, *, base: BaseClasses
    ) -> TaskLosses:
        """Return the query losses of training tasks, whose base classes are known; by default `losses`.

        Args:
            params: What `init` has drawn, with a task axis.
            classifier: What `fit` returned; `fit` never knows base classes.
            z: Query features.
            y: Labels of the queries.
            base: Base class behind each label, and the features of further examples, if there are any.
        """
        return self.losses(params, classifier, z, y)


class LinearHead(Head):
    """A head whose logits are ``z W^T + b``; its classifier is ``weight [B, N, f]`` and ``bias [B, N]``."""

    def logits(self, params: Params, classifier: Params, z: Features) -> Logits:
        """Apply the linear classifier."""
        weight, bias = classifier["weight"], classifier["bias"]
        return torch.baddbmm(bias.unsqueeze(1), z, weight.transpose(1, 2))


def one_hot(y: Labels, n_way: int, *, like: Tensor) -> Logits:
    """Turn labels into indicator rows of the type of ``like``."""
    return F.one_hot(y.long(), n_way).to(like.dtype)


def check_above_zero(**options: float) -> None:
    """Raise `ConfigError` naming the first option that is not a finite number above 0."""
    for name, value in options.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"learner.{name} should be finite and above 0, got {value}.")
