"""Soft clustering: how much a vector belongs to each of several centres."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchemo.core.types import Params


def soft_assignment(
    vectors: Float[Tensor, "task n dim"], centres: Float[Tensor, "centre dim"], *, width: float
) -> Float[Tensor, "task n centre"]:
    """Return ``softmax_g(-||v - h_g||^2 / (2 width))``; rows sum to 1."""
    squared = (vectors[:, :, None] - centres).square().sum(-1)
    return (-squared / (2 * width)).softmax(-1)


def soft_clusters(
    params: Params, vectors: Float[Tensor, "task n dim"]
) -> Float[Tensor, "task cluster dim"]:
    """Sum the vectors of a task into clusters: what stands for classes where there are none.

    Each vector is divided among the clusters by a softmax of a linear map, ``weight [clusters, dim]``
    and ``bias``.
    """
    share = F.linear(vectors, params["weight"], params["bias"]).softmax(-1)
    return share.transpose(1, 2) @ vectors
