"""A trained learner that meets the visits of many users."""

from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import one_hot

from torchemo.core.tree import expand, select
from torchemo.core.types import Batch, Episode, Params, Start
from torchemo.lab.study.streams.bank import NONE, Bank
from torchemo.lab.study.streams.finders import Look
from torchemo.lab.study.streams.users import Moment
from torchemo.learners.learner import HeadAlone, Learner, network_names
from torchemo.memory.lifelong.ratio import SameClass
from torchemo.models.alone import alone
from torchemo.training.predict import begun


class Seen(NamedTuple):
    """The visits of B users as a learner sees them; all memories share it.

    Attributes:
        moment: The visits.
        start: Where the inner loops begin.
        support: Support sets, features where the learner adapts nothing but its head.
        query: Query inputs of the same kind.
        look: What is seen before recognition.
        queries: Queries in the spaces of class means.
    """

    moment: Moment
    start: Start
    support: Batch
    query: Tensor
    look: Look
    queries: Params


@final
@dataclass(frozen=True)
class Player:
    """A trained learner that meets visits.

    Attributes:
        learner: The learner.
        params: Its meta-parameters.
        way: Classes of a task; 1 for functions.
        same: What tells classes apart, where ratios are asked for.
    """

    learner: Learner
    params: Params
    way: int
    same: SameClass | None = None
    headed: Learner | None = field(init=False)

    def __post_init__(self) -> None:
        headed = self.learner.on_features() if isinstance(self.learner, HeadAlone) else None
        object.__setattr__(self, "headed", headed)

    @property
    def inner(self) -> Learner:
        """The learner of `Seen.support`."""
        return self.headed or self.learner

    def see(self, moment: Moment) -> Seen:
        """Compute what all memories share."""
        episode = Episode(moment.support, moment.query)
        start, _ = begun(self.learner, self.params, episode, memory=None)
        support, query = moment.support, moment.query.x
        spaces, queries = {}, {}
        if not moment.query.y.is_floating_point():
            spaces["features"], queries["features"] = self._features(start, support.x, query)
            if self.headed is not None:
                support, query = Batch(spaces["features"], support.y), queries["features"]
            if moment.support.x.dim() == 3:
                spaces["inputs"], queries["inputs"] = moment.support.x, moment.query.x
        look = self._look(moment, support, spaces)
        return Seen(moment, start, support, query, look, queries)

    def _features(self, start: Start, support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of support sets and queries before the first inner step."""
        model, names = self.learner.model, network_names(self.params)
        if support.dim() == 3 and not model.norm:
            # Every example by itself, and all tasks have the same parameters: one product for all.
            theta = expand(select(self.params, names), 1)
            both = torch.cat([support, query], 1)
            with torch.no_grad():
                flat = model.features(theta, both.flatten(0, 1)[None])[0]
            found = flat.view(*both.shape[:2], -1)
            return found[:, : support.shape[1]], found[:, support.shape[1] :]
        theta = select(start.theta, names)
        network, own = alone(model, theta, support, step=0)
        return model.at(0, stored=True).features(theta, support), network.features(own, query)

    def _look(self, moment: Moment, support: Batch, spaces: Params) -> Look:
        if not spaces:
            shots = torch.full((len(support.x), 1), support.x.shape[1])
            return Look(moment, "", {}, shots, None, lambda bank: torch.empty(0))
        onehot = one_hot(support.y, self.way).to(support.x.dtype).mT
        shots = onehot.sum(2).long()
        space = "inputs" if "inputs" in spaces else "features"
        if self.same is not None:
            spaces = spaces | {"ratio": self.same(spaces[space])}
        means = {s: onehot @ x / shots[..., None] for s, x in spaces.items()}

        def likely(bank: Bank) -> Tensor:
            return _likely(self.learner.model.head, bank, moment.users, spaces["features"], onehot)

        return Look(moment, space, means, shots, self.same, likely)


def _likely(
    head: tuple[str, ...], bank: Bank, users: Tensor, features: Tensor, onehot: Tensor
) -> Float[Tensor, "task slot way then"]:
    """Return the mean log-probability of each label of past classifiers for each class at hand."""
    weight, bias = (bank.values[f"adapted/{name}"][users] for name in head)
    b, slots, way, _ = weight.shape
    scores = (features @ weight.flatten(1, 2).mT).view(b, -1, slots, way) + bias[:, None]
    logs = scores.log_softmax(3)  # [task, example, slot, then]
    means = torch.einsum("bcn,bnst->bsct", onehot / onehot.sum(2, keepdim=True), logs)
    empty = (bank.classes[users] == NONE).any(2)
    return means.masked_fill(empty[:, :, None, None], -torch.inf)
