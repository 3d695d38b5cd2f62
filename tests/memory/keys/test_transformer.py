"""Keys of embedded examples: Eq. 4 written out, unit keys, labels, and prototypes."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.memory.keys.cases import EMBEDDERS, WAY, choose, embedder, images, transformer
from torchemo.core.errors import ConfigError, ShapeError
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch
from torchemo.memory.keys.embedders import OwnConv
from torchemo.memory.keys.encoder import Embedder
from torchemo.memory.keys.transformer import MeanKey, TransformerKey


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
    unit, raw = make()(images()), make(unit=False)(images())
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
    encoder, support = transformer(unit=False), images()
    expected = [written_out(encoder, tokens, heads=2) for tokens in encoder.embed(support)]
    torch.testing.assert_close(encoder(support), torch.stack(expected), rtol=0, atol=1e-12)


def test_the_default_transformer_has_the_published_sizes():
    conv = OwnConv(3, 84, generator=generator_for(0))
    encoder = TransformerKey(conv, generator=generator_for(0))
    assert (encoder.dim, len(encoder.transformer.layers)) == (64, 6)
    assert encoder.transformer.layers[0].self_attn.num_heads == 4
    assert encoder.transformer.layers[0].linear1.out_features == 128


def test_a_key_is_the_same_bits_with_and_without_gradients_in_both_modes():
    encoder, support = transformer(), images()
    expected = encoder(support)
    encoder.eval()
    with torch.no_grad():
        assert torch.equal(encoder(support), expected)
    assert torch.equal(encoder(support), expected)


def test_the_mean_key_is_the_mean_embedding():
    encoder, support = MeanKey(embedder("own"), unit=False).double(), images()
    expected = sum(encoder.embedder(support).unbind(1)) / support.x.shape[1]
    torch.testing.assert_close(encoder(support), expected)


# --- labels ------------------------------------------------------------------------------------


def relabelled(support):
    return Batch(support.x, (support.y + 1) % WAY)


def test_keys_ignore_labels_unless_told_otherwise():
    support = images()
    assert torch.equal(transformer()(support), transformer()(relabelled(support)))


def test_with_labels_the_key_depends_on_which_class_has_which_number():
    support, encoder = images(), transformer(use_labels=True, n_way=WAY)
    assert (encoder(support) - encoder(relabelled(support))).norm(dim=1).min() > 1e-3
    order = torch.randperm(support.x.shape[1], generator=generator_for(1))
    assert (encoder(choose(support, order)) - encoder(support)).abs().max() < 1e-10


@pytest.mark.parametrize("use_labels", [False, True])
def test_prototypes_are_class_means_and_follow_a_relabelling(use_labels):
    support, encoder = images(), transformer(use_labels=use_labels, n_way=WAY)
    embedded, got = encoder.embed(support), encoder.prototypes(support, WAY)
    for b in range(3):
        for c in range(WAY):
            members = [e for e, y in zip(embedded[b], support.y[b], strict=True) if y == c]
            torch.testing.assert_close(got[b, c], sum(members) / len(members))
    moved = encoder.prototypes(relabelled(support), WAY)
    torch.testing.assert_close(moved[:, (torch.arange(WAY) + 1) % WAY], got)


# --- refusals ----------------------------------------------------------------------------------


def test_images_of_another_size_or_an_empty_support_set_are_refused():
    support = images()
    with pytest.raises(ShapeError, match=r"3, 16, 16\], got \[1, 6, 3, 8, 8\]"):
        transformer()(Batch(support.x[..., :8, :8], support.y))
    with pytest.raises(ShapeError, match="n > 0"):
        transformer()(Batch(support.x[:, :0], support.y[:, :0]))


@pytest.mark.parametrize("options", [{"dim": 10}, {"heads": 3}, {"use_labels": True}])
def test_a_key_transformer_that_does_not_fit_together_is_refused(options):
    with pytest.raises(ConfigError, match="key transformer"):
        transformer(**options)
