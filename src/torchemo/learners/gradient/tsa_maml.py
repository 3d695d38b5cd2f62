"""TSA-MAML: Task Similarity Aware Meta-Learning (Zhou, Zou, Yuan, Feng, Xiong, Hoi, UAI 2021)."""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.kmeans import centres
from torchemo.core.tree import detach, expand, flatten, select
from torchemo.core.types import Batch, Params, Start
from torchemo.learners.gradient.base import GradientLearner
from torchemo.learners.gradient.loop import LoopOptions
from torchemo.learners.learner import STATE, Advance, Traits, network_names

SOLUTIONS, COLLECTED = STATE + "solutions", STATE + "collected"
CENTRES, COUNT, PENDING = STATE + "centres", STATE + "count", STATE + "pending/"


@final
@dataclass(frozen=True)
class TSAMAMLOptions(LoopOptions):
    """Options of TSA-MAML."""

    groups: int = 5
    """M, groups of tasks."""
    first_stage: int = 600
    """Outer steps of MAML before solutions are collected and clustered."""
    cluster_tasks: int = 256
    """How many solutions are clustered (published: 10 000)."""
    cluster_on: Literal["body", "all"] = "body"
    """Which tensors of a solution are compared."""


@final
@dataclass(frozen=True)
class TSAMAML(GradientLearner):
    """Learn one initialisation per group of tasks with similar solutions, in two stages.

    Stage 1 is MAML. Then the solutions theta_S of ``cluster_tasks`` training tasks are collected while the
    network is frozen, and clustered by k-means; the mean solution of a group is its initialisation. In
    stage 2 a task belongs to the group whose centre is nearest to its solution under the stage-1 network,
    which stays as it is, and starts from that group's initialisation. A group takes an outer step once it
    has collected as many tasks as an outer step has. All of it is one run: what is collected is kept
    with the parameters.

    Choice: the published code clusters 10 000 solutions, whole; label orders are random, so we compare
    bodies (``cluster_on``), and fewer tasks serve as well. A group that has collected more than enough steps
    on all it has. The published outer rate falls to zero over stage 2; ``outer.schedule`` lets it fall over
    the whole run. A group without a solution of its own begins at the mean of all.
    """

    title: ClassVar[str] = "TSA-MAML"
    Options: ClassVar[type[LoopOptions]] = TSAMAMLOptions

    groups: int = 5
    first_stage: int = 600
    cluster_tasks: int = 256
    cluster_on: Literal["body", "all"] = "body"

    def __post_init__(self) -> None:
        if self.groups < 1 or self.first_stage < 0 or self.cluster_tasks < self.groups:
            raise ConfigError(
                "TSA-MAML: groups should be 1 or more, first_stage 0 or more, and cluster_tasks at least"
                f" groups; got {self.groups}, {self.first_stage}, {self.cluster_tasks}."
            )
        if self.cluster_on not in ("body", "all"):
            raise ConfigError(f"TSA-MAML: cluster_on is body or all, got '{self.cluster_on}'.")
        if self.loop.model.buffers:
            raise ConfigError(
                "TSA-MAML: running statistics would keep moving the network that assigns tasks to groups.",
                hint="Use model.bn = transductive.",
            )

    def staged_until(self, tasks: int) -> int:
        """Return the outer step, of ``tasks`` tasks each, at which the groups are formed."""
        return self.first_stage + self.cluster_tasks // tasks

    @property
    def traits(self) -> Traits:
        """The choice of a group reads labels, and its head has its own order of them."""
        return super().traits._replace(label_equivariant=False, reads_labels_at_start=True)

    def init(self, generator: torch.Generator) -> Params:
        """Draw the network; the groups begin as copies of it."""
        theta = self.loop.model.init(generator)
        copies = {_of(m, n): p.clone() for m in range(self.groups) for n, p in theta.items()}
        return {**theta, **copies, **({} if self.first_stage else self._collecting(theta))}

    def per_class(self, params: Params) -> list[str]:
        """Return the names of the head's tensors, in the groups' networks too."""
        own = super().per_class(params)
        return own + [_of(m, name) for m in range(self.groups) for name in own]

    def for_classes(self, n_way: int) -> "TSAMAML":
        """Return this learner for tasks of ``n_way`` classes, if groups are chosen by bodies."""
        if self.cluster_on == "all":
            raise ConfigError(
                "TSA-MAML: groups are chosen by whole solutions, heads included, so that tasks need as many"
                " classes as in training.",
                hint="Give as many classes, or train with learner.cluster_on = body.",
            )
        return super().for_classes(n_way)

    @property
    def takes_visits(self) -> bool:
        """Return False: a task begins at a start that is made of its whole support set."""
        return False

    def start(self, params: Params, support: Batch, *, base: Params) -> Start:
        """Begin at ``theta``; in stage 2 at the initialisation of the task's group."""
        tasks = support.x.shape[0]
        about = {"group": torch.full((tasks,), -1, device="cpu")}
        if CENTRES not in params:
            if SOLUTIONS in params:
                about["solution"] = self.solutions(params, support)
            return Start(base, about=about)
        nearest = self.assign(params, self.solutions(params, support))
        theta = {}
        for name in base:
            starts = torch.stack([params[_of(m, name)] for m in range(self.groups)])
            theta[name] = starts[nearest]
        return Start(theta, about={"group": nearest})

    def solutions(self, params: Params, support: Batch) -> Float[Tensor, "task number"]:
        """Adapt from the stage-1 network, without memory, and lay all adapted tensors end to end."""
        theta = detach(select(params, network_names(params)))
        # Networks of images have a faster path for one task at a time.
        few = 1 if support.x.dim() == 5 else len(support.x)
        found = []
        for x, y in zip(torch.split(support.x, few), torch.split(support.y, few), strict=True):
            fitted = self.loop.run(Start(expand(theta, len(x))), Batch(x, y), order=0)
            found.append(flatten(select(fitted.path[-1], self.loop.names(theta))))
        return torch.cat(found)

    def assign(
        self, params: Params, solutions: Float[Tensor, "task number"]
    ) -> Int[Tensor, " task"]:
        """Return the group whose centre is nearest."""
        compared = solutions[:, self._compared(params)]
        # One centre at a time: all differences at once are as large as all solutions, times the groups.
        distances = [(compared - centre).square().sum(-1) for centre in params[CENTRES]]
        return torch.stack(distances, dim=1).argmin(1)

    def advance(
        self, params: Params, gradients: Params, *, about: Params, iteration: int
    ) -> Advance:
        """Learn the network in stage 1, collect solutions, learn the groups in stage 2."""
        if CENTRES in params:
            return self._step_groups(params, gradients, about["group"])
        if SOLUTIONS in params:
            return self._collect(params, about["solution"])
        own = select(gradients, network_names(gradients))
        last = iteration + 1 >= self.first_stage
        return Advance(own, {}, self._collecting(params) if last else {})

    def _collecting(self, params: Params) -> Params:
        numbers = sum(params[n].numel() for n in self.loop.names(_network(params)))
        like = params[self.loop.names(_network(params))[0]]
        empty = like.detach().new_zeros(self.cluster_tasks, numbers)
        return {SOLUTIONS: empty, COLLECTED: torch.tensor(0, device="cpu")}

    def _collect(self, params: Params, solutions: Tensor) -> Advance:
        filled, rows = int(params[COLLECTED]), params[SOLUTIONS]
        taken = solutions[: self.cluster_tasks - filled]
        rows[filled : filled + len(taken)] = taken
        filled += len(taken)
        if filled < self.cluster_tasks:
            return Advance({}, {}, {SOLUTIONS: rows, COLLECTED: torch.tensor(filled, device="cpu")})
        found = centres(rows[:, self._compared(params)], self.groups, seed=0, name="solutions")
        state = {
            CENTRES: found.to(rows.dtype),
            COUNT: torch.zeros(self.groups, dtype=torch.int64, device="cpu"),
        }
        return Advance({}, self._group_starts({**params, **state}, rows), state)

    def _group_starts(self, params: Params, rows: Tensor) -> Params:
        """Return the mean solution of every group, tensor by tensor."""
        theta = detach(_network(params))
        member = self.assign(params, rows)
        starts: Params = {}
        for m in range(self.groups):
            own = rows[member == m] if bool((member == m).any()) else rows
            parts = torch.split(own.mean(0), [theta[n].numel() for n in self.loop.names(theta)])
            moved = zip(self.loop.names(theta), parts, strict=True)
            whole = {**theta, **{n: part.view(theta[n].shape) for n, part in moved}}
            starts.update({_of(m, n): t for n, t in whole.items() if _of(m, n) in params})
        return starts

    def _step_groups(self, params: Params, gradients: Params, group: Tensor) -> Advance:
        """Add up the groups' gradients; those with enough tasks step along the mean of theirs."""
        tasks = len(group)
        count = params[COUNT] + group.bincount(minlength=self.groups)
        stepping: Params = {}
        state = {CENTRES: params[CENTRES], COUNT: count}
        for m in count.nonzero().flatten().tolist():
            names = [n for n in gradients if n.startswith(_of(m, ""))]
            total = {n: gradients[n] * tasks + params.get(PENDING + n, 0) for n in names}
            if int(count[m]) >= tasks:
                stepping.update({n: t / int(count[m]) for n, t in total.items()})
                count[m] = 0
            else:
                state.update({PENDING + n: t for n, t in total.items()})
        return Advance(stepping, {}, state)

    def _compared(self, params: Params) -> Tensor:
        """Return which numbers of a solution are compared."""
        theta, head = _network(params), set(self.loop.model.head)
        skipped = head if self.cluster_on == "body" else set()
        parts = [
            torch.full((theta[n].numel(),), n not in skipped, device="cpu")
            for n in self.loop.names(theta)
        ]
        chosen = torch.cat(parts)
        return chosen if bool(chosen.any()) else ~chosen


def _network(params: Params) -> Params:
    return select(params, network_names(params))


def _of(group: int, name: str) -> str:
    return f"group/{group}/{name}"
