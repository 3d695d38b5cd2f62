"""CAN against its definition, one pair of maps at a time."""

import pytest
import torch
import torch.nn.functional as F

from tests.learners.metric.problems import close, labels_of, randn
from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.core.tree import expand
from torchemo.core.types import BaseClasses, TaskShape
from torchemo.learners.build import build_learner
from torchemo.learners.metric.can import CAN
from torchemo.models import Conv4

WAY, C, SIDE = 3, 4, 3
M = SIDE * SIDE
HEAD = CAN(map=(C, SIDE, SIDE))


def drawn(head=HEAD, tasks=2):
    params = head.init(torch.Generator().manual_seed(0))
    noise = {n: 0.3 * randn(*t.shape, seed=5) for n, t in params.items()}
    return expand({n: t.double() + noise[n] for n, t in params.items()}, tasks)


def problem():
    z, q = randn(2, 6, C * M), randn(2, 4, C * M, seed=1)
    return z, labels_of(2, (2, 1, 3), seed=0), q


def attended(params, p, q):
    """Return both maps [C, M] multiplied by their attention, by loops over places."""
    alike = torch.stack(
        [
            torch.stack([F.cosine_similarity(p[:, i], q[:, j], dim=0) for j in range(M)])
            for i in range(M)
        ]
    )
    found = []
    for maps, r in ((p, alike), (q, alike.T)):
        met = torch.stack([r[:, j].mean() for j in range(M)])
        hidden = (params["hidden.weight"] @ met + params["hidden.bias"]).clamp(min=0)
        w = params["weigh.weight"] @ hidden + params["weigh.bias"]
        scores = torch.stack([(w * r[i]).mean() for i in range(M)])
        attention = (scores / 0.025).softmax(0) + 1
        assert float(attention.sum()) == pytest.approx(M + 1)
        found.append(maps * attention)
    return found


def of_pairs(head, params, z, y, q, b):
    own = {name: t[b] for name, t in params.items()}
    for i in range(q.shape[1]):
        for k in range(WAY):
            p = z[b][y[b] == k].mean(0).view(C, M)
            yield i, k, *attended(own, p, q[b, i].view(C, M))


def test_scores_are_those_of_pairs_one_by_one():
    (z, y, q), params = problem(), drawn()
    found = HEAD.logits(params, HEAD.fit(params, z, y, n_way=WAY), q)
    for b in range(2):
        for i, k, p, seen in of_pairs(HEAD, params, z, y, q, b):
            cosine = F.cosine_similarity(p.mean(1), seen.mean(1), dim=0)
            close(found[b, i, k], 7 * cosine, rtol=1e-9, atol=1e-11)


def test_the_loss_asks_every_place():
    (z, y, q), params = problem(), drawn()
    target = torch.tensor([[0, 2, 1, 1], [2, 2, 0, 1]])
    losses = HEAD.losses(params, HEAD.fit(params, z, y, n_way=WAY), q, target)
    for b in range(2):
        logits = torch.zeros(4, M, WAY).double()
        for i, k, p, seen in of_pairs(HEAD, params, z, y, q, b):
            logits[i, :, k] = 7 * F.cosine_similarity(seen, p.mean(1)[:, None], dim=0)
        expected = F.cross_entropy(logits.flatten(0, 1), target[b].repeat_interleave(M))
        assert float(losses[b]) == pytest.approx(float(expected))


def test_without_weights_it_is_a_cosine_to_class_means_of_pooled_maps():
    (z, y, q), params = problem(), drawn()
    for name in ("weigh.weight", "weigh.bias"):
        params[name] = torch.zeros_like(params[name])
    found = HEAD.logits(params, HEAD.fit(params, z, y, n_way=WAY), q)
    pooled = [t.view(2, -1, C, M).mean(3) for t in (z, q)]
    means = torch.stack(
        [torch.stack([pooled[0][b][y[b] == k].mean(0) for k in range(WAY)]) for b in range(2)]
    )
    cosine = F.cosine_similarity(pooled[1][:, :, None], means[:, None], dim=-1)
    close(found, 7 * cosine, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("side", [1, SIDE])
def test_longer_maps_give_the_same_answers(side):
    head = CAN(map=(C, side, side))
    params, size = drawn(head), C * side * side
    z, q, y = randn(2, 3, size), randn(2, 4, size, seed=1), torch.arange(3).expand(2, -1)
    found = head.logits(params, head.fit(params, z, y, n_way=WAY), q)
    longer = head.logits(params, head.fit(params, 3 * z, y, n_way=WAY), 0.5 * q)
    close(longer, found, rtol=1e-9, atol=1e-11)


def test_other_classes_and_queries_do_not_enter_a_pair():
    (z, y, q), params = problem(), drawn()
    found = HEAD.logits(params, HEAD.fit(params, z, y, n_way=WAY), q)
    other = torch.where((y == 1)[..., None], randn(2, 6, C * M, seed=9), z)
    moved = HEAD.logits(params, HEAD.fit(params, other, y, n_way=WAY), q[:, :1])
    assert torch.allclose(moved[:, 0, [0, 2]], found[:, 0, [0, 2]])
    assert not torch.allclose(moved[:, 0, 1], found[:, 0, 1])


def test_the_dense_loss_asks_every_place_of_the_weighed_map_for_the_base_class():
    head = CAN(map=(C, SIDE, SIDE), base=6, dense_weight=2.0)
    (z, y, q), params = problem(), drawn(head)
    target = torch.tensor([[0, 2, 1, 1], [2, 2, 0, 1]])
    base = BaseClasses(torch.tensor([[5, 0, 3], [1, 2, 4]]))
    classifier = head.fit(params, z, y, n_way=WAY)
    found = head.class_losses(params, classifier, q, target, base=base)
    alone = head.losses(params, classifier, q, target)
    for b in range(2):
        logits, wanted = [], []
        for i, k, _, seen in of_pairs(head, params, z, y, q, b):
            if k == target[b, i]:
                scores = params["dense.weight"][b] @ seen + params["dense.bias"][b][:, None]
                logits.append(scores.T)
                wanted += [int(base.labels[b, k])] * M
        expected = F.cross_entropy(torch.cat(logits), torch.tensor(wanted))
        assert float(found[b] - alone[b]) == pytest.approx(2 * float(expected))


def test_base_classes_need_a_training_split():
    learner = {"dense_weight": 2.0}
    model = Conv4(WAY, in_channels=1, image_size=16, filters=3)
    with pytest.raises(ConfigError, match="these tasks have no base classes"):
        build_learner(Part("can", learner), model, TaskShape("classification", (1, 16, 16), WAY))
