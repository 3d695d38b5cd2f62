"""BMG: Bootstrapped Meta-Learning (Flennerhag et al., ICLR 2022), over learners that adapt a network."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.core.tree import detach, flatten, leaves, select, tree_map
from torchemo.core.types import Batch, Model, Params, Start, TaskShape
from torchemo.learners import LEARNERS
from torchemo.learners.build import learner_title
from torchemo.learners.gradient.base import GradientLearner
from torchemo.learners.gradient.inner import task_gradients
from torchemo.learners.gradient.musml import MUSML
from torchemo.learners.hosting import remembered_by
from torchemo.learners.learner import Fitted, Scheduled, Staged, Traits, scoped, start_of, within
from torchemo.memory.bound import BoundMemory

TARGET = "target/"
"""Prefix of where the further support steps lead, in the state of a fitted task."""


@final
@dataclass(frozen=True)
class BMGOptions:
    """Options of BMG; no few-shot code is public, and these are our choices."""

    PARTS: ClassVar[dict[str, Any]] = {"base": LEARNERS}

    base: Part = field(default_factory=lambda: Part("maml"))
    """The learner underneath, with options of its own."""
    target_steps: int = 5
    """L, steps from the adapted parameters to the target."""
    target_rate: float | None = None
    """zeta, rate of the target's query step; None takes the inner rate."""
    match: Literal["kl", "l2"] = "kl"
    """Distance to the target: of predictions, or of parameters."""


