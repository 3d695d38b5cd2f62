"""The last blocks of a pretrained network: where it is cut, what trains, and what that computes."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.models.oracles import derivatives
from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.core.losses import cross_entropy
from torchemo.core.rng import generator_for
from torchemo.core.tree import expand
from torchemo.core.types import TaskShape
from torchemo.models import build_model, frozen_network
from torchemo.models.pretrained.blocks import Settled, cut
from torchemo.models.pretrained.network import FrozenNetwork
from torchemo.runs.run import train
from torchemo.runs.sharing.export import export

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 3, 16, 16), dtype=np.uint8)


def layered():
    """Return a network as torchvision builds them: layers below it, pooling, and a vector at the end."""
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2.0)
            nn.init.normal_(layer.weight, 1.0, 0.3)
    return net.eval()


def halves(last, *, trains="scales"):
    return cut(FrozenNetwork("layered", layered(), 16), last, 5, trains=trains)


@pytest.mark.parametrize("trains", ["scales", "all"])
@pytest.mark.parametrize("last", [1, 2, 3])
def test_both_parts_together_are_the_network(last, trains):
    front, blocks = halves(last, trains=trains)
    maps = torch.from_numpy(front(IMAGES))
    found = blocks.features(expand(blocks.init(generator_for(0)), 2), maps.expand(2, -1, -1))
    with torch.no_grad():
        expected = layered()(torch.from_numpy(IMAGES).float() / 255)
    torch.testing.assert_close(found[1], expected, atol=1e-6, rtol=1e-5)


def test_lite0_is_cut_before_its_last_blocks():
    def part(**options):
        return Part("efficientnet-lite0", {"size": 32, **options})

    images = np.random.default_rng(1).integers(0, 256, (2, 3, 32, 32), dtype=np.uint8)
    whole, front = frozen_network(part()), frozen_network(part(last_blocks=2))
    maps = torch.from_numpy(front(images))
    blocks = build_model(part(last_blocks=2), TaskShape("classification", maps.shape[1:], 5))
    theta = blocks.init(generator_for(0))
    found = blocks.features(expand(theta, 1), maps[None])[0]
    torch.testing.assert_close(found, torch.from_numpy(whole(images)), atol=1e-4, rtol=1e-4)
    # 1 152 + 1 152 + 320 channels of the last block, 1 280 after it, each with a scale and a shift.
    assert sum(p.numel() for n, p in theta.items() if n not in blocks.head) == 2 * 3904
    assert front.described() != whole.described()


def test_what_trains_is_scales_and_shifts_or_everything():
    def names(trains):
        _, blocks = halves(2, trains=trains)
        assert blocks.norm == () == blocks.buffers
        return {n.rpartition(".")[2]: p.shape for n, p in blocks.init(generator_for(0)).items()}, (
            len(blocks.init(generator_for(0)))
        )

    assert names("scales") == ({"weight": (5, 6), "bias": (5,)}, 4)
    assert names("all")[1] == 6  # and a convolution's weight and bias


def test_the_head_is_drawn_and_the_blocks_are_not():
    _, blocks = halves(1)
    one, two = (blocks.init(generator_for(seed)) for seed in (0, 1))
    assert [n for n in one if not torch.equal(one[n], two[n])] == ["head.weight"]


def test_stored_statistics_give_the_derivatives_of_batchnorm_in_evaluation():
    layer = layered()[1][1].double()
    mine = Settled(layer)
    x = torch.rand(3, 6, 4, 4, generator=generator_for(2), dtype=torch.float64)
    y = torch.tensor([0, 1, 2])
    draw = generator_for(5)
    given = {n: p.detach().clone().requires_grad_() for n, p in mine.named_parameters()}
    ways = {n: torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in given.items()}
    ours, theirs = (
        derivatives(
            lambda p, net=net: cross_entropy(
                torch.func.functional_call(net, p, (x,)).pow(2).mean((2, 3))[None], y[None]
            ).sum(),
            given,
            ways,
        )
        for net in (mine, layer)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


class Skips(nn.Module):
    """A network whose layers are not one after the other."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return (self.b(self.a(x)) + x).mean((2, 3))


@pytest.mark.parametrize(
    ("module", "last", "message"),
    [
        (Skips(), 1, "where the blocks of 'net' begin"),
        (layered(), 4, "should be at most 3"),
    ],
)
def test_networks_that_cannot_be_cut_there_are_refused(module, last, message):
    with pytest.raises(ConfigError, match=message):
        cut(FrozenNetwork("net", module, 16), last, 5, trains="scales")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"last_blocks": -1}, "0 or more, got -1"),
        ({"last_blocks": 1, "adapter": "residual"}, "has no adapter"),
        ({"blocks_train": "some"}, "blocks_train"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        frozen_network(Part("efficientnet-lite0", options))


@pytest.mark.parametrize("learner", ["maml", "anil", "protonet"])
def test_a_run_trains_them_and_answers_images_one_by_one(tmp_path, monkeypatch, learner):
    monkeypatch.setenv("TORCHEMO_CACHE", str(tmp_path / "cache"))
    name = "tests.models.pretrained.test_blocks:layered"
    run = train(
        learner, data="procedural", out=tmp_path / "run", size=16, steps=2,
        options={
            "model.name": name, "model.size": 16, "model.last_blocks": 1, "train.tasks": 1,
            "train.validation_tasks": 2, "model.adapter": "layers", "data.n_way": 3,
            "data.classes_per_family": 20,
        },
    )  # fmt: skip
    folder = tmp_path / "mine"
    for number, pixels in enumerate(IMAGES):
        (folder / f"class {number}").mkdir(parents=True)
        Image.fromarray(pixels.transpose(1, 2, 0)).save(folder / f"class {number}" / "image.png")
    fitted = run.adapt(folder)
    queries = tmp_path / "queries"
    queries.mkdir()
    for number, pixels in enumerate(IMAGES):
        Image.fromarray(pixels.transpose(2, 1, 0)).save(queries / f"{number}.png")
    together = fitted.predict(queries).predictions
    for one in together:
        alone = fitted.predict(queries / one.file).predictions[0]
        np.testing.assert_allclose(alone.probabilities, one.probabilities, atol=1e-5)
    network = export(fitted, tmp_path / "classifier.onnx")
    assert network.difference < 1e-4
