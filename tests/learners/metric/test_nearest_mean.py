"""Nearest mean against scipy's distances."""

import pytest
import torch
from scipy.spatial.distance import cdist

from tests.learners.metric.problems import N_WAY, SHOTS, labels_of, randn
from torchemo.core.errors import ConfigError
from torchemo.learners.metric.nearest_mean import NearestMean


def scores(distance, scale):
    head = NearestMean(distance=distance)
    z, y, q = randn(2, sum(SHOTS), 6), labels_of(2, SHOTS, 3), randn(2, 9, 6, seed=1)
    own = {"scale": torch.full((2,), scale, dtype=torch.float64)}
    return z, y, q, head.logits(own, head.fit(own, z, y, n_way=N_WAY), q)


def test_cosine_is_that_of_scipy():
    z, y, q, found = scores("cosine", 3.0)
    for b in range(2):
        unit = z[b] / z[b].norm(dim=1, keepdim=True)
        means = torch.stack([unit[y[b] == c].mean(0) for c in range(N_WAY)])
        expected = 3.0 * (1 - torch.tensor(cdist(q[b], means, "cosine")))
        torch.testing.assert_close(found[b], expected)


def test_euclidean_ranks_like_scipy():
    z, y, q, found = scores("euclidean", 3.0)
    for b in range(2):
        means = torch.stack([z[b][y[b] == c].mean(0) for c in range(N_WAY)])
        expected = -3.0 / 6 * torch.tensor(cdist(q[b], means, "sqeuclidean"))
        torch.testing.assert_close(found[b].log_softmax(1), expected.log_softmax(1))


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_the_scale_decides_no_answer(distance):
    soft, sharp = (scores(distance, scale)[-1] for scale in (0.5, 20.0))
    assert torch.equal(soft.argmax(2), sharp.argmax(2))
    assert not torch.allclose(soft, sharp)


def test_unknown_distances_are_refused():
    with pytest.raises(ConfigError, match="should be cosine or euclidean, got 'taxi'"):
        NearestMean(distance="taxi")
