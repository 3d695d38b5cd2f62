"""A network without its head."""

import torch

from torchemo.core.tree import expand
from torchemo.core.types import Model
from torchemo.models import Conv4
from torchemo.models.trunk import Trunk

NETWORK = Conv4(3, in_channels=1, image_size=16, filters=2, bn="running")


def test_it_answers_with_features_and_has_no_head():
    trunk, x = Trunk(NETWORK), torch.rand(2, 4, 1, 16, 16)
    whole = NETWORK.init(torch.Generator().manual_seed(0))
    params = trunk.init(torch.Generator().manual_seed(0))
    assert isinstance(trunk, Model)
    assert whole.keys() - params.keys() == set(NETWORK.head)
    assert all(torch.equal(p, whole[name]) for name, p in params.items())
    assert (trunk.head, trunk.norm, trunk.buffers) == ((), NETWORK.norm, NETWORK.buffers)
    expected = NETWORK.features(expand(whole, 2), x)
    assert torch.equal(trunk(expand(params, 2), x), expected)
    assert torch.equal(trunk.classify(params, expected), expected)


def test_it_normalises_as_the_network_does_at_a_step():
    x, found, expected = torch.rand(2, 4, 1, 16, 16), {}, {}
    params = expand(NETWORK.init(torch.Generator().manual_seed(0)), 2)
    Trunk(NETWORK).at(1, sink=found)(params, x)
    NETWORK.at(1, sink=expected).features(params, x)
    assert found.keys() == set(NETWORK.buffers)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    stored = Trunk(NETWORK).at(0, stored=True)
    torch.testing.assert_close(stored(params, x)[:, :1], stored(params, x[:, :1]))
