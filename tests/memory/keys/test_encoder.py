"""Task keys: what they may depend on, what they may not, and Eq. 4 written out."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from torchemo.core.errors import ConfigError, DataError, ShapeError
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch
from torchemo.memory.keys.encoder import (
    EMBEDDERS,
    Embedder,
    KeyEncoder,
    MeanKey,
    OwnConv,
    PairEmbedder,
    SharedTrunk,
    TransformerKey,
    class_means,
)
from torchemo.memory.keys.statistics import StatisticsKey, StatisticsNetwork
from torchemo.models.conv4 import Conv4

SIZE, WAY, DIM = 16, 3, 8
LEARNER = Conv4(n_way=WAY, in_channels=3, image_size=SIZE, filters=4)


def pictures(tasks=3, shots=2, seed=0):
    x = torch.rand(tasks, WAY * shots, 3, SIZE, SIZE, generator=generator_for(seed, "x")).double()
    return Batch(x, torch.arange(WAY).repeat(tasks, shots))


def pairs(tasks=3, n=7, seed=0):
    g = generator_for(seed, "pairs")
    return Batch(
        torch.randn(tasks, n, 2, generator=g).double(),
        torch.randn(tasks, n, 1, generator=g).double(),
    )


def theta(seed=0):
    return {name: p.double() for name, p in LEARNER.init(generator_for(seed, "theta")).items()}


def embedder(name, seed=0):
    g = generator_for(seed, "embedder")
    if name == "shared":
        return SharedTrunk(LEARNER, generator=g, dim=DIM)
    if name == "pairs":
        return PairEmbedder(2, 1, generator=g, dim=DIM)
    return EMBEDDERS[name](3, SIZE, generator=g, filters=4, dim=DIM)


def transformer(name="own", seed=0, **options):
    options = {"dim": DIM, "layers": 2, "heads": 2, "ff": 16} | options
    g = generator_for(seed, "transformer")
    return TransformerKey(embedder(name, seed), generator=g, **options).double()


def build(encoder, name):
    if encoder == "statistics":
        return StatisticsKey(2, 1) if name == "pairs" else StatisticsKey(3)
    if encoder == "learned_statistics":
        sizes = (2, 1) if name == "pairs" else (3, None)
        return StatisticsNetwork(*sizes, generator=generator_for(0, "network"), dim=DIM).double()
    return transformer(name) if encoder == "transformer" else MeanKey(embedder(name)).double()


CASES = [(e, n) for e in ("transformer", "mean") for n in EMBEDDERS]
CASES += [(e, n) for e in ("statistics", "learned_statistics") for n in ("own", "pairs")]
ENCODERS = sorted({encoder for encoder, _ in CASES})
every_encoder = pytest.mark.parametrize(("encoder", "name"), CASES)


def data_for(name):
    return pairs() if name == "pairs" else pictures()


def choose(batch, order):
    return Batch(batch.x[:, order], batch.y[:, order])


# --- laws of every encoder ---------------------------------------------------------------------


@every_encoder
def test_a_key_does_not_depend_on_the_order_of_the_support_set(encoder, name):
    keys, support = build(encoder, name), data_for(name)
    order = torch.randperm(support.x.shape[1], generator=generator_for(1))
    moved = keys(choose(support, order), theta())
    assert (moved - keys(support, theta())).abs().max() < 1e-10


@every_encoder
def test_a_batch_of_tasks_gives_the_keys_of_a_loop_over_tasks(encoder, name):
    keys, support = build(encoder, name), data_for(name)
    alone = [keys(Batch(x[None], y[None]), theta()) for x, y in zip(*support, strict=True)]
    torch.testing.assert_close(keys(support, theta()), torch.cat(alone), rtol=0, atol=1e-12)


@every_encoder
def test_encoders_satisfy_the_protocol_and_tell_their_width(encoder, name):
    keys, support = build(encoder, name), data_for(name)
    assert isinstance(keys, KeyEncoder)
    assert keys(support, theta()).shape == (3, keys.dim)
    assert keys.embed(support, theta()).shape[:2] == support.x.shape[:2]


@every_encoder
def test_different_tasks_have_different_keys(encoder, name):
    keys = build(encoder, name)(data_for(name), theta())
    assert torch.cdist(keys, keys)[0, 1:].min() > 1e-6


@pytest.mark.parametrize("name", EMBEDDERS)
def test_construction_is_a_function_of_the_generator_and_leaves_the_global_one_alone(name):
    before = torch.random.get_rng_state()
    first, again, other = transformer(name), transformer(name), transformer(name, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(map(torch.equal, first.state_dict().values(), again.state_dict().values()))
    drawn = [n for n, p in first.named_parameters() if p.ndim > 1 or n == "cls"]
    assert not any(torch.equal(first.state_dict()[n], other.state_dict()[n]) for n in drawn)
    assert isinstance(first.embedder, Embedder)


def test_layers_of_the_transformer_start_different():
    layers = transformer().transformer.layers
    assert not torch.equal(layers[0].linear1.weight, layers[1].linear1.weight)


@pytest.mark.parametrize("kind", ["transformer", "mean"])
def test_unit_keys_have_length_one_and_raw_keys_point_the_same_way(kind):
    make = (
        transformer if kind == "transformer" else lambda **o: MeanKey(embedder("own"), **o).double()
    )
    unit, raw = make()(pictures()), make(unit=False)(pictures())
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(3).double(), rtol=0, atol=1e-12)
    assert (raw.norm(dim=1) - 1).abs().min() > 1e-3
    torch.testing.assert_close(F.normalize(raw), unit)


# --- Eq. 4 -------------------------------------------------------------------------------------


def norm(h, layer):
    centred = h - h.mean(-1, keepdim=True)
    spread = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return centred / spread * layer.weight + layer.bias


def written_out(encoder, tokens, heads):
    """Transformer([cls, e_1..e_n])[0] of one task, head by head and token by token."""
    h, width = torch.cat([encoder.cls[None], tokens]), encoder.dim // heads
    for layer in encoder.transformer.layers:
        z, a = norm(h, layer.norm1), layer.self_attn
        q, k, v = (
            z @ w.T + b
            for w, b in zip(a.in_proj_weight.chunk(3), a.in_proj_bias.chunk(3), strict=True)
        )
        mixed = []
        for i in range(heads):
            part = slice(i * width, (i + 1) * width)
            rows = [torch.stack([query @ key for key in k[:, part]]) for query in q[:, part]]
            mixed.append(
                torch.stack([(r / math.sqrt(width)).softmax(0) @ v[:, part] for r in rows])
            )
        h = h + torch.cat(mixed, 1) @ a.out_proj.weight.T + a.out_proj.bias
        z = norm(h, layer.norm2) @ layer.linear1.weight.T + layer.linear1.bias
        z = z * (1 + torch.erf(z / math.sqrt(2))) / 2
        h = h + z @ layer.linear2.weight.T + layer.linear2.bias
    return norm(h[0], encoder.norm)


def test_the_transformer_key_is_equation_4_written_out():
    encoder, support = transformer(unit=False), pictures()
    expected = [written_out(encoder, tokens, heads=2) for tokens in encoder.embed(support)]
    torch.testing.assert_close(encoder(support), torch.stack(expected), rtol=0, atol=1e-12)


def test_the_default_transformer_has_the_published_sizes():
    conv = OwnConv(3, 84, generator=generator_for(0))
    encoder = TransformerKey(conv, generator=generator_for(0))
    assert (encoder.dim, len(encoder.transformer.layers)) == (64, 6)
    assert encoder.transformer.layers[0].self_attn.num_heads == 4
    assert encoder.transformer.layers[0].linear1.out_features == 128


def test_a_key_is_the_same_bits_with_and_without_gradients_in_both_modes():
    encoder, support = transformer(), pictures()
    expected = encoder(support)
    encoder.eval()
    with torch.no_grad():
        assert torch.equal(encoder(support), expected)
    assert torch.equal(encoder(support), expected)


def test_the_mean_key_is_the_mean_embedding():
    encoder, support = MeanKey(embedder("own"), unit=False).double(), pictures()
    expected = sum(encoder.embedder(support).unbind(1)) / support.x.shape[1]
    torch.testing.assert_close(encoder(support), expected)


# --- labels ------------------------------------------------------------------------------------


def relabelled(support):
    return Batch(support.x, (support.y + 1) % WAY)


def test_keys_ignore_labels_unless_told_otherwise():
    support = pictures()
    assert torch.equal(transformer()(support), transformer()(relabelled(support)))


def test_with_labels_the_key_depends_on_which_class_has_which_number():
    support, encoder = pictures(), transformer(use_labels=True, n_way=WAY)
    assert (encoder(support) - encoder(relabelled(support))).norm(dim=1).min() > 1e-3
    order = torch.randperm(support.x.shape[1], generator=generator_for(1))
    assert (encoder(choose(support, order)) - encoder(support)).abs().max() < 1e-10


@pytest.mark.parametrize("use_labels", [False, True])
def test_prototypes_are_class_means_and_follow_a_relabelling(use_labels):
    support, encoder = pictures(), transformer(use_labels=use_labels, n_way=WAY)
    embedded, got = encoder.embed(support), encoder.prototypes(support, WAY)
    for b in range(3):
        for c in range(WAY):
            members = [e for e, y in zip(embedded[b], support.y[b], strict=True) if y == c]
            torch.testing.assert_close(got[b, c], sum(members) / len(members))
    moved = encoder.prototypes(relabelled(support), WAY)
    torch.testing.assert_close(moved[:, (torch.arange(WAY) + 1) % WAY], got)


def test_prototypes_refuse_a_class_without_examples():
    with pytest.raises(DataError, match=r"task 1: class 2"):
        class_means(torch.zeros(2, 3, 4), torch.tensor([[0, 1, 2], [0, 1, 1]]), n_way=3)


# --- embedders ---------------------------------------------------------------------------------


def gradients(encoder, support, params=None):
    encoder(support, params)[:, 0].sum().backward()
    return {name: p.grad for name, p in encoder.named_parameters()}


@pytest.mark.parametrize("name", ["own", "pairs"])
def test_gradient_reaches_every_weight_of_a_trained_key_network(name):
    found = gradients(transformer(name), data_for(name))
    # The key bias of attention and a conv bias before normalisation cannot change the output.
    assert all(g is not None for g in found.values())
    assert found["cls"].abs().max() > 0
    assert all(
        g.abs().max() > 0 for n, g in found.items() if n.startswith("embedder") and g.ndim > 1
    )


def test_the_shared_trunk_passes_no_gradient_into_theta():
    params = {name: p.requires_grad_() for name, p in theta().items()}
    found = gradients(transformer("shared"), pictures(), params)
    assert all(p.grad is None for p in params.values())
    assert found["embedder.linear.weight"].abs().max() > 0


def test_the_shared_trunk_is_a_linear_map_of_the_learners_features():
    shared, support, params = embedder("shared").double(), pictures(), theta()
    for b in range(3):
        one = {name: p[None] for name, p in params.items()}
        features = LEARNER.features(one, support.x[b : b + 1])[0]
        expected = features @ shared.linear.weight.T + shared.linear.bias
        torch.testing.assert_close(shared(support, params)[b], expected)


def test_the_shared_trunk_follows_theta_and_does_not_need_the_head():
    shared, support = embedder("shared").double(), pictures()
    assert not torch.equal(shared(support, theta(0)), shared(support, theta(1)))
    body = {name: p for name, p in theta().items() if name not in LEARNER.head}
    assert torch.equal(shared(support, body), shared(support, theta()))


def test_the_shared_trunk_asks_for_the_learners_parameters():
    shared = embedder("shared").double()
    with pytest.raises(ConfigError, match="got no parameters"):
        shared(pictures())
    with pytest.raises(ShapeError, match="trunk of the learner"):
        shared(pictures(), {name: p[None].expand(3, *p.shape) for name, p in theta().items()})


def test_a_frozen_random_embedder_is_an_own_one_that_cannot_be_trained():
    frozen = embedder("frozen_random")
    assert not [n for n, p in frozen.named_parameters() if p.requires_grad]
    support = Batch(pictures().x.float(), pictures().y)
    assert torch.equal(frozen(support), embedder("own")(support).detach())


def test_the_own_network_is_conv4_then_a_global_mean_then_a_linear_layer():
    own, x = embedder("own").double(), pictures().x
    weights = dict(zip(own.names, own.weights, strict=True))
    body = {name: p[None] for name, p in weights.items() if name not in own.network.head}
    flat = Conv4(n_way=DIM, in_channels=3, image_size=32, filters=4)
    big = F.interpolate(x.flatten(0, 1), 32).view(3, -1, 3, 32, 32)
    wide = OwnConv(3, 32, generator=generator_for(0), filters=4, dim=DIM).double()
    wide.load_state_dict(own.state_dict())
    maps = flat.features(body, big[:1]).view(big.shape[1], 4, 2, 2)
    weight, bias = (weights[name] for name in own.network.head)
    expected = maps.mean((2, 3)) @ weight.T + bias
    torch.testing.assert_close(wide(Batch(big[:1], torch.zeros(1, big.shape[1])))[0], expected)


def test_pairs_are_embedded_by_one_linear_map_whatever_the_shape_of_x():
    g = generator_for(3)
    x, y = torch.randn(2, 5, 2, 3, generator=g), torch.randn(2, 5, generator=g)
    pair = PairEmbedder(6, 1, generator=g, dim=DIM)
    for b in range(2):
        for i in range(5):
            z = torch.cat([x[b, i].flatten(), y[b, i].view(1)])
            expected = pair.linear.weight @ z + pair.linear.bias
            torch.testing.assert_close(pair(Batch(x, y))[b, i], expected)
    with pytest.raises(ShapeError, match="6 inputs and 1 targets, got 4 and 1"):
        pair(Batch(x[:, :, :, :2], y))


# --- statistics --------------------------------------------------------------------------------


def test_colour_statistics_are_channel_means_and_deviations():
    support = pictures(tasks=1)
    expected = [[], []]
    for channel in range(3):
        pixels = [picture[channel].flatten().tolist() for picture in support.x[0]]
        means = [sum(p) / len(p) for p in pixels]
        stds = [
            math.sqrt(sum((v - m) ** 2 for v in p) / len(p))
            for p, m in zip(pixels, means, strict=True)
        ]
        expected[0].append(sum(means) / len(means))
        expected[1].append(sum(stds) / len(stds))
    got = StatisticsKey(3)(support)[0]
    torch.testing.assert_close(got, torch.tensor(expected[0] + expected[1]).double())


def test_pair_statistics_are_means_deviations_and_covariances():
    support = pairs(tasks=1)
    z = torch.cat([support.x[0], support.y[0]], 1).numpy()
    c = np.cov(z.T, bias=True)
    expected = [*z.mean(0), *z.std(0), c[0, 1], c[0, 2], c[1, 2]]
    got = StatisticsKey(2, 1)(support)[0]
    torch.testing.assert_close(got, torch.tensor(expected).double())


def test_statistics_have_nothing_to_train():
    assert not list(StatisticsKey(3).parameters())


def naive_description(picture):
    """The numbers of `describe_pictures`, by loops over pixels."""
    c, h, w = picture.shape
    pixels = picture.numpy()
    mean = [pixels[i].mean() for i in range(c)]
    parts = [(m - 0.5) / 0.2 for m in mean]
    parts += [(pixels[i].std() - 0.25) / 0.1 for i in range(c)]
    for down, right in ((0, 1), (1, 0)):
        for i in range(c):
            steps = [
                abs(pixels[i, y + down, x + right] - pixels[i, y, x])
                for y in range(h - down)
                for x in range(w - right)
            ]
            parts.append((sum(steps) / len(steps) - 0.06) / 0.04)
    for i in range(c):
        for j in range(i + 1, c):
            together = ((pixels[i] - mean[i]) * (pixels[j] - mean[j])).mean()
            parts.append(math.copysign(math.sqrt(abs(together)), together) / 0.2)
    side = h // 4
    for i in range(c):
        for y in range(4):
            for x in range(4):
                cell = pixels[i, y * side : (y + 1) * side, x * side : (x + 1) * side]
                parts.append((cell.mean() - 0.5) / 0.25)
    return parts


def through(network, statistics):
    """Two layers and a length of one, in numpy."""
    w1, b1, w2, b2 = (p.detach().numpy() for p in network.parameters())
    key = w2 @ np.maximum(w1 @ np.array(statistics) + b1, 0) + b2
    return torch.tensor(key / np.linalg.norm(key))


def test_a_network_of_picture_statistics_equals_loops_over_pixels():
    support, network = pictures(tasks=1), build("learned_statistics", "own")
    rows = np.array([naive_description(picture) for picture in support.x[0]])
    expected = through(network, [*rows.mean(0), *rows.std(0)])
    torch.testing.assert_close(network(support)[0], expected)


def test_a_network_of_pair_statistics_equals_moments_in_numpy():
    support, network = pairs(tasks=1), build("learned_statistics", "pairs")
    z = torch.cat([support.x[0], support.y[0]], 1).numpy()
    c, d = np.cov(z.T, bias=True), z - z.mean(0)
    bends = [(d[:, i] ** power * d[:, 2]).mean() for power in (2, 3) for i in (0, 1)]
    moments = np.array([*z.mean(0), *z.std(0), c[0, 1], c[0, 2], c[1, 2], *bends])
    expected = through(network, np.sign(moments) * np.log1p(np.abs(moments)))
    torch.testing.assert_close(network(support)[0], expected)


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_support_set_that_is_not_finite_is_refused_with_its_task(encoder, bad):
    support = pictures()
    support.x[1, 2, 0, 3, 3] = bad
    with pytest.raises(DataError, match="support set of task 1"):
        build(encoder, "own")(support)


def test_targets_that_are_not_finite_are_refused_too():
    support = pairs()
    support.y[2, 0] = float("nan")
    with pytest.raises(DataError, match="support set of task 2"):
        build("mean", "pairs")(support)


def test_a_key_that_is_not_finite_is_refused_with_its_task():
    encoder, support = (
        MeanKey(PairEmbedder(2, 1, generator=generator_for(0), dim=4)).double(),
        pairs(),
    )
    torch.nn.init.zeros_(encoder.embedder.linear.bias)
    support.x[1], support.y[1] = 0, 0
    with pytest.raises(DataError, match="key of task 1"):
        encoder(support)


def test_pictures_of_another_size_or_an_empty_support_set_are_refused():
    support = pictures()
    with pytest.raises(ShapeError, match=r"3, 16, 16\], got \[1, 6, 3, 8, 8\]"):
        transformer()(Batch(support.x[..., :8, :8], support.y))
    with pytest.raises(ShapeError, match="n > 0"):
        transformer()(Batch(support.x[:, :0], support.y[:, :0]))
    with pytest.raises(ShapeError, match=r"\[B, n, 1, H, W\]"):
        StatisticsKey(1)(support)


@pytest.mark.parametrize("options", [{"dim": 10}, {"heads": 3}, {"use_labels": True}])
def test_a_key_transformer_that_does_not_fit_together_is_refused(options):
    with pytest.raises(ConfigError, match="key transformer"):
        transformer(**options)
