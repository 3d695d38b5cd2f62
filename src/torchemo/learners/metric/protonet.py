"""ProtoNet: Prototypical Networks for Few-shot Learning (Snell, Swersky, Zemel, NeurIPS 2017)."""

from dataclasses import dataclass
from typing import ClassVar, final

from torchemo.core.prototypes import class_means
from torchemo.core.types import Params
from torchemo.learners.head import Features, Labels, LinearHead


@final
@dataclass(frozen=True)
class ProtoNet(LinearHead):
    """Classify a query by its squared Euclidean distance to the mean feature p_k of each class.

    The paper's logits are ``-||z - p_k||^2`` (its Eq. 2, p_k by its Eq. 1). Up to ``-||z||^2``, which no
    softmax over classes sees, they are linear in z: ``W_k = 2 p_k`` and ``b_k = -||p_k||^2`` (its Section
    2.4). Nothing is learned but the features. Proto-MAML begins with this classifier.
    """

    title: ClassVar[str] = "ProtoNet"

    def fit(self, params: Params, z: Features, y: Labels, *, n_way: int) -> Params:
        """Average the features of each class."""
        prototypes = class_means(z, y, n_way=n_way)
        return {"weight": 2 * prototypes, "bias": -prototypes.square().sum(-1)}
