"""MetaOptNet with its ridge head (Lee, Maji, Ravichandran, Soatto, CVPR 2019).

The paper is Meta-Learning with Differentiable Convex Optimization.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.types import Params
from torchemo.learners.metric.episodic import LinearHead, check_above_zero, one_hot


@dataclass(frozen=True)
class RidgeOptions:
    """Options of MetaOptNet's ridge head; the defaults are the paper's, for 16 000 features."""

    regularization: float = 50.0
    """lambda, the weight of the squared norm of the classifier."""
    scale: float = 1.0
    """Where the learned scale s of the logits begins; 10 suits a Conv-4."""
    smoothing: float = 0.1
    """epsilon, the share of a query's label that is spread over the other classes."""


@final
@dataclass(frozen=True)
class MetaOptNetRidge(RidgeOptions, LinearHead):
    """Classify by ridge regression from support features Z to one-hot labels Y, solved exactly.

    In the dual, ``alpha = (Z Z^T + lambda I)^-1 Y`` and ``W = s alpha^T Z``, which equals the primal
    ``s Y^T Z (Z^T Z + lambda I)^-1`` and needs a matrix of the size of the support set only. There is no
    bias. The optimum depends neither on a start nor on a path.

    Choice: the authors' code has twice this alpha; s makes up for it.
    """

    title: ClassVar[str] = "MetaOptNet-RR"
    Options: ClassVar[type] = RidgeOptions

    def __post_init__(self) -> None:
        check_above_zero(regularization=self.regularization, scale=self.scale)
        if not 0 <= self.smoothing < 0.5:
            raise ConfigError(
                f"learner.smoothing should be 0 or more and below 0.5, got {self.smoothing}."
            )

    def init(self, generator: torch.Generator) -> Params:
        """Return the initial scale."""
        return {"scale": torch.tensor(self.scale, device=generator.device)}

    def fit(
        self,
        params: Params,
        z: Float[Tensor, "task n f"],
        y: Int[Tensor, "task n"],
        *,
        n_way: int,
    ) -> Params:
        """Solve the dual problem; autograd through the solution is exact."""
        target = one_hot(y, n_way, like=z)
        ridge = self.regularization * torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        # Not by Cholesky, which raises where features are not finite: the trainer says so better.
        alpha = torch.linalg.solve(z @ z.transpose(1, 2) + ridge, target)
        weight = params["scale"][:, None, None] * (alpha.transpose(1, 2) @ z)
        return {"weight": weight, "bias": weight.new_zeros(weight.shape[:2])}

    def losses(
        self,
        params: Params,
        classifier: Params,
        z: Float[Tensor, "task q f"],
        y: Int[Tensor, "task q"],
    ) -> Float[Tensor, " task"]:
        """Return the mean cross-entropy with smoothed labels."""
        logits = self.logits(params, classifier, z)
        return smoothed_cross_entropy(logits, y, smoothing=self.smoothing)


def smoothed_cross_entropy(
    logits: Float[Tensor, "task q way"], y: Int[Tensor, "task q"], *, smoothing: float
) -> Float[Tensor, " task"]:
    """Average the cross-entropy with targets ``1 - epsilon``, and ``epsilon / (N - 1)`` elsewhere."""
    # Torch spreads its share over all N classes, the right one included.
    n_way = logits.shape[-1]
    share = smoothing * n_way / (n_way - 1)
    each = F.cross_entropy(
        logits.flatten(0, 1), y.flatten(), reduction="none", label_smoothing=share
    )
    return each.view(y.shape).mean(1)
