"""MetaOptNet with its ridge head (Lee, Maji, Ravichandran, Soatto, CVPR 2019).

The paper is Meta-Learning with Differentiable Convex Optimization.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.losses import smoothed_cross_entropy
from torchemo.core.types import Params
from torchemo.learners.head import (
    Features,
    HeadOptions,
    Labels,
    LinearHead,
    TaskLosses,
    check_above_zero,
    one_hot,
)


@dataclass(frozen=True, kw_only=True)
class ConvexOptions(HeadOptions):
    """Options of MetaOptNet's heads; the defaults are the paper's, for 16 000 features."""

    scale: float = 1.0
    """Where the learned scale s of the logits begins; 10 suits a Conv-4."""
    smoothing: float = 0.1
    """epsilon, the share of a query's label that is spread over the other classes."""


@dataclass(frozen=True)
class RidgeOptions(ConvexOptions):
    """Options of MetaOptNet's ridge head."""

    regularization: float = 50.0
    """lambda, the weight of the squared norm of the classifier."""


class ConvexHead(ConvexOptions, LinearHead):
    """A linear head that solves a convex problem; its logits have a learned scale, its loss smooth labels."""

    def __post_init__(self) -> None:
        check_above_zero(scale=self.scale)
        if not 0 <= self.smoothing < 0.5:
            raise ConfigError(
                f"learner.smoothing should be 0 or more and below 0.5, got {self.smoothing}."
            )

    def init(self, generator: torch.Generator) -> Params:
        """Return the initial scale."""
        return {"scale": torch.tensor(self.scale, device=generator.device)}

    def losses(self, params: Params, classifier: Params, z: Features, y: Labels) -> TaskLosses:
        """Return the mean cross-entropy with smoothed labels."""
        logits = self.logits(params, classifier, z)
        return smoothed_cross_entropy(logits, y, smoothing=self.smoothing)


def scaled(params: Params, weight: Float[Tensor, "task way f"]) -> Params:
    """Return the classifier ``s W`` without a bias."""
    weight = params["scale"][:, None, None] * weight
    return {"weight": weight, "bias": weight.new_zeros(weight.shape[:2])}


@final
@dataclass(frozen=True)
class MetaOptNetRidge(RidgeOptions, ConvexHead):
    """Classify by ridge regression from support features Z to one-hot labels Y, solved exactly.

    In the dual, ``alpha = (Z Z^T + lambda I)^-1 Y`` and ``W = s alpha^T Z``, which equals the primal
    ``s Y^T Z (Z^T Z + lambda I)^-1`` and needs a matrix of the size of the support set only. There is no
    bias. The optimum depends neither on a start nor on a path.

    Choice: the authors' code has twice this alpha; s makes up for it.
    """

    title: ClassVar[str] = "MetaOptNet-RR"
    Options: ClassVar[type] = RidgeOptions

    def __post_init__(self) -> None:
        check_above_zero(regularization=self.regularization)
        super().__post_init__()

    def fit(self, params: Params, z: Features, y: Labels, *, n_way: int) -> Params:
        """Solve the dual problem; autograd through the solution is exact."""
        target = one_hot(y, n_way, like=z)
        ridge = self.regularization * torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        # Not by Cholesky, which raises where features are not finite: the trainer says so better.
        alpha = torch.linalg.solve(z @ z.transpose(1, 2) + ridge, target)
        return scaled(params, alpha.transpose(1, 2) @ z)
