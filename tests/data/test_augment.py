"""Augmentation: what may happen to an image, and that seed and number alone decide it."""

from dataclasses import replace

import pytest
import torch

from tests.data.test_dense import INDEX
from torchemo.config.run import AugmentSpec, DataConfig, StreamSpec
from torchemo.core.errors import ConfigError
from torchemo.data.augment import augmented
from torchemo.data.episodes import EpisodeSpec
from torchemo.data.source import PictureTasks, open_source

ALL = AugmentSpec(crop=1, flip=True, jitter=0.4, erase=0.5)
X = torch.rand(40, 3, 6, 8, generator=torch.Generator().manual_seed(0))


def drawn(spec, x=X, seed=0):
    return augmented(x, spec, generator=torch.Generator().manual_seed(seed))


def test_a_crop_is_a_window_of_the_padded_image():
    found = drawn(AugmentSpec(crop=2))
    padded = torch.nn.functional.pad(X, (2, 2, 2, 2))
    places = set()
    for image, whole in zip(found, padded, strict=True):
        windows = [
            (i, j)
            for i in range(5)
            for j in range(5)
            if torch.equal(whole[:, i : i + 6, j : j + 8], image)
        ]
        assert len(windows) == 1
        places.update(windows)
    assert {i for i, _ in places} == {j for _, j in places} == set(range(5))


def test_about_half_of_the_images_are_mirrored():
    found = drawn(AugmentSpec(flip=True))
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(found, X, strict=True)]
    same = [torch.equal(a, b) for a, b in zip(found, X, strict=True)]
    assert all(a != b for a, b in zip(mirrored, same, strict=True))
    assert 8 < sum(mirrored) < 32


def test_colours_follow_three_factors():
    x = 0.3 + 0.3 * X[:1]  # far from black and white, so that nothing is cut off
    g = torch.Generator().manual_seed(3)
    found = augmented(x, AugmentSpec(jitter=0.2), generator=g)
    bright, contrast, full = 1 + 0.2 * (
        2 * torch.rand(3, generator=torch.Generator().manual_seed(3)) - 1
    )

    def grey(v):
        return 0.299 * v[:, 0] + 0.587 * v[:, 1] + 0.114 * v[:, 2]

    x = bright * x
    x = contrast * x + (1 - contrast) * grey(x).mean()
    x = full * x + (1 - full) * grey(x)[:, None]
    torch.testing.assert_close(found, x)
    assert drawn(AugmentSpec(jitter=1.0)).min() >= 0
    assert drawn(AugmentSpec(jitter=1.0)).max() <= 1


def test_a_rectangle_takes_the_mean_colour():
    found = drawn(AugmentSpec(erase=1.0), x=torch.rand(200, 3, 20, 20))
    assert torch.equal(drawn(AugmentSpec(erase=0.0)), X)
    x = torch.rand(200, 3, 20, 20, generator=torch.Generator().manual_seed(1))
    found = drawn(AugmentSpec(erase=1.0), x=x)
    sizes = []
    for image, before in zip(found, x, strict=True):
        rows, columns = (image != before).any(0).nonzero(as_tuple=True)
        inside = image[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        mean = before.mean((1, 2))[:, None, None]
        torch.testing.assert_close(inside, mean.expand_as(inside))
        sizes.append(inside[0].numel() / 400)
    assert min(sizes) > 0.01
    assert max(sizes) < 0.45
    assert sum(sizes) / len(sizes) == pytest.approx(0.21, abs=0.03)


def test_training_images_alone_change_and_each_by_its_own_number():
    tasks = PictureTasks(INDEX, EpisodeSpec(2, 1, 1), augment=ALL)
    plain = replace(tasks, augment=AugmentSpec())
    whole = tasks.sample("train", seed=0, start=0, count=4)
    bare = plain.sample("train", seed=0, start=0, count=4)
    assert not torch.equal(whole.support.x, bare.support.x)
    assert torch.equal(whole.support.y, bare.support.y)
    for i in range(4):
        one = tasks.sample("train", seed=0, start=i, count=1)
        assert torch.equal(one.support.x[0], whole.support.x[i])
        assert torch.equal(one.query.x[0], whole.query.x[i])
    more = tasks.sample("train", seed=0, start=0, count=4, n_query=2)
    assert torch.equal(more.support.x, whole.support.x)
    for split in ("val", "test"):
        ours, theirs = (t.sample(split, seed=0, start=0, count=2) for t in (tasks, plain))
        assert torch.equal(ours.support.x, theirs.support.x)
        assert torch.equal(ours.query.x, theirs.query.x)
    batches = tasks.batches(seed=0, start=0, count=3, size=5)
    alone = tasks.batches(seed=0, start=2, count=1, size=5)
    assert torch.equal(alone.x[0], batches.x[2])
    assert not torch.equal(batches.x, plain.batches(seed=0, start=0, count=3, size=5).x)


def test_training_tasks_may_have_sizes_of_their_own():
    data = DataConfig(image_size=16, classes_per_family=25, n_way=2, n_query=2)
    source = open_source(replace(data, train_way=5, train_shot=3))
    train, test = (source.sample(s, seed=0, start=0, count=2) for s in ("train", "test"))
    assert (train.support.y.shape, train.query.y.shape) == ((2, 15), (2, 10))
    assert (test.support.y.shape, test.query.y.shape) == ((2, 2), (2, 4))
    assert train.base.labels.shape == (2, 5)
    assert (source.shape.n_out, source.shape.n_shot) == (2, 1)


@pytest.mark.parametrize("own", [{"augment": ALL}, {"train_way": 4}, {"train_shot": 2}])
def test_tasks_that_come_back_are_as_their_stream_has_them(own):
    data = DataConfig(image_size=16, classes_per_family=25, n_way=2, stream=StreamSpec(pool=3))
    with pytest.raises(ConfigError, match=r"sizes of data\.stream alone"):
        open_source(replace(data, **own))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"crop": -1}, "crop should be 0"),
        ({"jitter": 1.5}, "jitter should be"),
        ({"erase": -0.1}, "erase"),
    ],
)
def test_impossible_options_are_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        AugmentSpec(**wrong)
