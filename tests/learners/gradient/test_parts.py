"""Embeddings, auto-encoders, clusters and gates against torch's own modules and naive loops."""

import pytest
import torch
import torch.nn.functional as F

from torchemo.core.types import Batch
from torchemo.learners.gradient.parts import (
    Gates,
    ImageEmbedding,
    MeanAutoencoder,
    PointEmbedding,
    SequenceAutoencoder,
    soft_assignment,
    soft_clusters,
)
from torchemo.learners.gradient.parts.embedding import response_norm
from torchemo.learners.gradient.parts.initial import weight
from torchemo.learners.learner import scoped, within


def generator():
    return torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, generator=generator(), dtype=torch.float64)


def doubled(part):
    return {name: t.double() for name, t in part.init(generator()).items()}


def test_response_norm_is_that_of_torch():
    x = 5 * randn(2, 12, 3, 4)
    theirs = F.local_response_norm(x, 9, alpha=0.001, beta=0.75, k=1.0)
    torch.testing.assert_close(response_norm(x), theirs, rtol=1e-12, atol=1e-14)


def same_pool(x):
    """Max-pooling 3x3 by 2 with "same" padding, spelled out for squares."""
    side = x.shape[-1]
    total = (-(-side // 2) - 1) * 2 + 3 - side
    pads = (total // 2, total - total // 2) * 2
    return F.max_pool2d(F.pad(x, pads, value=-torch.inf), 3, 2)


@pytest.mark.parametrize("side", [10, 11, 13])
def test_images_are_embedded_layer_by_layer_as_published(side):
    part = ImageEmbedding(3, side, side, dim=4, filters=12, hidden=6)
    p = doubled(part)
    x = 3 * randn(2, 5, 3, side, side)
    h = same_pool(F.relu(F.conv2d(x.flatten(0, 1), p["conv1.weight"], padding=2)))
    h = F.local_response_norm(h, 9, alpha=0.001, beta=0.75, k=1.0)
    h = F.relu(F.conv2d(h, p["conv2.weight"], padding=2))
    h = same_pool(F.local_response_norm(h, 9, alpha=0.001, beta=0.75, k=1.0)).flatten(1)
    h = F.relu(h @ p["linear1.weight"].T + p["linear1.bias"])
    h = F.relu(h @ p["linear2.weight"].T + p["linear2.bias"])
    ours = part(p, Batch(x, torch.zeros(2, 5, dtype=torch.int64)))
    torch.testing.assert_close(ours.flatten(0, 1), h, rtol=1e-12, atol=1e-14)
    assert h.abs().sum() > 0


def test_the_published_embedding_has_about_five_and_a_half_million_weights():
    sizes = {n: t.numel() for n, t in ImageEmbedding(3, 84, 84).init(generator()).items()}
    assert sizes["linear1.weight"] == 14_112 * 384
    assert 5.4e6 < sum(sizes.values()) < 5.6e6


def test_points_are_read_with_their_targets_and_labels_are_not():
    part, x, y = PointEmbedding(2, 1, dim=3), randn(2, 4, 2), randn(2, 4, 1)
    p = doubled(part)
    pairs = torch.cat([x, y], -1)
    expected = pairs @ p["weight"].T + p["bias"]
    torch.testing.assert_close(part(p, Batch(x, y)), expected, rtol=1e-12, atol=1e-14)
    blind = PointEmbedding(2, None, dim=3)
    q = doubled(blind)
    labels = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
    assert torch.equal(blind(q, Batch(x, labels)), blind(q, Batch(x, labels.flip(1))))


def torch_cell(params, inside, dim):
    cell = torch.nn.GRUCell(inside, dim).double()
    cell.weight_ih.data, cell.weight_hh.data = params["input"], params["state"]
    cell.bias_ih.data, cell.bias_hh.data = params["bias"], torch.zeros_like(params["bias"])
    return cell


def test_the_sequence_autoencoder_is_two_cells_of_torch():
    inside, dim, n = 3, 4, 5
    part = SequenceAutoencoder(inside, dim)
    p, x = doubled(part), randn(2, n, inside)
    encoder = torch_cell(scoped(p, "encoder/"), inside, dim)
    decoder = torch_cell(scoped(p, "decoder/"), inside, dim)
    for b in range(2):
        state, outputs = torch.zeros(1, dim).double(), []
        for i in range(n):
            state = encoder(x[b : b + 1, i], state)
            outputs.append(state)
        code = torch.cat(outputs).mean(0)
        written, error = torch.zeros(1, inside).double(), 0.0
        for i in reversed(range(n)):  # it writes the sequence backwards
            state = decoder(written, state)
            written = state @ p["out/weight"].T + p["out/bias"]
            error += float((written[0] - x[b, i]).detach().square().sum()) / (n * inside)
        ours, losses = part(p, x)
        torch.testing.assert_close(ours[b], code.detach(), rtol=1e-12, atol=1e-14)
        assert float(losses[b]) == pytest.approx(error, rel=1e-12)


def test_the_mean_autoencoder_does_not_see_the_order_and_the_sequence_one_does():
    x = randn(2, 5, 3)
    for part, same in ((MeanAutoencoder(3, 4), True), (SequenceAutoencoder(3, 4), False)):
        p = doubled(part)
        (a, la), (b, lb) = part(p, x), part(p, x.flip(1))
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14) == same
        assert torch.allclose(la, lb, rtol=1e-12, atol=1e-14) == same


def test_a_mean_autoencoder_that_copies_has_no_loss():
    part = MeanAutoencoder(2, 2, hidden=2)
    eye, zero = torch.eye(2).double(), torch.zeros(2).double()
    layers = ("encode1", "encode2", "decode1", "decode2", "pooled")
    p = {f"{n}/{k}": v for n in layers for k, v in (("weight", eye), ("bias", zero))}
    x = randn(3, 4, 2).abs()
    code, losses = part(p, x)
    assert torch.equal(losses, torch.zeros(3).double())
    torch.testing.assert_close(code, x.mean(1))


def test_soft_assignments_are_the_softmax_of_distances_and_sum_to_one():
    v, h = randn(2, 3, 4), randn(5, 4)
    found = soft_assignment(v, h, width=2.0)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 3).double())
    for b in range(2):
        for i in range(3):
            e = torch.tensor([torch.exp(-(v[b, i] - h[g]).square().sum() / 4) for g in range(5)])
            torch.testing.assert_close(found[b, i], (e / e.sum()).double(), rtol=1e-6, atol=1e-8)


