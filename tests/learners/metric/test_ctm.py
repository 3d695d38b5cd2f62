"""CTM against its definition, one example at a time."""

import pytest
import torch
import torch.nn.functional as F

from tests.learners.metric.problems import close, labels_of, randn
from torchemo.core.tree import expand
from torchemo.learners.metric.ctm import CTM

WAY, C, SIDE, FILTERS = 3, 4, 2, 6
SIZE = C * SIDE * SIDE
HEAD = CTM(filters=FILTERS, blocks=2, map=(C, SIDE, SIDE), classes=WAY)


def drawn(head=HEAD, tasks=2):
    params = head.init(torch.Generator().manual_seed(0))
    noise = {n: 0.1 * randn(max(t.numel(), 1), seed=5).view(t.shape) for n, t in params.items()}
    return expand({n: t.double() + noise[n] for n, t in params.items()}, tasks)


def problem():
    return randn(2, 6, SIZE), labels_of(2, (2, 1, 3), seed=0), randn(2, 4, SIZE, seed=1)


def sent(own, x, part, blocks=2):
    """Send one map through a network, by torch."""

    def conv(v, name, padding=0):
        return F.conv2d(v, own[f"{name}.weight"], own[f"{name}.bias"], padding=padding)

    def bent(v):
        return torch.where(v > 0, v, 0.1 * v)

    x = x[None]
    for i in range(blocks):
        name = f"{part}{i}"
        inner = bent(conv(x, f"{name}.down"))
        inner = bent(conv(inner, f"{name}.conv", 1))
        x = bent(conv(inner, f"{name}.up") + conv(x, f"{name}.past"))
    return x[0]


def test_answers_are_mean_distances_of_masked_maps():
    (z, y, q), params = problem(), drawn()
    classifier = HEAD.fit(params, z, y, n_way=WAY)
    found = HEAD.logits(params, classifier, q)
    for b in range(2):
        own = {n: t[b] for n, t in params.items()}
        maps = [row.view(C, SIDE, SIDE) for row in z[b]]
        means = [
            torch.stack(
                [sent(own, m, "concentrate") for m, k in zip(maps, y[b], strict=True) if k == c]
            )
            for c in range(WAY)
        ]
        beside = torch.cat([one.mean(0) for one in means])
        mask = sent(own, beside, "project").softmax(0)
        close(mask.sum(0), torch.ones(SIDE, SIDE).double())
        close(classifier["mask"][b, 0], mask)
        support = [sent(own, m, "reshape") * mask for m in maps]
        for i, row in enumerate(q[b]):
            asked = sent(own, row.view(C, SIDE, SIDE), "reshape") * mask
            for c in range(WAY):
                apart = [(asked - s).norm() for s, k in zip(support, y[b], strict=True) if k == c]
                close(found[b, i, c], -own["scale"] * torch.stack(apart).mean())


def test_a_mask_that_is_even_scales_all_distances_alike():
    (z, y, q), params = problem(), drawn()
    for name in params:
        if name.startswith("project1"):
            params[name] = torch.zeros_like(params[name])
    found = HEAD.logits(params, HEAD.fit(params, z, y, n_way=WAY), q)
    for b in range(2):
        own = {n: t[b] for n, t in params.items()}
        support, asked = (
            torch.stack([sent(own, m.view(C, SIDE, SIDE), "reshape").flatten() for m in rows])
            for rows in (z[b], q[b])
        )
        apart = torch.cdist(asked, support) / FILTERS
        for c in range(WAY):
            expected = -own["scale"] * apart[:, y[b] == c].mean(1)
            close(found[b, :, c], expected, rtol=1e-8, atol=1e-10)


def test_equal_support_examples_are_as_good_as_one():
    params = drawn(tasks=1)
    z, q, y = randn(1, WAY, SIZE), randn(1, 4, SIZE, seed=1), torch.arange(WAY)[None]
    one = HEAD.logits(params, HEAD.fit(params, z, y, n_way=WAY), q)
    many = HEAD.fit(params, z.repeat(1, 3, 1), y.repeat(1, 3), n_way=WAY)
    close(HEAD.logits(params, many, q), one, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("part", ["support", "query"])
def test_the_mask_is_made_of_the_support_set_of_its_own_task(part):
    (z, y, q), params = problem(), drawn()
    before = HEAD.fit(params, z, y, n_way=WAY)
    other = z.clone()
    other[1] = randn(6, SIZE, seed=9)
    after = HEAD.fit(params, other, y, n_way=WAY)
    assert torch.equal(after["mask"][0], before["mask"][0])
    assert not torch.allclose(after["mask"][1], before["mask"][1])
    answers = HEAD.logits(params, before, q)
    close(HEAD.logits(params, before, q[:, :1]), answers[:, :1], rtol=0, atol=0)


def test_classes_that_a_task_lacks_are_maps_of_zeros():
    (z, _, _), params = problem(), drawn()
    y = torch.tensor([[0, 1, 0, 1, 0, 1]]).expand(2, -1)
    found = HEAD.fit(params, z, y, n_way=2)["mask"]
    for b in range(2):
        own = {n: t[b] for n, t in params.items()}
        means = [
            torch.stack([sent(own, m.view(C, SIDE, SIDE), "concentrate") for m in z[b][y[b] == c]])
            for c in range(2)
        ]
        beside = [one.mean(0) for one in means] + [torch.zeros(FILTERS, SIDE, SIDE).double()]
        close(found[b, 0], sent(own, torch.cat(beside), "project").softmax(0))
