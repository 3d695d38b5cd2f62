"""BMG: Bootstrapped Meta-Learning (Flennerhag et al., ICLR 2022), over learners that adapt a network."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.tree import detach, flatten, leaves, select, tree_map
from torchemo.core.types import Batch, Params, Start
from torchemo.learners.gradient.inner import Adapted, task_gradients
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.musml import MUSML
from torchemo.learners.learner import Learner, Scheduled, Staged, Traits, gradient_rows
from torchemo.memory.emo import Bound


@final
@dataclass(frozen=True)
class BMG:
    """Learn to be, after K inner steps, where more steps would lead.

    The target goes on from theta_K without a graph: L - 1 further inner steps on the support set, then one
    on the query loss, ``theta~ = theta_{K+L-1} - zeta grad L_Q(theta_{K+L-1})``. The outer loss is how far
    theta_K is from it: ``kl``, the mean over queries of ``KL(p_theta~ || p_theta_K)``, or ``l2``,
    ``1/2 ||theta~ - theta_K||^2``. With ``l2`` and L = 1 its gradient is zeta times MAML's.

    With EMO the target's support steps follow the recalled directions too.

    Reading: no few-shot code is public; L = 5, zeta = alpha and the preset's K, rates and tasks are our own
    choices. The last step of the target moves all learned tensors, and ``l2`` compares all of them, so that
    the identity above holds for learners that adapt a part. For regression ``kl`` is that of unit Gaussians,
    half the squared difference. The state of a rule with momentum starts afresh in the target.

    Args:
        base: The learner whose starts and inner steps these are; its own outer loss is not used.
        target_steps: L, steps from theta_K to the target, the query step included.
        target_rate: zeta; None takes the rule's rate.
        match: ``kl`` or ``l2``.
    """

    base: Learner
    target_steps: int = 5
    target_rate: float | None = None
    match: Literal["kl", "l2"] = "kl"

    def __post_init__(self) -> None:
        if self.target_steps < 1:
            raise ConfigError(f"BMG: target_steps should be 1 or more, got {self.target_steps}.")
        if self.match not in ("kl", "l2"):
            raise ConfigError(f"BMG: match should be kl or l2, got '{self.match}'.")
        if isinstance(self.base, BMG | MUSML | Staged):
            raise ConfigError(
                f"BMG does not go over {type(self.base).__name__}: its target goes on from the network of a"
                " task, in one stage.",
                hint="Choose another learner underneath, such as maml or arml.",
            )

    @property
    def loop(self) -> InnerLoop:
        """The inner loop of the learner underneath."""
        return self.base.loop

    @property
    def traits(self) -> Traits:
        """Those of the learner underneath, but its rows are not the gradient of the query loss."""
        return self.base.traits._replace(exact_meta_gradient=False)

    def init(self, generator: torch.Generator) -> Params:
        """Draw the meta-parameters of the learner underneath."""
        return self.base.init(generator)

    def start(self, params: Params, support: Batch, *, base: Params) -> Start:
        """Begin where the learner underneath begins."""
        return self.base.start(params, support, base=base)

    def adapt(
        self,
        start: Start,
        support: Batch,
        *,
        bound: Bound | None = None,
        steps: int | None = None,
        order: int | None = None,
    ) -> Adapted:
        """Adapt as the learner underneath does; while training, go on towards the target."""
        adapted = self.base.adapt(start, support, bound=bound, steps=steps, order=order)
        if order == 0:
            return adapted
        taken = len(adapted.path) - 1
        rates = start.rates
        if rates is not None:
            rates = {n: r[:, min(taken, r.shape[1] - 1) :].detach() for n, r in rates.items()}
        ahead = self.loop.run(
            Start(detach(adapted.theta), rates),
            support,
            bound=None if bound is None else bound._replace(first=taken),
            steps=self.target_steps - 1,
            order=1,
        )
        return adapted._replace(kept=detach(ahead.theta))

    def outer(
        self, start: Start, adapted: Adapted, query: Batch, *, leaves: Sequence[Tensor]
    ) -> tuple[Float[Tensor, " task"], list[Tensor]]:
        """Differentiate the distance to the target, which itself is constant."""
        target = self._target(adapted, query)
        if self.match == "l2":
            apart = tree_map(torch.sub, select(adapted.theta, target), target)
            losses = 0.5 * flatten(apart).square().sum(1)
        else:
            with torch.no_grad():
                wanted = self._outputs(_ending_at(adapted, target), query)
            losses = _divergence(wanted, self._outputs(adapted, query), query)
        return losses.detach(), gradient_rows(losses, leaves)

    def scheduled(self, iteration: int) -> "BMG":
        """Move the learner underneath to an outer iteration."""
        if not isinstance(self.base, Scheduled):
            return self
        return replace(self, base=self.base.scheduled(iteration))

    def _target(self, adapted: Adapted, query: Batch) -> Params:
        """Take the query step from the end of the support steps."""
        rate = self.loop.rule.lr if self.target_rate is None else self.target_rate
        fixed = self.loop.model.buffers
        end = leaves({n: t for n, t in (adapted.kept or {}).items() if n not in fixed})
        with torch.enable_grad():
            losses = self.loop.losses(_ending_at(adapted, end), query)
            gradients = task_gradients(losses, end)
        return tree_map(lambda t, g: t.detach() - rate * g, end, gradients)

    def _outputs(self, adapted: Adapted, query: Batch) -> Tensor:
        last = len(adapted.path) - 1
        return self.loop.outputs(adapted, query.x, steps=[last])[0]


def _ending_at(adapted: Adapted, theta: Params) -> Adapted:
    """Return the adaptation as if it had ended at ``theta``; its statistics are noted nowhere."""
    path = (*adapted.path[:-1], {**detach(adapted.theta), **theta})
    # The trunk of a head-only learner is read from the beginning of the path.
    path = ({**path[0], **theta}, *path[1:]) if len(path) > 1 else path
    return adapted._replace(path=path, statistics=dict(adapted.statistics or {}))


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