def test_soft_clusters_lose_nothing():
    params = {"weight": randn(2, 3), "bias": randn(2)}
    v = randn(2, 6, 3)
    found = soft_clusters(params, v)
    assert found.shape == (2, 2, 3)
    torch.testing.assert_close(found.sum(1), v.sum(1))


def test_gates_are_sigmoids_in_the_shapes_of_the_tensors():
    gates = Gates(2, {"w": torch.Size((3, 2)), "b": torch.Size((3,))})
    p, code = doubled(gates), randn(2, 2)
    found = gates(p, code)
    assert {name: gate.shape for name, gate in found.items()} == {"w": (2, 3, 2), "b": (2, 3)}
    for name, gate in found.items():
        eta = 1 / (1 + torch.exp(-(code @ p[f"{name}.weight"].T + p[f"{name}.bias"])))
        torch.testing.assert_close(gate.flatten(1), eta, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("draw", "low", "high"), [("glorot", 0.0, 0.11), ("tf", 0.8, 0.95)])
def test_the_two_draws_differ_in_width(draw, low, high):
    deviation = float(weight((128, 128), generator(), draw=draw).std())
    assert low < deviation < high


def test_scopes_are_put_on_and_taken_off():
    inner = {"w": torch.ones(1)}
    assert scoped(within("a/", inner), "a/") == inner
    assert scoped(within("a/", inner), "b/") == {}
