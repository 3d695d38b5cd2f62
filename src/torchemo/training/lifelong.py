"""Tasks that come back: recognise, recall, answer, remember.

Example:
    >>> from torchemo.core.losses import task_loss
    >>> from torchemo.core.rng import generator_for
    >>> from torchemo.learners.gradient.loop import InnerLoop
    >>> from torchemo.learners.gradient.maml import MAML
    >>> from torchemo.memory.lifelong.recognise import ByName
    >>> from torchemo.models import MLP
    >>> learner = MAML(InnerLoop(MLP(), loss=task_loss, steps=3))
    >>> params, memory = learner.init(generator_for(0)), LifelongMemory(ByName())
    >>> x = torch.rand(1, 10, 1)  # ten points of one curve
    >>> for _ in range(3):
    ...     visit = revisit(learner, params, Batch(x, x.sin()), memory, names=[("sine",)])
    ...     _ = visit.remember()
    >>> visit.recognised[0].visits
    (2,)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from torchemo.core.errors import ConfigError
from torchemo.core.tree import expand, select
from torchemo.core.types import Batch, Episode, Params
from torchemo.learners.hosting import remembered_by
from torchemo.learners.learner import Curved, Fitted, Learner, network_names
from torchemo.memory.interface import TaskMemory, check_choice
from torchemo.memory.lifelong.memory import LifelongMemory, Recognised
from torchemo.memory.lifelong.mixture import Mixture
from torchemo.memory.lifelong.shares import Sharing
from torchemo.memory.lifelong.visits import PastVisit, Sight, class_means
from torchemo.memory.values import pick
from torchemo.models.alone import alone
from torchemo.training.predict import begun

Answer: TypeAlias = Literal["adapted", "means", "both"]
"""What answers queries: the adapted network, the nearest class mean over all visits, or both."""

SHARPNESS = 10.0
"""Factor of the cosine between a query and a class mean, chosen on validation classes."""


@final
@dataclass(frozen=True)
class Revisit:
    """Tasks that were fitted with the help of their past visits.

    Attributes:
        learner: The learner.
        params: Its meta-parameters.
        support: Support sets of B tasks.
        memory: The memory that was asked.
        sights: What was seen of each task.
        recognised: What the memory made of each.
        fitted: What the learner made of them.
        rates: Their own inner rates, if they have any.
    """

    learner: Learner
    params: Params
    support: Batch
    memory: LifelongMemory
    sights: tuple[Sight, ...]
    recognised: tuple[Recognised, ...]
    fitted: Fitted
    rates: Params | None = None

    def outputs(
        self, x: Float[Tensor, "task n ..."], *, answer: Answer | Mixture = "adapted"
    ) -> Float[Tensor, "task n out"]:
        """Answer queries, each by itself.

        Args:
            x: The queries.
            answer: What answers; ``both`` adds the log-probabilities of all answers, a mixture weighs them.
        """
        if not isinstance(answer, Mixture):
            check_choice("answer", answer, get_args(Answer))
        with torch.no_grad():
            adapted = [] if answer == "means" else [self.learner.predict(self.fitted, x)]
            cosines, examples = ([], None) if answer == "adapted" else self._by_means(x)
        if answer == "means" and not cosines:
            raise ConfigError("a task without classes has no class means to answer with.")
        if isinstance(answer, Mixture) and examples is not None:
            return answer([*(a.log_softmax(2) for a in adapted), *cosines], examples)
        found = [*adapted, *(SHARPNESS * c for c in cosines)]
        return (
            found[0] if len(found) == 1 else torch.stack([f.log_softmax(2) for f in found]).sum(0)
        )

    def _by_means(self, x: Tensor) -> tuple[list[Tensor], Float[Tensor, " task"] | None]:
        """Return cosines to class means in every space, and examples per class; nothing without classes."""
        if not self.sights[0].means:
            return [], None
        pairs = list(zip(self.sights, self.recognised, strict=True))
        means = [self.memory.means_with(sight, known) for sight, known in pairs]
        cosines = []
        for space, queries in _spaces(self.learner, self.params, self.support, x).items():
            centres = torch.stack([one[space] for one in means])
            cosines.append(normalize(queries, dim=2) @ normalize(centres, dim=2).mT)
        examples = [self.memory.examples_with(sight, known) for sight, known in pairs]
        return cosines, torch.tensor(examples, device=x.device)

    def remember(self, *, when: str = "") -> list[PastVisit]:
        """Keep the visits: gradients and class means, no examples."""
        values = self._values()
        return [
            self.memory.remember(
                sight, known, {n: v[b].clone() for n, v in values.items()}, when=when
            )
            for b, (sight, known) in enumerate(zip(self.sights, self.recognised, strict=True))
        ]

    def _values(self) -> Params:
        """Return what is kept of each task, ``{name: [B, ..., *shape]}``."""
        content, fitted = self.memory.content, self.fitted
        if content == "gauss_newton" and isinstance(self.learner, Curved):
            return self.learner.followed(fitted, self.support, rates=self.rates)
        return pick(content, fitted.gradients, fitted.path, fitted.extra_values or {})


def revisit(
    learner: Learner,
    params: Params,
    support: Batch,
    memory: LifelongMemory,
    *,
    names: Sequence[tuple[str, ...]] | None = None,
    own_memory: TaskMemory | None = None,
    steps: int | None = None,
) -> Revisit:
    """Fit B tasks to their support sets and to what is kept of their past visits; changes nothing.

    Args:
        learner: A learner with an inner loop.
        params: Its meta-parameters.
        support: Support sets of B tasks.
        memory: The past visits.
        names: Names of the classes of each task in label order; for a task without classes its own name.
            None lets the memory recognise classes by their examples.
        own_memory: Memory of meta-training, in eval mode, if it offsets the start of tasks.
        steps: Inner steps, by default those of training.
    """
    _check_learner(learner, params, memory)
    with torch.no_grad():
        begin, held = begun(learner, params, Episode(support, support), memory=own_memory)
        if held is not None and held.bind() is not None:
            raise ConfigError(
                "this run joins gradients of its own memory to inner steps, and so do past visits.",
                hint="Use a run without such a memory.",
            )
        sights = _sights(learner, params, support, names, memory)
        recognised = tuple(memory.recognise(sight) for sight in sights)
        shapes = remembered_by(learner, memory.content)
        bound = memory.bind(memory.recall(sights, recognised, shapes=shapes))
        fitted = learner.fit(begin, support, memory=bound, steps=steps, graph=False)
    fitted = fitted._replace(alone={})
    return Revisit(learner, params, support, memory, sights, recognised, fitted, begin.rates)


def _check_learner(learner: Learner, params: Params, memory: LifelongMemory) -> None:
    if not takes_visits(learner, params):
        raise ConfigError(
            f"{learner.title} has no network of its own with gradient steps that past visits could join.",
            hint="Use a learner such as maml, anil or meta-sgd.",
        )
    if memory.content == "gauss_newton" and not isinstance(learner, Curved):
        raise ConfigError(
            f"content 'gauss_newton' needs the curvature of the support loss, which {learner.title} does not"
            " give.",
            hint="Set content to per_step or secant.",
        )


def takes_visits(learner: Learner, params: Params) -> bool:
    """Return whether past visits can join a learner: inner steps on a network that tasks share."""
    return learner.traits.inner_loop and bool(network_names(params))


def _sights(
    learner: Learner,
    params: Params,
    support: Batch,
    names: Sequence[tuple[str, ...]] | None,
    memory: LifelongMemory,
) -> tuple[Sight, ...]:
    tasks = len(support.x)
    given: list[tuple[str, ...] | None] = [None] * tasks if names is None else list(names)
    if support.y.is_floating_point():
        return tuple(Sight((support.x.shape[1],), {}, one) for one in given)
    spaces = _spaces(learner, params, support, None)
    if isinstance(memory.recogniser, Sharing):
        spaces |= memory.recogniser.seen(spaces)
    found = []
    for b, own in enumerate(given):
        y = support.y[b]
        way = int(y.max()) + 1 if own is None else len(own)
        by_space = {space: class_means(x[b], y, way=way) for space, x in spaces.items()}
        shots = by_space["features"][0]
        found.append(Sight(shots, {space: means for space, (_, means) in by_space.items()}, own))
    return tuple(found)


def _spaces(learner: Learner, params: Params, support: Batch, x: Tensor | None) -> Params:
    """Return support examples, or queries ``x``, in the spaces in which class means are kept."""
    theta = expand(select(params, network_names(params)), len(support.x))
    if x is None:
        features = learner.model.at(0, stored=True).features(theta, support.x)
    else:
        network, own = alone(learner.model, theta, support.x, step=0)
        features = network.features(own, x)
    seen = support.x if x is None else x
    # Inputs that are vectors are features of a pretrained network; pixels are not worth comparing.
    return {"features": features} | ({"inputs": seen} if seen.dim() == 3 else {})
