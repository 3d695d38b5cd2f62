"""HVM: our reading of hierarchical variational memory (Du, Zhen, Shao, Snoek, ICLR 2022)."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy
from torchemo.core.prototypes import class_means
from torchemo.core.types import BaseClasses, Model, Params, TaskShape
from torchemo.learners.head import (
    Features,
    Head,
    HeadOptions,
    Labels,
    Logits,
    TaskLosses,
    one_hot,
)
from torchemo.learners.metric.variational_fsl import gaussian_kl
from torchemo.models.inputs import check_positive
from torchemo.models.layers import glorot_uniform, task_linear, zeros
from torchemo.models.trunk import level_sizes, with_levels

NETS, LAYERS = ("mean", "log_variance"), 3
KEPT = ("key", "mean", "log_variance")
"""What the memory holds of a class at each level."""


@dataclass(frozen=True)
class HVMOptions(HeadOptions):
    """Options of HVM; width, neighbours and momentum are those of the authors' scripts."""

    levels: int = 4
    """Depths of the network whose maps are compared, from the last block backwards."""
    width: int = 256
    """Numbers per feature, prototype and hidden layer at each level."""
    neighbours: int = 10
    """Remembered classes that a class recalls."""
    momentum: float = 0.3
    """Share of a remembered class that stays when it is written again."""
    kl_weight: float = 1e-4
    """beta, the weight of the divergence of what the support set says from what queries say."""


@final
@dataclass(frozen=True)
class HVM(HVMOptions, Head):
    """Classify by Gaussian prototypes at several depths, each helped by a memory of training classes.

    At level l a class with mean feature v recalls ``m = sum_j w_j mean_j``, and log-variances s in the same
    way, with w the softmax of ``<v, key_j>`` over the nearest classes. Its prototype is a Gaussian with mean
    ``v + f([v, m, zeta])``, zeta that of the level before, and log-variances ``g([v, s, zeta])``. The
    logits are ``E -|z - p|^2``, the expectation over prototypes p in closed form. The answer is
    ``sum_l a_l softmax(logits_l)``; a is the softmax of a small network on the gradient of the support loss
    in the prototypes. The loss adds ``beta sum KL(q(p | S, m) || q(p | Q))``.

    This is our reading: the paper's text could not be had, and the public code neither fills its memory nor
    trains this classifier. Choices: an expectation takes the place of 150 samples; attention is one
    softmax over the nearest classes; f and g begin at zero, so that training begins at ProtoNet. The memory
    is written in training with ``bn_over = batch``. Tasks that go one by one read it and leave it.
    """

    title: ClassVar[str] = "HVM, our reading"
    Options: ClassVar[type] = HVMOptions

    sizes: tuple[int, ...] = (1,)
    """Length of the features of each level."""
    classes: int = 0
    """Training classes; 0 for no memory."""

    @classmethod
    def network(cls, options: Any, model: Model) -> Model:
        """Let the network return features of several depths, where it can."""
        check_positive(levels=options.levels)
        return with_levels(model, options.levels)

    @classmethod
    def sized(cls, options: Any, model: Model, tasks: TaskShape) -> "HVM":
        """Make the head for a network's levels and the classes of training."""
        return cls(**vars(options), sizes=level_sizes(model), classes=tasks.base_classes)

    def __post_init__(self) -> None:
        check_positive(levels=self.levels, width=self.width, neighbours=self.neighbours)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"learner.momentum should be in [0, 1), got {self.momentum}.")
        if not 0 <= self.kl_weight < torch.inf:
            raise ConfigError(
                f"learner.kl_weight should be finite and 0 or more, got {self.kl_weight}."
            )

    def init(self, generator: torch.Generator) -> Params:
        """Draw projections and networks; last layers begin at 0."""
        d, params = self.width, dict[str, Tensor]()
        for level, size in enumerate(self.sizes):
            params[f"project.{level}.weight"] = glorot_uniform((d, size), generator)
            params[f"project.{level}.bias"] = zeros((d,), generator)
            for net, inputs in ((n, 3 * d) for n in NETS):
                params |= _drawn(f"{net}.{level}", (inputs, d, d, d), generator)
            for net in NETS:
                params |= _drawn(f"prior_{net}.{level}", (d, d, d, d), generator)
            if len(self.sizes) > 1:
                params |= _drawn(f"weigh.{level}", (d, d, d, 1), generator)
        return params

    def init_state(self, generator: torch.Generator) -> Params:
        """Return the empty memory: a row per level and training class."""
        if not self.classes:
            return {}
        shape = (len(self.sizes), self.classes, self.width)
        return {
            **{f"memory.{name}": zeros(shape, generator) for name in KEPT},
            "memory.written": zeros((self.classes,), generator),
        }

    def fit(self, params: Params, z: Features, y: Labels, *, n_way: int) -> Params:
        """Infer a Gaussian prototype of each class at each level, and how much each level counts."""
        found: dict[str, list[Tensor]] = {name: [] for name in (*KEPT, "weigh")}
        before = None
        for level, seen in enumerate(self._projected(params, z)):
            v = class_means(seen, y, n_way=n_way)
            before = torch.zeros_like(v) if before is None else before
            told = [
                _net(params, f"{net}.{level}", torch.cat([v, recalled, before], dim=-1))
                for net, recalled in zip(NETS, self._recalled(params, v, level), strict=True)
            ]
            mean, log_variance = v + told[0], told[1]
            weigh = v.new_zeros(len(v))  # a single level needs no weight
            if len(self.sizes) > 1:
                gradient = _prototype_gradient(seen, y, mean, log_variance)
                weigh = _net(params, f"weigh.{level}", gradient)[:, 0, 0]
            own = (v, mean, log_variance, weigh)
            for name, value in zip(found, own, strict=True):
                found[name].append(value)
            before = mean
        return {name: torch.stack(values, dim=1) for name, values in found.items()}

    def logits(self, params: Params, classifier: Params, z: Features) -> Logits:
        """Return the logarithm of the levels' weighted probabilities."""
        weights = classifier["weigh"].log_softmax(1)
        each = [
            _expected(seen, classifier["mean"][:, i], classifier["log_variance"][:, i])
            .log_softmax(-1)
            .add(weights[:, i, None, None])
            for i, seen in enumerate(self._projected(params, z))
        ]
        return torch.stack(each).logsumexp(0)

    def losses(self, params: Params, classifier: Params, z: Features, y: Labels) -> TaskLosses:
        """Return the cross-entropy and the divergence, per task."""
        loss = cross_entropy(self.logits(params, classifier, z), y)
        if self.kl_weight == 0:
            return loss
        for i, seen in enumerate(self._projected(params, z)):
            n_way = classifier["mean"].shape[2]
            asked = one_hot(y, n_way, like=z).sum(1).clamp(min=1)
            v = one_hot(y, n_way, like=z).transpose(1, 2) @ seen / asked.unsqueeze(-1)
            prior = {
                "mean": v + _net(params, f"prior_mean.{i}", v),
                "log_variance": _net(params, f"prior_log_variance.{i}", v),
            }
            said = {name: classifier[name][:, i] for name in NETS}
            loss = loss + self.kl_weight * gaussian_kl(said, prior).sum(1)
        return loss

    @torch.no_grad()
    def written(self, state: Params, classifier: Params, base: BaseClasses) -> Params:
        """Return the memory after the classes of B tasks are written, in the order of the tasks.

        ``row <- momentum row + (1 - momentum) new``, and ``row <- new`` the first time.
        """
        rows = {name: tensor.clone() for name, tensor in state.items()}
        for task, labels in enumerate(base.labels.tolist()):
            for label, number in enumerate(labels):
                stays = self.momentum if rows["memory.written"][number] else 0.0
                for name in KEPT:
                    row = rows[f"memory.{name}"][:, number]
                    row.mul_(stays).add_((1 - stays) * classifier[name][task, :, label])
                rows["memory.written"][number] = 1
        return rows

    def _projected(self, params: Params, z: Features) -> list[Float[Tensor, "task n d"]]:
        parts = torch.split(z, list(self.sizes), dim=-1)
        return [task_linear(params, part, layer=f"project.{i}") for i, part in enumerate(parts)]

    def _recalled(
        self, params: Params, v: Float[Tensor, "task way d"], level: int
    ) -> tuple[Tensor, Tensor]:
        """Average means and log-variances of the nearest remembered classes; zeros while there are none."""
        if "memory.key" not in params:
            return torch.zeros_like(v), torch.zeros_like(v)
        key, mean, log_variance = (params[f"memory.{name}"][:, level] for name in KEPT)
        empty = params["memory.written"].unsqueeze(1) == 0
        near = (v @ key.transpose(1, 2)).masked_fill(empty, -torch.inf)
        best, chosen = near.topk(min(self.neighbours, key.shape[1]), dim=-1)
        # Without any remembered class all scores are -inf, whose softmax is not a number.
        attention = best.masked_fill(empty.all(-1, keepdim=True), 0.0).softmax(-1)
        spread = torch.zeros_like(near).scatter(-1, chosen, attention)
        return spread @ mean, spread @ log_variance


