"""Test classes that a network was trained on are refused by name, and accepted where a person says so."""

from types import SimpleNamespace

import numpy as np
import pytest

from torchemo.core.errors import DataError
from torchemo.data.episodes import EpisodeSpec
from torchemo.data.index import ClassIndex
from torchemo.data.seen_classes import refuse_seen_classes
from torchemo.data.source import PictureTasks


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
