"""Nearest mean: what a pretrained network can do without any meta-training."""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.prototypes import class_means
from torchemo.core.types import Params
from torchemo.learners.head import Features, Head, HeadOptions, Labels, Logits, check_above_zero


@dataclass(frozen=True)
class NearestMeanOptions(HeadOptions):
    """Options of nearest mean."""

    distance: Literal["cosine", "euclidean"] = "cosine"
    """Compare directions of features, or features as they are."""
    scale: float = 10.0
    """Where the learned scale of the logits begins. It decides how sure answers are, never which they are."""


@final
@dataclass(frozen=True)
class NearestMean(NearestMeanOptions, Head):
    """Classify a query by the nearest class mean of the support features.

    Unlike ProtoNet's, its features are to be left as they are: on a network without an adapter only the scale
    of the logits is trained. Cosine: ``s <z / |z|, m_k / |m_k|>`` with m_k the mean of unit vectors.
    Euclidean: ``-s |z - m_k|^2 / d``.
    """

    title: ClassVar[str] = "Nearest mean"
    Options: ClassVar[type] = NearestMeanOptions

    def __post_init__(self) -> None:
        check_above_zero(scale=self.scale)
        if self.distance not in ("cosine", "euclidean"):
            raise ConfigError(
                f"learner.distance should be cosine or euclidean, got '{self.distance}'."
            )

    def init(self, generator: torch.Generator) -> Params:
        """Return the initial scale."""
        return {"scale": torch.tensor(self.scale, device=generator.device)}

    def fit(self, params: Params, z: Features, y: Labels, *, n_way: int) -> Params:
        """Average the features of each class."""
        means = class_means(self._seen(z), y, n_way=n_way)
        scale = params["scale"][:, None]
        if self.distance == "cosine":
            means = F.normalize(means, dim=-1)
            return {"weight": scale[..., None] * means, "bias": means.new_zeros(means.shape[:2])}
        scale = scale / z.shape[-1]
        return {"weight": 2 * scale[..., None] * means, "bias": -scale * means.square().sum(-1)}

    def logits(self, params: Params, classifier: Params, z: Features) -> Logits:
        """Compare queries with the means."""
        weight, bias = classifier["weight"], classifier["bias"]
        return torch.baddbmm(bias.unsqueeze(1), self._seen(z), weight.transpose(1, 2))

    def _seen(self, z: Tensor) -> Tensor:
        return F.normalize(z, dim=-1) if self.distance == "cosine" else z
