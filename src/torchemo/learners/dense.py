"""The classifier of all base classes, linear or cosine.

It is linear, ``z W^T + b``, or cosine, ``s <z / |z|, w_c / |w_c|>`` with one learned scale s (Gidaris and
Komodakis, CVPR 2018; Chen et al., ICLR 2019: Baseline++). It reads what the network's own head would see.
"""

from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.types import Params


@runtime_checkable
class TakesDense(Protocol):
    """A learner that takes over the classifier of base classes when its episodes begin (Dynamic FS)."""

    def after_dense(self, params: Params, classifier: Params) -> Params:
        """Return new contents of meta-parameters.

        Args:
            params: The learner's meta-parameters.
            classifier: ``weight [C, f]``, with ``scale`` if it is cosine, with ``bias [C]`` if linear.
        """
        ...


def dense_logits(classifier: Params, z: Float[Tensor, "*batch f"]) -> Float[Tensor, "*batch c"]:
    """Score features for all base classes; the classifier is cosine if it has a scale."""
    weight = classifier["weight"]
    if "scale" in classifier:
        scores = F.linear(F.normalize(z, dim=-1), F.normalize(weight, dim=-1))
        return classifier["scale"] * scores
    return F.linear(z, weight, classifier["bias"])
