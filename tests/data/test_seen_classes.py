"""Test classes that a network was trained on are refused by name, and accepted where a person says so."""

from types import SimpleNamespace

import numpy as np
import pytest

from torchemo.config.registry import Part
from torchemo.config.run import DataConfig, RunConfig
from torchemo.core.errors import DataError
from torchemo.data.episodes import EpisodeSpec
from torchemo.data.index import ClassIndex
from torchemo.data.seen_classes import refuse_seen_classes
from torchemo.data.source import PictureTasks
from torchemo.runs import experiment


def tasks(train="robin", test="wren", domain="birds"):
    names, label = [train, test, "heron"], np.arange(6) // 2
    images, splits = np.zeros((6, 3, 8, 8), np.uint8), ["train", "test", "test"]
    index = ClassIndex(images, label, names, splits, [domain] * 3)
    return PictureTasks(index, EpisodeSpec(2, 1, 1))


def refused(source, trained_on="ImageNet"):
    try:
        refuse_seen_classes(source, network="net", trained_on=trained_on, split="test")
    except DataError as error:
        return error
    return None


def test_a_test_class_of_imagenet_is_refused_by_name_with_the_way_out():
    error = refused(tasks(test="n01532829"))
    assert "birds: its test class 'n01532829' is one of ImageNet, on which net was" in str(error)
    assert "--allow-leak" in str(error)


@pytest.mark.parametrize("domain", ["miniimagenet84", "tieredImageNet", "mini-imagenet"])
def test_the_sets_made_of_it_are_known_by_their_names_too(domain):
    assert refused(tasks(domain=domain)) is not None


def test_other_classes_networks_and_splits_pass():
    assert refused(tasks()) is None
    assert refused(tasks(train="n01532829")) is None
    assert refused(tasks(test="n01532829"), trained_on=None) is None
    assert refused(SimpleNamespace(source=None)) is None


def test_a_stream_of_such_tasks_is_refused():
    assert refused(SimpleNamespace(source=tasks(test="n01532829"))) is not None


class Averages:
    """A stand-in for a network that was trained on ImageNet."""

    name, trained_on, size = "net", "ImageNet", 8

    def described(self):
        return {"name": self.name, "size": self.size}

    def __call__(self, images):
        return images.mean((2, 3)).astype(np.float32)


def test_a_run_refuses_them_unless_it_or_the_call_allows_them(tree, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHEMO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(experiment, "frozen_network", lambda part: Averages())
    splits = {"train": ("wren", "heron"), "val": ("owl", "hawk"), "test": ("n01532829", "tit")}
    names = [(split, name) for split, both in splits.items() for name in both]
    files = {f"{s}/{n}/{i}.png": 3 * c + i for c, (s, n) in enumerate(names) for i in range(3)}
    data = DataConfig(source=(str(tree(files)),), n_way=2, n_query=1)
    config = RunConfig(data=data, model=Part("efficientnet-lite0"))
    with pytest.raises(DataError, match="n01532829"):
        experiment.open_tasks(config)
    assert experiment.open_tasks(config, needed=("train", "val")).domains
    assert experiment.open_tasks(config, allow_leak=True).domains
    allowed = RunConfig(data=data, model=Part("efficientnet-lite0", {"allow_leak": True}))
    assert experiment.open_tasks(allowed).domains