def _drawn(name: str, widths: tuple[int, ...], generator: torch.Generator) -> Params:
    params: Params = {}
    for i in range(LAYERS):
        shape = (widths[i + 1], widths[i])
        last = i == LAYERS - 1
        weight = zeros(shape, generator) if last else glorot_uniform(shape, generator)
        params[f"{name}.{i}.weight"] = weight
        params[f"{name}.{i}.bias"] = zeros(shape[:1], generator)
    return params


def _net(params: Params, name: str, x: Float[Tensor, "task n i"]) -> Float[Tensor, "task n o"]:
    """Apply three dense layers with ELU between them."""
    for i in range(LAYERS):
        x = task_linear(params, x, layer=f"{name}.{i}")
        x = F.elu(x) if i < LAYERS - 1 else x
    return x


def _expected(
    z: Float[Tensor, "task n d"],
    mean: Float[Tensor, "task way d"],
    log_variance: Float[Tensor, "task way d"],
) -> Float[Tensor, "task n way"]:
    """Return ``E -|z - p|^2`` for p ~ N(mean, variance), without what is the same for all classes."""
    own = (mean.square() + log_variance.exp()).sum(-1)
    return 2 * z @ mean.transpose(1, 2) - own.unsqueeze(1)


def _prototype_gradient(
    z: Float[Tensor, "task n d"],
    y: Labels,
    mean: Float[Tensor, "task way d"],
    log_variance: Float[Tensor, "task way d"],
) -> Float[Tensor, "task 1 d"]:
    """Differentiate the support loss in the prototypes' means; return its mean square over classes."""
    excess = _expected(z, mean, log_variance).softmax(-1) - one_hot(y, mean.shape[1], like=z)
    each = excess.transpose(1, 2) @ z - excess.sum(1).unsqueeze(-1) * mean
    return (2 * each / z.shape[1]).square().mean(1, keepdim=True)
