"""sample_episodes: what a task is made of, and that (seed, split, number) alone decide it."""

import collections
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchemo.core.errors import ConfigError, DataError
from torchemo.data.episodes import EpisodeSpec, check_fits, gather, sample_episodes, sample_ids
from torchemo.data.index import ClassIndex, merge

SPEC = EpisodeSpec(n_way=5, n_shot=2, n_query=3)


def make_index(counts, *, domain="birds", split="train", size=4, channels=1):
    """Every image is unique: its first two pixels spell its number."""
    total = sum(counts)
    images = np.random.default_rng(0).integers(0, 256, (total, channels, size, size), np.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = np.divmod(np.arange(total), 256)
    label = np.repeat(np.arange(len(counts)), counts)
    mixed = np.random.default_rng(1).permutation(total)
    return ClassIndex(
        images,
        label[mixed],
        [f"{domain}{c}" for c in range(len(counts))],
        [split] * len(counts),
        [domain] * len(counts),
    )


INDEX = merge([make_index([9, 6, 7, 5, 30, 8, 5]), make_index([5] * 6, domain="fungi")])


def draw(index=INDEX, spec=SPEC, *, seed=0, split="train", start=0, count=50, domain=None):
    return sample_ids(index, spec, seed=seed, split=split, start=start, count=count, domain=domain)


def test_every_task_is_n_way_k_shot_with_disjoint_support_and_query():
    ids = draw()
    for b in range(50):
        support, query = ids.support[b].tolist(), ids.query[b].tolist()
        assert len(set(support) | set(query)) == 5 * (2 + 3)
        assert collections.Counter(ids.support_y[b].tolist()) == dict.fromkeys(range(5), 2)
        assert collections.Counter(ids.query_y[b].tolist()) == dict.fromkeys(range(5), 3)


def test_every_picture_belongs_to_the_class_behind_its_label_and_a_task_stays_in_one_domain():
    ids = draw()
    for b in range(50):
        classes = ids.classes[b].tolist()
        pairs = [*zip(ids.support[b].tolist(), ids.support_y[b].tolist(), strict=True)]
        pairs += zip(ids.query[b].tolist(), ids.query_y[b].tolist(), strict=True)
        for image, y in pairs:
            assert INDEX.label[image] == classes[y]
        assert {INDEX.domain_of_class[c] for c in classes} == {int(ids.domain[b])}
    assert ids.number.tolist() == list(range(50))


@given(
    seed=st.integers(0, 2**40),
    number=st.integers(0, 10**9),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    split=st.sampled_from(["train", "test"]),
)
@settings(max_examples=40, deadline=None)
def test_an_episode_is_the_same_in_any_batch(seed, number, before, after, split):
    index = merge([make_index([6] * 6, domain="a"), make_index([6] * 6, domain="b", split="test")])
    before = min(before, number)
    alone = draw(index, seed=seed, split=split, start=number, count=1)
    batch = draw(index, seed=seed, split=split, start=number - before, count=before + 1 + after)
    for one, many in zip(alone, batch, strict=True):
        assert torch.equal(one[0], many[before])


def test_the_stream_of_tasks_is_pinned():
    """Published runs name their tasks by (seed, split, number): this must never change."""
    ids = sample_ids(INDEX, EpisodeSpec(3, 1, 1), seed=7, split="train", start=11, count=2)
    assert ids.classes.tolist() == [[8, 9, 12], [12, 8, 11]]
    assert ids.query.tolist() == [[87, 89, 75], [83, 75, 72]]


def test_seed_split_and_number_each_change_the_task():
    train = make_index([8] * 12)
    both = merge([train, make_index([8] * 12, domain="other", split="test")])
    base = draw(both, count=1)
    for other in (
        draw(both, count=1, seed=1),
        draw(both, count=1, start=1),
    ):
        assert not torch.equal(base.query, other.query)
    test = draw(both, count=1, split="test")
    # The two halves hold classes in the same order: equal draws would differ by the offset alone.
    assert not torch.equal(base.classes + 12, test.classes)


def test_the_support_set_does_not_depend_on_the_number_of_queries():
    few, many = draw(spec=EpisodeSpec(5, 2, 1)), draw(spec=EpisodeSpec(5, 2, 3))
    assert torch.equal(few.support, many.support)
    assert torch.equal(few.support_y, many.support_y)


def test_domains_classes_labels_places_and_images_are_drawn_uniformly():
    index = merge([make_index([4] * 6, domain="a"), make_index([4] * 3, domain="b")])
    ids = draw(index, EpisodeSpec(2, 1, 1), count=3000)
    assert abs((ids.domain == 0).float().mean() - 1 / 2) < 0.03
    in_a = ids.domain == 0
    first = torch.bincount(ids.classes[in_a, 0], minlength=9)[:6] / in_a.sum()
    assert (first - 1 / 6).abs().max() < 0.03
    pictures = torch.bincount(ids.support[in_a].flatten(), minlength=36)[:24]
    assert (pictures / pictures.sum() - 1 / 24).abs().max() < 0.01
    assert abs((ids.support_y[:, 0] == 0).float().mean() - 1 / 2) < 0.03
    assert abs((ids.query_y[:, 1] == 0).float().mean() - 1 / 2) < 0.03


def test_pixels_are_the_stored_ones_scaled_to_one():
    ids, episode = (
        draw(count=3),
        sample_episodes(INDEX, SPEC, seed=0, split="train", start=0, count=3),
    )
    assert episode.support.x.shape == (3, 10, 1, 4, 4)
    assert episode.query.x.shape == (3, 15, 1, 4, 4)
    for images, batch in ((ids.support, episode.support), (ids.query, episode.query)):
        assert batch.x.dtype == torch.float32
        for b in range(3):
            for i, image in enumerate(images[b].tolist()):
                expected = [[p / 255 for p in row] for row in INDEX.images[image, 0].tolist()]
                assert torch.equal(batch.x[b, i, 0], torch.tensor(expected))
    assert torch.equal(episode.support.y, ids.support_y)
    assert torch.equal(episode.domain, ids.domain)
    assert torch.equal(episode.index, ids.number)


def test_a_memory_mapped_set_gives_the_same_pixels(tmp_path):
    np.save(tmp_path / "images.npy", INDEX.images)
    mapped = ClassIndex(
        np.load(tmp_path / "images.npy", mmap_mode="r"),
        INDEX.label,
        INDEX.class_names,
        INDEX.class_split,
        INDEX.class_domain,
    )
    ids = draw(count=2)
    assert torch.equal(gather(mapped, ids).query.x, gather(INDEX, ids).query.x)


def test_with_rotations_each_class_of_a_task_has_one_turn_and_all_four_occur():
    spec = EpisodeSpec(5, 2, 3, rotations=True)
    straight, turned = draw(count=8), draw(spec=spec, count=8)
    assert torch.equal(straight.query, turned.query)
    assert not straight.turns.any()
    assert set(turned.turns.flatten().tolist()) == {0, 1, 2, 3}
    before, after = gather(INDEX, straight), gather(INDEX, turned)
    for b in range(8):
        for plain, rotated in ((before.support, after.support), (before.query, after.query)):
            for i, y in enumerate(plain.y[b].tolist()):
                picture = plain.x[b, i, 0].tolist()
                for _ in range(int(turned.turns[b, y])):
                    picture = [list(row) for row in zip(*picture, strict=True)][::-1]
                assert rotated.x[b, i, 0].tolist() == picture


def test_drawing_from_one_domain_stays_there_and_keeps_its_number():
    ids = draw(domain="fungi")
    assert ids.domain.tolist() == [1] * 50
    assert set(ids.classes.flatten().tolist()) == set(range(7, 13))


def test_a_domain_without_classes_in_the_split_is_never_drawn():
    index = merge([make_index([5] * 5), make_index([5] * 5, domain="held out", split="test")])
    assert draw(index).domain.tolist() == [0] * 50
    assert draw(index, split="test").domain.tolist() == [1] * 50


@pytest.mark.parametrize(
    ("index", "arguments", "message"),
    [
        (
            make_index([20, 4, 20, 20, 20]),
            {"spec": EpisodeSpec(5, 5, 15)},
            "class 'birds1' has 4 images; 5-shot \\+ 15 query needs 20.\n"
            "Lower n_query \\(data.n_query of a run\\), or leave the class out",
        ),
        (
            merge([make_index([9] * 5), make_index([9] * 4, domain="fungi")]),
            {},
            "domain 'fungi' has 4 classes in split 'train'; 5-way needs 5",
        ),
        (make_index([5, 5, 5, 5, 4]), {}, "class 'birds4' has 4 images"),
        (make_index([9] * 5), {"split": "val"}, "no class has split 'val'"),
        (
            merge([make_index([9] * 5), make_index([9] * 5, domain="x", split="test")]),
            {"split": "test", "domain": "birds"},
            "no class of domain 'birds' has split 'test'",
        ),
        (make_index([9] * 5), {"split": "dev"}, "no split 'dev'"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name_before_drawing(index, arguments, message):
    with pytest.raises(DataError, match=message):
        draw(index, **arguments)


def test_pictures_that_are_not_square_cannot_be_turned():
    wide = ClassIndex(
        np.zeros((25, 1, 4, 6), np.uint8),
        np.arange(25) % 5,
        list("abcde"),
        ["train"] * 5,
        ["d"] * 5,
    )
    check_fits(wide, SPEC, split="train")
    with pytest.raises(DataError, match="4x6 pixels"):
        check_fits(wide, EpisodeSpec(5, 2, 3, rotations=True), split="train")


@pytest.mark.parametrize("field", ["n_way", "n_shot", "n_query"])
def test_a_task_of_an_impossible_shape_is_refused(field):
    with pytest.raises(ConfigError, match=f"{field} should be at least"):
        EpisodeSpec(**{field: 0})
    with pytest.raises(ConfigError, match="n_way should be at least 2"):
        EpisodeSpec(n_way=1)


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, 0)])
def test_episode_numbers_begin_at_zero(start, count):
    with pytest.raises(ConfigError, match="counted from 0"):
        draw(start=start, count=count)


def test_four_tasks_of_84_pixels_take_little_time():
    index = make_index([20] * 50, size=84, channels=3)
    spec = EpisodeSpec(5, 1, 15)
    times = []
    for i in range(5):
        begin = time.perf_counter()
        sample_episodes(index, spec, seed=0, split="train", start=4 * i, count=4)
        times.append(time.perf_counter() - begin)
    # 5 ms on an idle core; the bound leaves room for a busy machine and for checked types.
    assert min(times) < 0.05
