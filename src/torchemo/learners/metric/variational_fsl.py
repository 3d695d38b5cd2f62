"""Gaussian prototypes: our variant of Variational Few-Shot Learning (Zhang et al., ICCV 2019)."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy
from torchemo.core.prototypes import class_means
from torchemo.core.types import Model, Params, TaskShape
from torchemo.learners.head import (
    Features,
    Head,
    HeadOptions,
    Labels,
    Logits,
    TaskLosses,
    check_above_zero,
    one_hot,
)
from torchemo.models.inputs import check_positive
from torchemo.models.layers import glorot_uniform, task_linear, zeros
from torchemo.models.trunk import feature_count


@dataclass(frozen=True)
class VariationalFSLOptions(HeadOptions):
    """Options of Gaussian prototypes. The paper's are not known; these are ours."""

    hidden: int = 64
    """Units of the network that infers the Gaussians."""
    scale: float = 2.0
    """Where the learned scale of the log-likelihoods begins; at 2 the start is ProtoNet."""
    kl_weight: float = 0.01
    """beta, the weight of the divergence of what the support set says from what support and queries say."""


@final
@dataclass(frozen=True)
class VariationalFSL(VariationalFSLOptions, Head):
    """Classify a query by its likelihood under a Gaussian of each class.

    This is our reading: neither text nor code of the paper could be had. With ``h_k`` the mean of
    ``tanh(U z_i + u)`` over the examples of a class, its Gaussian has mean ``mean_i z_i + A h_k`` and
    variances ``exp(V h_k + v)``. The logits are ``s log N(z; mu_k, sigma_k^2)`` without constants. The loss
    adds ``beta sum_k KL(q(. | S_k) || q(. | S_k, Q_k))``: few examples should say what more examples say.
    A, V and v begin at zero, so that training begins at ProtoNet.
    """

    title: ClassVar[str] = "VariationalFSL, our reading"
    Options: ClassVar[type] = VariationalFSLOptions

    features: int = 1
    """Length of a feature vector."""

    @classmethod
    def sized(cls, options: Any, model: Model, tasks: TaskShape) -> "VariationalFSL":
        """Make the head for a network's features."""
        return cls(**vars(options), features=feature_count(model))

    def __post_init__(self) -> None:
        check_positive(hidden=self.hidden)
        check_above_zero(scale=self.scale)
        if not 0 <= self.kl_weight < torch.inf:
            raise ConfigError(
                f"learner.kl_weight should be finite and 0 or more, got {self.kl_weight}."
            )

    def init(self, generator: torch.Generator) -> Params:
        """Draw U; A, V and all biases begin at 0."""
        f, h = self.features, self.hidden
        return {
            "seen.weight": glorot_uniform((h, f), generator),
            "seen.bias": zeros((h,), generator),
            "mean.weight": zeros((f, h), generator),
            "mean.bias": zeros((f,), generator),
            "spread.weight": zeros((f, h), generator),
            "spread.bias": zeros((f,), generator),
            "scale": torch.tensor(self.scale, device=generator.device),
        }

    def fit(self, params: Params, z: Features, y: Labels, *, n_way: int) -> Params:
        """Infer the Gaussian of each class."""
        hidden = task_linear(params, z, layer="seen").tanh()
        pooled = {
            "features": class_means(z, y, n_way=n_way),
            "hidden": class_means(hidden, y, n_way=n_way),
            "examples": one_hot(y, n_way, like=z).sum(1),
        }
        return pooled | _gaussians(params, pooled)

    def logits(self, params: Params, classifier: Params, z: Features) -> Logits:
        """Return the scaled log-likelihoods, without a tensor of queries by classes by features."""
        mean, log_variance = classifier["mean"], classifier["log_variance"]
        precision = (-log_variance).exp()
        distance = (
            z.square() @ precision.transpose(1, 2)
            - 2 * z @ (mean * precision).transpose(1, 2)
            + ((mean.square() * precision) + log_variance).sum(-1).unsqueeze(1)
        )
        return -0.5 * params["scale"][:, None, None] * distance

    def losses(self, params: Params, classifier: Params, z: Features, y: Labels) -> TaskLosses:
        """Return the cross-entropy and the divergence, per task."""
        loss = cross_entropy(self.logits(params, classifier, z), y)
        if self.kl_weight == 0:
            return loss
        member = one_hot(y, classifier["mean"].shape[1], like=z).transpose(1, 2)
        hidden = task_linear(params, z, layer="seen").tanh()
        examples = classifier["examples"]
        total = (examples + member.sum(2)).unsqueeze(-1)
        pooled = {
            name: (classifier[name] * examples.unsqueeze(-1) + member @ seen) / total
            for name, seen in (("features", z), ("hidden", hidden))
        }
        more = _gaussians(params, pooled)
        return loss + self.kl_weight * gaussian_kl(classifier, more).sum(1)


def _gaussians(params: Params, pooled: Params) -> Params:
    """Return mean and log-variances of each class from what is pooled over its examples."""
    shift = task_linear(params, pooled["hidden"], layer="mean")
    return {
        "mean": pooled["features"] + shift,
        "log_variance": task_linear(params, pooled["hidden"], layer="spread"),
    }


def gaussian_kl(p: Params, q: Params) -> Float[Tensor, "task way"]:
    """Return ``KL(p || q)`` of diagonal Gaussians, given as ``mean`` and ``log_variance``."""
    ratio = p["log_variance"] - q["log_variance"]
    apart = (p["mean"] - q["mean"]).square() * (-q["log_variance"]).exp()
    return 0.5 * (ratio.exp() + apart - 1 - ratio).sum(-1)
