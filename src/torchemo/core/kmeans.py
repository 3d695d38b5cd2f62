"""k-means with restarts, reproducible by seed."""

import numpy as np
import torch
from jaxtyping import Float
from scipy.cluster.vq import ClusterError, kmeans2
from torch import Tensor

from torchemo.core.rng import seed_for


def centres(
    vectors: Float[Tensor, "n dim"], count: int, *, seed: int, name: str, restarts: int = 10
) -> Float[Tensor, "count dim"]:
    """Return ``count`` centres of ``vectors``, on the host in float64: k-means++, best of ``restarts``.

    Args:
        vectors: What is clustered.
        count: How many centres; where there are fewer distinct vectors, some are repeated.
        seed: Seed of the draws.
        name: What is clustered, part of the seed.
        restarts: Attempts; the one with the least squared distance counts.
    """
    points = vectors.detach().cpu().double().numpy()
    distinct = torch.from_numpy(np.unique(points, axis=0))
    # Fewer distinct vectors than centres: no k-means could fill them all.
    best = distinct[torch.arange(count, device=distinct.device) % distinct.shape[0]]
    least = float("inf")
    for restart in range(restarts if distinct.shape[0] >= count else 0):
        rng_seed = seed_for(seed, name, restart) % 2**32
        try:
            found, label = kmeans2(points, count, minit="++", seed=rng_seed, missing="raise")
        except ClusterError:
            continue
        inertia = float(((points - found[label]) ** 2).sum())
        if inertia < least:
            least, best = inertia, torch.from_numpy(found)
    return best