@final
@dataclass(frozen=True)
class BMG:
    """Learn to be, after K inner steps, where more steps would lead.

    The target continues from theta_K without a graph: L - 1 further inner steps on the support set, then one
    on the query loss, ``theta~ = theta_{K+L-1} - zeta grad L_Q(theta_{K+L-1})``. The outer loss is how far
    theta_K is from it: ``kl``, the mean over queries of ``KL(p_theta~ || p_theta_K)``, or ``l2``,
    ``1/2 ||theta~ - theta_K||^2``. With ``l2`` and L = 1 its gradient is zeta times MAML's.

    With EMO the target's support steps follow the recalled directions too.

    Choice: no few-shot code is public; L = 5, zeta = alpha and the preset's K, rates and tasks are our own
    choices. The last step of the target moves all learned tensors, and ``l2`` compares all of them, so that
    the identity above holds for learners that adapt a part. For regression ``kl`` is that of unit Gaussians,
    half the squared difference. The state of a rule with momentum starts afresh in the target.

    Args:
        base: The learner whose starts and inner steps these are; its own outer loss is not used.
        target_steps: L, steps from theta_K to the target, the query step included.
        target_rate: zeta; None takes the rule's rate.
        match: ``kl`` or ``l2``.
    """

    Options: ClassVar[type[BMGOptions]] = BMGOptions

    base: GradientLearner
    target_steps: int = 5
    target_rate: float | None = None
    match: Literal["kl", "l2"] = "kl"

    @classmethod
    def build(cls, options: BMGOptions, model: Model, tasks: TaskShape) -> "BMG":
        """Make the learner, and the one underneath, from their options."""
        under, own = LEARNERS.resolve(options.base, where="learner.base")
        base = under.build(own, model, tasks)
        return cls(base, options.target_steps, options.target_rate, options.match)

    def __post_init__(self) -> None:
        if self.target_steps < 1:
            raise ConfigError(f"BMG: target_steps should be 1 or more, got {self.target_steps}.")
        if self.match not in ("kl", "l2"):
            raise ConfigError(f"BMG: match should be kl or l2, got '{self.match}'.")
        if isinstance(self.base, BMG | MUSML | Staged):
            raise ConfigError(
                f"BMG does not go over {type(self.base).__name__}: its target continues from the network of a"
                " task, in one stage.",
                hint="Choose another learner underneath, such as maml or arml.",
            )

    @classmethod
    def title_of(cls, options: BMGOptions) -> str:
        """Name the learner that these options make."""
        return _title(learner_title(options.base))

    @property
    def title(self) -> str:
        """Its name, with that of the learner underneath unless it is MAML."""
        return _title(self.base.title)

    @property
    def model(self) -> Model:
        """The network of the learner underneath."""
        return self.base.model

    @property
    def steps(self) -> int:
        """Inner steps of the learner underneath."""
        return self.base.steps

    @property
    def key_dim(self) -> int | None:
        """Size of the learner's description of a task, if it has one that may serve a memory as its key."""
        found: int | None = getattr(self.base, "key_dim", None)
        return found

    @property
    def traits(self) -> Traits:
        """Those of the learner underneath, but it does not descend the query loss."""
        return self.base.traits._replace(exact_meta_gradient=False)

    def init(self, generator: torch.Generator) -> Params:
        """Draw the meta-parameters of the learner underneath."""
        return self.base.init(generator)

    def for_classes(self, n_way: int) -> "BMG":
        """Return this learner for tasks of ``n_way`` classes."""
        return replace(self, base=self.base.for_classes(n_way))

    @property
    def keeps_rows(self) -> bool:
        """As the learner underneath."""
        return self.base.keeps_rows

    def params_for(self, params: Params, n_way: int) -> Params:
        """Return the parameters of the learner underneath for tasks of ``n_way`` classes."""
        return self.base.params_for(params, n_way)

    def balanced(self) -> "BMG":
        """Return this learner with a loss in which classes weigh alike."""
        return replace(self, base=self.base.balanced())

    def start(self, params: Params, support: Batch, *, base: Params) -> Start:
        """Begin where the learner underneath begins."""
        return start_of(self.base, params, support, base=base)

    def fit(
        self,
        start: Start,
        support: Batch,
        *,
        memory: BoundMemory | None = None,
        steps: int | None = None,
        graph: bool = True,
    ) -> Fitted:
        """Adapt as the learner underneath does; while training, continue towards the target."""
        fitted = self.base.fit(start, support, memory=memory, steps=steps, graph=graph)
        if not graph:
            return fitted
        taken = len(fitted.path) - 1
        rates = start.rates
        if rates is not None:
            rates = {n: r[:, min(taken, r.shape[1] - 1) :].detach() for n, r in rates.items()}
        ahead = self.base.loop.run(
            Start(detach(fitted.path[-1]), rates),
            support,
            memory=None if memory is None else memory._replace(first=taken),
            steps=self.target_steps - 1,
            order=1,
        )
        target = within(TARGET, detach(ahead.path[-1]))
        return fitted._replace(state={**fitted.state, **target})

    def adapted(self, theta: Params) -> list[str]:
        """Return the names of the tensors that inner steps move."""
        return self.base.adapted(theta)

    def predict(self, fitted: Fitted, x: Tensor, *, step: int | None = None) -> Tensor:
        """Answer as the learner underneath does."""
        return self.base.predict(fitted, x, step=step)

    def predict_path(self, fitted: Fitted, x: Tensor, *, steps: Sequence[int]) -> list[Tensor]:
        """Answer after each of the given numbers of inner steps."""
        return self.base.predict_path(fitted, x, steps=steps)

    def query_gradient(self, fitted: Fitted, query: Batch) -> Params:
        """Differentiate the query loss at theta_S in theta_S itself."""
        return self.base.query_gradient(fitted, query)

    def remembered(self, content: str) -> dict[str, torch.Size]:
        """Return what a memory holds for a task of the learner underneath."""
        return remembered_by(self.base, content)

    def loss(self, fitted: Fitted, query: Batch) -> Float[Tensor, " task"]:
        """Return the distance to the target, which itself is constant."""
        target = self._target(fitted, query)
        if self.match == "l2":
            apart = tree_map(torch.sub, select(fitted.path[-1], target), target)
            return 0.5 * flatten(apart).square().sum(1)
        with torch.no_grad():
            wanted = self.predict(_ending_at(fitted, target), query.x)
        return _divergence(wanted, self.predict(fitted, query.x), query)

    def scheduled(self, iteration: int) -> "BMG":
        """Move the learner underneath to an outer iteration."""
        if not isinstance(self.base, Scheduled):
            return self
        return replace(self, base=cast(GradientLearner, self.base.scheduled(iteration)))

    def _target(self, fitted: Fitted, query: Batch) -> Params:
        """Take the query step from the end of the support steps."""
        loop = self.base.loop
        rate = loop.rule.lr if self.target_rate is None else self.target_rate
        ahead = scoped(fitted.state, TARGET)
        end = leaves({n: t for n, t in ahead.items() if n not in self.model.buffers})
        with torch.enable_grad():
            gradients = task_gradients(loop.losses(_ending_at(fitted, end), query), end)
        return tree_map(lambda t, g: t.detach() - rate * g, end, gradients)


def _title(base: str) -> str:
    return "BMG" if base == "MAML" else f"BMG over {base}"


def _ending_at(fitted: Fitted, theta: Params) -> Fitted:
    """Return a fit as if it had ended at ``theta``; its statistics are noted nowhere."""
    path = (*fitted.path[:-1], {**detach(fitted.path[-1]), **theta})
    # The trunk of a head-only learner is read from the beginning of the path.
    path = ({**path[0], **theta}, *path[1:]) if len(path) > 1 else path
    return fitted._replace(path=path, statistics=dict(fitted.statistics or {}))


def _divergence(
    wanted: Float[Tensor, "task n out"], found: Float[Tensor, "task n out"], query: Batch
) -> Float[Tensor, " task"]:
    """Return KL(wanted || found) of each task, the mean over its queries."""
    if query.y.is_floating_point():
        return 0.5 * (wanted - found).square().sum(-1).mean(1)
    logs = F.kl_div(
        found.log_softmax(-1), wanted.log_softmax(-1), reduction="none", log_target=True
    )
    return logs.sum(-1).mean(1)
