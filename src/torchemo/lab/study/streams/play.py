"""A trained learner that meets the visits of many users."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, cast, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize, one_hot

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
        input_numbers: How many numbers a support set has, before the learner makes features of it.
        queries: Queries in the spaces of class means, as unit vectors.
    """

    moment: Moment
    start: Start
    support: Batch
    query: Tensor
    look: Look
    input_numbers: int
    queries: Callable[[], Params]

    def rows(self, chosen: Tensor) -> "Seen":
        """Return what is fitted of some tasks, any of them several times."""
        start, support = self.start, self.support
        rates = None if start.rates is None else _rows(start.rates, chosen)
        return self._replace(
            start=start._replace(theta=_rows(start.theta, chosen), rates=rates),
            support=Batch(support.x[chosen], support.y[chosen]),
            query=self.query[chosen],
        )


def _rows(values: Params, chosen: Tensor) -> Params:
    """Choose tasks; what all of them share they go on sharing."""
    return {
        name: value[:1].expand(len(chosen), *value.shape[1:])
        if value.stride(0) == 0
        else value[chosen]
        for name, value in values.items()
    }


@final
@dataclass(frozen=True)
class Player:
    """A trained learner that meets visits.

    Attributes:
        learner: The learner.
        params: Its meta-parameters.
        way: Classes of a task; 1 for functions.
        same: What tells classes apart, where ratios are asked for.
        table: Inputs of all images, where tasks are drawn as ids of images.
    """

    learner: Learner
    params: Params
    way: int
    same: SameClass | None = None
    table: Tensor | None = None
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
        inputs, y = self._inputs(moment), moment.support.y
        whole = Batch(inputs[0], y)
        start, _ = begun(self.learner, self.params, Episode(whole, whole), memory=None)
        numbers = inputs[0][0].numel()
        if y.is_floating_point():
            look = self._look(moment, whole, {})
            return Seen(moment, start, whole, inputs[1], look, numbers, dict[str, Tensor])
        features = self._features(start, inputs, moment)
        spaces = {"features": features[0]}
        if inputs[0].dim() == 3:
            spaces["inputs"] = inputs[0]

        def queries() -> Params:
            units = {"features": normalize(features[1], dim=2)}
            return units | ({"inputs": self._units(moment)} if "inputs" in spaces else {})

        support, query = inputs if self.headed is None else features
        look = self._look(moment, Batch(support, y), spaces)
        return Seen(moment, start, Batch(support, y), query, look, numbers, queries)

    @property
    def _looks_up(self) -> bool:
        """Whether features are known before: every image has its own, and inner steps do not change them."""
        return self.table is not None and self.headed is not None and not self.learner.model.norm

    def _inputs(self, moment: Moment) -> tuple[Tensor, Tensor]:
        """Return the inputs of support sets and queries, which stay ids where their features are known."""
        support, query = moment.support.x, moment.query.x
        if self.table is None or support.dim() != 2:
            return support, query
        return self.table[support], query if self._looks_up else self.table[query]

    def _units(self, moment: Moment) -> Tensor:
        x = moment.query.x
        return normalize(x, dim=2) if self.table is None or x.dim() != 2 else self._unit_table[x]

    @cached_property
    def _unit_table(self) -> Tensor:
        return normalize(cast(Tensor, self.table), dim=1)

    @cached_property
    def _feature_table(self) -> Tensor:
        """Return the learner's features of all images: one product for all."""
        theta = expand(select(self.params, network_names(self.params)), 1)
        with torch.no_grad():
            return self.learner.model.features(theta, cast(Tensor, self.table)[None])[0]

    def _features(
        self, start: Start, inputs: tuple[Tensor, Tensor], moment: Moment
    ) -> tuple[Tensor, Tensor]:
        """Return the features of support sets and queries before the first inner step."""
        if self._looks_up and moment.query.x.dim() == 2:
            return self._feature_table[moment.support.x], self._feature_table[moment.query.x]
        model, (support, query) = self.learner.model, inputs
        theta = select(start.theta, network_names(self.params))
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
