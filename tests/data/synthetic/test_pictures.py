"""The synthetic set: reproducible, four different worlds, neither trivial nor impossible."""

import time

import numpy as np
import pytest
import torch

from torchemo.core.errors import ConfigError
from torchemo.data.episodes import EpisodeSpec, sample_episodes
from torchemo.data.synthetic.families import WORLDS
from torchemo.data.synthetic.pictures import procedural


@pytest.fixture(scope="module")
def drawn():
    begin = time.process_time()
    index = procedural()
    return index, time.process_time() - begin


def test_the_default_set_is_drawn_in_little_time(drawn):
    index, seconds = drawn
    assert (len(index), index.shape) == (6000, (3, 32, 32))
    assert seconds < 3


def test_every_family_is_a_domain_named_synthetic_and_split_by_class(drawn):
    index, _ = drawn
    assert index.domains == tuple(WORLDS)
    for row in index.summary():
        assert row.domain.startswith("synthetic-")
        assert row.classes == {"train": 38, "val": 10, "test": 12}
        assert (row.smallest, row.largest) == (25, 25)


def test_pictures_do_not_depend_on_how_many_are_drawn():
    many = procedural(image_size=16, classes_per_family=6, images_per_class=4)
    few = procedural(image_size=16, classes_per_family=3, images_per_class=2)
    for c, name in enumerate(few.class_names):
        expected = many.images[many.images_of(many.class_names.index(name))[:2]]
        assert np.array_equal(few.images[few.images_of(c)], expected)


def test_pictures_do_not_depend_on_the_size_of_the_drawing_steps(monkeypatch):
    whole = procedural(image_size=16, classes_per_family=3, images_per_class=3)
    monkeypatch.setattr("torchemo.data.synthetic.pictures._CHUNK_PIXELS", 16 * 16 * 2)
    assert procedural(image_size=16, classes_per_family=3, images_per_class=3).fingerprint() == (
        whole.fingerprint()
    )


def test_another_seed_gives_other_pictures_and_the_same_seed_the_same():
    def draw(seed):
        return procedural(image_size=8, classes_per_family=9, images_per_class=2, seed=seed)

    one, again, other = draw(3), draw(3), draw(4)
    assert one.fingerprint() == again.fingerprint()
    assert (one.images != other.images).mean() > 0.9
    assert one.class_split != other.class_split


@pytest.mark.parametrize("size", [8, 28, 84])
def test_the_same_scene_is_drawn_at_any_size(size):
    index = procedural(image_size=size, classes_per_family=2, images_per_class=3)
    fine = procedural(image_size=4 * size, classes_per_family=2, images_per_class=3)
    assert index.shape == (3, size, size)
    shrunk = fine.images.reshape(24, 3, size, 4, size, 4).mean((3, 5))
    for a, b in zip(index.images.astype(float), shrunk, strict=True):
        assert np.corrcoef(a.ravel(), b.ravel())[0, 1] > 0.6


def test_all_pictures_differ_and_none_is_flat(drawn):
    index, _ = drawn
    assert len({image.tobytes() for image in index.images}) == len(index)
    assert index.images.reshape(len(index), -1).std(1).min() > 2


def draw_tasks(index, *, domain, n_shot, count):
    spec = EpisodeSpec(5, n_shot, 5)
    return sample_episodes(index, spec, seed=0, split="train", start=0, count=count, domain=domain)


def nearest_mean(episode, features):
    """Five-way accuracy of the nearest class mean."""
    support, query = features(episode.support.x), features(episode.query.x)
    means = torch.zeros(len(support), 5, support.shape[2])
    means.scatter_add_(1, episode.support.y[..., None].expand_as(support), support)
    guess = torch.cdist(query, means * 5 / support.shape[1]).argmin(2)
    return float((guess == episode.query.y).float().mean())


@pytest.mark.parametrize("domain", WORLDS)
def test_one_picture_per_class_helps_but_raw_pixels_and_mean_colours_do_not_solve_it(drawn, domain):
    index, _ = drawn
    one_shot = draw_tasks(index, domain=domain, n_shot=1, count=300)
    pixels = nearest_mean(one_shot, lambda x: x.flatten(2))
    assert 0.25 < pixels < 0.45
    assert nearest_mean(one_shot, lambda x: x.mean((3, 4))) < 0.35
    five_shot = draw_tasks(index, domain=domain, n_shot=5, count=100)
    assert nearest_mean(five_shot, lambda x: x.flatten(2)) > pixels + 0.03


def test_the_worlds_can_be_told_apart_by_simple_statistics(drawn):
    index, _ = drawn
    images = torch.from_numpy(np.array(index.images)).float().div(255)
    detail = images.diff(dim=3).abs().mean((2, 3))
    features = torch.cat([images.mean((2, 3)), images.std((2, 3)), detail], 1)
    features = (features - features.mean(0)) / features.std(0)
    world = torch.from_numpy(index.domain_of_class[index.label])
    held_out = torch.arange(len(index)) % 2 == 0
    means = torch.stack([features[(world == w) & ~held_out].mean(0) for w in range(4)])
    guess = torch.cdist(features[held_out], means).argmin(1)
    assert (guess == world[held_out]).float().mean() > 0.6


@pytest.mark.parametrize(
    "wrong", [{"image_size": 7}, {"classes_per_family": 0}, {"images_per_class": 0}]
)
def test_an_empty_set_is_refused(wrong):
    with pytest.raises(ConfigError, match="synthetic set needs"):
        procedural(**wrong)
