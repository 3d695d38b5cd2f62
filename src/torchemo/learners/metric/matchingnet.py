"""MatchingNet: Matching Networks for One Shot Learning (Vinyals et al., NeurIPS 2016), without FCE."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
import torch.nn.functional as F

from torchemo.core.types import Params
from torchemo.learners.head import (
    Features,
    Head,
    HeadOptions,
    Labels,
    Logits,
    check_above_zero,
    one_hot,
)


@dataclass(frozen=True)
class MatchingNetOptions(HeadOptions):
    """Options of MatchingNet; the defaults are the paper's."""

    scale: float = 1.0
    """s, which multiplies cosines; the initial one if it is learned."""
    learn_scale: bool = False
    """Learn s in the outer loop. From 10 on, this trains far better than a fixed 1 (Gidaris, Komodakis
    2018)."""


@final
@dataclass(frozen=True)
class MatchingNet(MatchingNetOptions, Head):
    """Classify a query by attention over the support examples.

    ``a_i = softmax_i(s cos(z, z_i))`` and ``p(k | x) = sum_{i: y_i = k} a_i`` (Eq. 1 of the paper, with its
    cosine attention). The logits are ``log p``, so that they are normalised already. With one example per
    class this is a softmax over cosines to prototypes. Otherwise classes with more examples get more weight,
    in proportion to their number for s = 0.

    Choice: no full-context embedding, which reads the support set in some order and gains little in the
    published tables.
    """

    title: ClassVar[str] = "MatchingNet"
    Options: ClassVar[type] = MatchingNetOptions

    def __post_init__(self) -> None:
        check_above_zero(scale=self.scale)

    def init(self, generator: torch.Generator) -> Params:
        """Return the initial scale, if it is learned."""
        scale = torch.tensor(self.scale, device=generator.device)
        return {"scale": scale} if self.learn_scale else {}

    def fit(self, params: Params, z: Features, y: Labels, *, n_way: int) -> Params:
        """Keep the support examples: unit features, and which class each belongs to."""
        return {"unit": F.normalize(z, dim=-1), "member": one_hot(y, n_way, like=z)}

    def logits(self, params: Params, classifier: Params, z: Features) -> Logits:
        """Return ``log p(k | x)``."""
        cosine = F.normalize(z, dim=-1) @ classifier["unit"].transpose(1, 2)
        scale = params["scale"][:, None, None] if self.learn_scale else self.scale
        attention = (scale * cosine).log_softmax(-1)
        # The logarithm of a sum over each class, without leaving logarithms: a far class may have
        # attention that is too small for a float.
        foreign = classifier["member"].unsqueeze(1) == 0
        return attention.unsqueeze(-1).masked_fill(foreign, -torch.inf).logsumexp(2)
