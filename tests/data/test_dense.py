"""Base classes: their numbers, and batches of images labelled by them."""

import numpy as np
import pytest
import torch

from tests.data.test_episodes import make_index
from torchemo.config.run import DataConfig, StreamSpec
from torchemo.core.errors import ConfigError
from torchemo.data.dense import base_count, sample_batches
from torchemo.data.episodes import EpisodeSpec
from torchemo.data.index import ClassIndex, merge
from torchemo.data.source import PictureTasks, open_source

_PARTS = merge(
    [
        make_index([2, 2], domain="test birds", split="test"),
        make_index([3, 4, 5], domain="birds"),
        make_index([4, 4], domain="more birds", split="val"),
        make_index([6, 3], domain="fungi"),
    ]
)
INDEX = ClassIndex(
    np.random.default_rng(0).integers(0, 256, _PARTS.images.shape, np.uint8),
    _PARTS.label,
    _PARTS.class_names,
    _PARTS.class_split,
    _PARTS.class_domain,
)
"""No two images are alike."""
IMAGES = 3 + 4 + 5 + 6 + 3
ALL = {"seed": 0, "start": 0, "count": 1}


def ids_of(x):
    """Return which images these are; every image of the index is another one."""
    pixels = (x.reshape(-1, *INDEX.shape) * 255).round().byte().numpy()
    return [int(np.flatnonzero((INDEX.images == p).all((1, 2, 3)))[0]) for p in pixels]


def test_a_batch_of_all_images_has_each_once_with_the_number_of_its_class():
    batch = sample_batches(INDEX, size=IMAGES, **ALL)
    assert batch.x.shape == (1, IMAGES, *INDEX.shape)
    found = ids_of(batch.x)
    assert len(set(found)) == IMAGES
    train = INDEX.classes(split="train").tolist()
    assert [train[y] for y in batch.y[0]] == [int(INDEX.label[i]) for i in found]
    assert base_count(INDEX, rotations=False) == len(train) == 5


def test_batches_are_a_function_of_their_number_and_reach_into_the_next_epoch():
    whole = sample_batches(INDEX, seed=3, start=0, count=6, size=8)
    for i in range(6):
        one = sample_batches(INDEX, seed=3, start=i, count=1, size=8)
        assert torch.equal(one.x[0], whole.x[i])
        assert torch.equal(one.y[0], whole.y[i])
    other = sample_batches(INDEX, seed=4, start=0, count=6, size=8)
    assert not torch.equal(other.y, whole.y)
    found = ids_of(whole.x)
    first, second = found[:IMAGES], found[IMAGES : 2 * IMAGES]
    assert sorted(first) == sorted(second)
    assert first != second


def test_turned_images_belong_to_further_classes():
    plain = sample_batches(INDEX, size=IMAGES, **ALL)
    turned = sample_batches(INDEX, size=IMAGES, rotations=True, **ALL)
    quarters = torch.div(turned.y[0], 5, rounding_mode="floor")
    assert torch.equal(turned.y[0] % 5, plain.y[0])
    assert set(quarters.tolist()) == {0, 1, 2, 3}
    for upright, image, quarter in zip(plain.x[0], turned.x[0], quarters.tolist(), strict=True):
        assert torch.equal(torch.rot90(upright, quarter, (1, 2)), image)
    assert base_count(INDEX, rotations=True) == 20


@pytest.mark.parametrize("rotations", [False, True])
def test_training_tasks_alone_tell_base_classes(rotations):
    tasks = PictureTasks(INDEX, EpisodeSpec(2, 1, 1, rotations))
    episode = tasks.sample("train", seed=0, start=0, count=20)
    assert episode.base.examples is None
    assert episode.base.labels.max() < tasks.shape.base_classes == (20 if rotations else 5)
    classes, turns = episode.classes % 9, episode.classes // 9
    expected = torch.searchsorted(torch.from_numpy(INDEX.classes(split="train")), classes)
    assert torch.equal(episode.base.labels, expected + 5 * turns)
    for split in ("val", "test"):
        assert tasks.sample(split, seed=0, start=0, count=2).base is None


def test_a_stream_of_training_tasks_tells_them_too():
    data = DataConfig(image_size=16, classes_per_family=25, n_way=2, stream=StreamSpec(pool=3))
    stream = open_source(data)
    drawn = stream.sample("train", seed=0, start=0, count=4)
    train = torch.from_numpy(stream.source.index.classes(split="train"))
    assert torch.equal(train[drawn.base.labels], drawn.classes)
    assert stream.sample("test", seed=0, start=0, count=1).base is None


def test_impossible_batches_are_refused():
    with pytest.raises(ConfigError, match="hold an image or more"):
        sample_batches(INDEX, size=0, **ALL)
