"""Pretrained networks from packages, files and functions; stand-ins where a package is not installed."""

import sys
import types

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError, DataError
from torchemo.core.types import TaskShape
from torchemo.models import build_model, frozen_network, is_pretrained
from torchemo.models.pretrained.network import FrozenNetwork

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 3, 8, 8), dtype=np.uint8)


class Small(nn.Module):
    """Maps, BatchNorm, mean, and a linear head with two outputs."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.bn(self.conv(x)).mean((2, 3)))

    def reset_classifier(self, outputs):
        assert outputs == 0
        self.fc = nn.Identity()


def trained():
    torch.manual_seed(1)
    net = Small()
    net.bn.running_mean.normal_()
    net.bn.running_var.uniform_(0.5, 2.0)
    return net.eval()


def by_hand(net, mean, std):
    """Features of IMAGES, written with numpy's normalisation and torch's layers."""
    x = (IMAGES / 255.0 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    with torch.no_grad():
        return net.bn(net.conv(torch.tensor(x).float())).mean((2, 3)).numpy()


@pytest.fixture
def weights(tmp_path):
    torch.save(trained().state_dict(), tmp_path / "net.pth")
    return str(tmp_path / "net.pth")


def stand_in_timm(monkeypatch):
    timm, data = types.ModuleType("timm"), types.ModuleType("timm.data")
    timm.create_model = lambda name, pretrained: {("small", False): Small}[name, pretrained]()
    told = {"input_size": (3, 8, 8), "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    data.resolve_model_data_config = lambda module: told
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "timm.data", data)


def stand_in_torchvision(monkeypatch):
    vision = types.ModuleType("torchvision")
    told = types.SimpleNamespace(crop_size=[8], mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
    default = types.SimpleNamespace(DEFAULT=types.SimpleNamespace(transforms=lambda: told))
    vision.models = types.SimpleNamespace(
        get_model=lambda name, weights: Small(), get_model_weights=lambda name: default
    )
    monkeypatch.setitem(sys.modules, "torchvision", vision)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_libraries_bring_size_and_normalisation(monkeypatch, weights, library):
    {"timm": stand_in_timm, "torchvision": stand_in_torchvision}[library](monkeypatch)
    network = frozen_network(Part(f"{library}:small", {"weights": weights}))
    assert network.size == 8
    expected = by_hand(trained(), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    np.testing.assert_allclose(network(IMAGES), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_libraries_need_a_file_of_weights(monkeypatch, library):
    {"timm": stand_in_timm, "torchvision": stand_in_torchvision}[library](monkeypatch)
    with pytest.raises(ConfigError, match=r"needs its weights in a file(?s:.*)model\.weights"):
        frozen_network(Part(f"{library}:small"))


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"needs the package timm(?s:.*)pip install timm"):
        frozen_network(Part("timm:small", {"weights": "x.pth"}))


@pytest.fixture
def nets(tmp_path, monkeypatch):
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\n"
        "def small(): return nn.Sequential(nn.AvgPool2d(4), nn.Flatten())\n"
        "def maps(): return nn.AvgPool2d(4)\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_nets"
    sys.modules.pop("my_nets", None)


def test_a_function_of_yours(nets):
    network = frozen_network(Part(f"{nets}:small", {"size": 8}))
    means = IMAGES.reshape(5, 3, 2, 4, 2, 4).mean((3, 5)).reshape(5, 12) / 255
    np.testing.assert_allclose(network(IMAGES), means, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("my_nets:nothing", {"size": 8}, "cannot be called"),
        ("no_such_module:net", {"size": 8}, "cannot be called"),
        ("my_nets:number", {"size": 8}, "cannot be called"),
        ("my_nets:small", {}, r"does not say the side(?s:.*)model\.size"),
    ],
)
def test_functions_that_do_not_fit_are_refused(nets, name, options, message):
    with pytest.raises(ConfigError, match=message):
        frozen_network(Part(name, options))


def test_features_must_be_vectors(nets):
    with pytest.raises(ConfigError, match=r"should return features \[n, d\] for 5 images"):
        frozen_network(Part(f"{nets}:maps", {"size": 8}))(IMAGES)


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_weights_are_data_never_code(tmp_path, monkeypatch, capsys):
    stand_in_timm(monkeypatch)
    torch.save({"fc.weight": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(DataError, match="cannot be loaded as the weights"):
        frozen_network(Part("timm:small", {"weights": str(tmp_path / "evil.pth")}))
    assert "executed" not in capsys.readouterr().out


def test_weights_from_safetensors_and_of_another_network(tmp_path, monkeypatch, weights):
    stand_in_timm(monkeypatch)
    save_file(trained().state_dict(), tmp_path / "net.safetensors")
    one, other = (
        frozen_network(Part("timm:small", {"weights": str(file)}))
        for file in (weights, tmp_path / "net.safetensors")
    )
    assert one.digest == other.digest
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "other.pth")
    with pytest.raises(DataError, match="cannot be loaded as the weights"):
        frozen_network(Part("timm:small", {"weights": str(tmp_path / "other.pth")}))
    with pytest.raises(DataError, match="there is no such file of weights"):
        frozen_network(Part("timm:small", {"weights": "nowhere.pth"}))


def test_an_image_has_the_same_features_in_any_company():
    network = FrozenNetwork(
        "small", trained(), 8, features=lambda net, x: net.bn(net.conv(x)).mean((2, 3))
    )
    alone = np.concatenate([network(image[None]) for image in IMAGES])
    np.testing.assert_allclose(network(IMAGES), alone, rtol=1e-5, atol=1e-6)


def test_the_digest_is_that_of_weights_statistics_and_normalisation():
    def digest(change=lambda net: None, **others):
        net = trained()
        with torch.no_grad():
            change(net)
        return FrozenNetwork("small", net, 8, **others).digest

    digests = [
        digest(),
        digest(lambda net: net.conv.weight[0].add_(1e-6)),
        digest(lambda net: net.bn.running_mean.add_(0.1)),
        digest(mean=(1.0, 0.0, 0.0)),
    ]
    assert digest() == digests[0]
    assert len(set(digests)) == 4


def test_which_names_are_pretrained():
    assert [is_pretrained(n) for n in ("efficientnet-lite0", "timm:x", "conv4")] == [
        True,
        True,
        False,
    ]
    assert frozen_network(Part("conv4")) is None


def test_what_trains_is_an_adapter_and_a_head():
    tasks = TaskShape("classification", (12,), 5)
    model = build_model(Part("efficientnet-lite0", {"hidden": (7,)}), tasks)
    assert {n: tuple(p.shape) for n, p in model.init(torch.Generator()).items()} == {
        "layer1.weight": (7, 12), "layer1.bias": (7,), "head.weight": (5, 7), "head.bias": (5,),
    }  # fmt: skip
    with pytest.raises(ConfigError, match="needs images or features of images"):
        build_model(Part("efficientnet-lite0"), TaskShape("regression", (1,), 1))


@pytest.mark.slow
def test_lite0_gives_the_features_behind_its_own_logits():
    package = pytest.importorskip(
        "efficientnet_lite_pytorch", reason="needs the extra 'pretrained'"
    )
    network = frozen_network(Part("efficientnet-lite0", {"size": 64}))
    images = np.random.default_rng(1).integers(0, 256, (2, 3, 64, 64), dtype=np.uint8)
    found = torch.from_numpy(network(images))
    assert found.shape == (2, 1280)
    assert isinstance(network.module, package.EfficientNet)
    with torch.no_grad():
        expected = network.module((torch.from_numpy(images).float() - 127) / 128)
        torch.testing.assert_close(network.module._fc(found), expected, rtol=1e-4, atol=1e-4)
