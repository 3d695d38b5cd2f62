"""Tasks that come back: pure visits, laws of return, and examples that are not repeated."""

from collections import Counter

import numpy as np
import pytest
import torch

from torchemo.config.run import DataConfig, StreamSpec
from torchemo.core.errors import ConfigError, DataError
from torchemo.core.task_axis import join, take
from torchemo.data.episodes import EpisodeSpec
from torchemo.data.index import ClassIndex
from torchemo.data.source import PictureTasks, open_source
from torchemo.data.streams import ONCE, StreamTasks

IMAGES = 12


@pytest.fixture
def tasks():
    """Return a source whose images say their class (channel 0) and their number (channel 1)."""
    label = np.repeat(np.arange(30), IMAGES)
    images = np.zeros((len(label), 3, 2, 2), np.uint8)
    images[:, 0] = label[:, None, None]
    images[:, 1] = np.tile(np.arange(IMAGES), 30)[:, None, None]
    names = [f"c{c}" for c in range(30)]
    splits = ["train"] * 15 + ["test"] * 15
    index = ClassIndex(images, label, names, splits, ["a"] * 8 + ["b"] * 7 + ["a"] * 8 + ["b"] * 7)
    return PictureTasks(index, EpisodeSpec(n_way=3, n_shot=2, n_query=4))


def stream(tasks, **spec):
    return StreamTasks(tasks, StreamSpec(**{"pool": 4, **spec}))


def pictured(batch):
    """Read (class, image) of every example."""
    return (batch.x[..., :2, 0, 0] * 255).round().long()


def test_a_visit_does_not_depend_on_how_it_is_asked_for(tasks):
    spec = {"once": 0.3, "labels": "shuffled", "exchanged": 2}
    whole = stream(tasks, **spec).sample("test", seed=3, start=0, count=40)
    other = stream(tasks, **spec)
    late = other.sample("test", seed=3, start=33, count=7)
    first = join([other.sample("test", seed=3, start=i, count=1) for i in range(33)])
    for part, expected in ((late, take(whole, slice(33, 40))), (first, take(whole, slice(0, 33)))):
        assert torch.equal(part.support.x, expected.support.x)
        assert torch.equal(part.query.x, expected.query.x)
        for name in ("classes", "task", "visit", "index", "domain"):
            assert torch.equal(getattr(part, name), getattr(expected, name))
    again = stream(tasks, **spec).sample("test", seed=4, start=0, count=40)
    assert not torch.equal(again.task, whole.task)


def test_a_task_comes_back_with_its_classes_and_labels_and_is_counted(tasks):
    episode = stream(tasks, once=0.25).sample("test", seed=0, start=0, count=60)
    seen, classes = Counter(), {}
    for task, visit, own in zip(
        episode.task.tolist(), episode.visit.tolist(), episode.classes.tolist(), strict=True
    ):
        if task == ONCE:
            assert visit == 0
            continue
        assert visit == seen[task]
        assert classes.setdefault(task, own) == own
        seen[task] += 1
    assert set(seen) == {0, 1, 2, 3}
    assert 5 <= (episode.task == ONCE).sum() <= 25
    shown = pictured(episode.support)[..., 0]
    assert torch.equal(shown, episode.classes.gather(1, episode.support.y))
    assert bool((episode.classes >= 15).all())  # test classes, counted in all of the data


def test_support_examples_are_not_repeated_until_a_class_runs_out(tasks):
    """12 images, 2 shots: six are kept for queries, so a class lasts for three visits."""
    episode = stream(tasks).sample("test", seed=0, start=0, count=30)
    used, queries = {}, {}
    for support, query in zip(pictured(episode.support), pictured(episode.query), strict=True):
        for c, image in support.tolist():
            used.setdefault(c, []).append(image)
        for c, image in query.tolist():
            queries.setdefault(c, set()).add(image)
    assert used
    for c, images in used.items():
        assert len(set(images[:6])) == min(6, len(images))
        assert sorted(images[6:8]) == sorted(images[:2])[: len(images[6:8])]
        assert not set(images) & queries[c]


def test_queries_of_a_task_stay_the_same(tasks):
    episode = stream(tasks, labels="shuffled").sample("test", seed=0, start=0, count=30)
    first = {}
    for task, query in zip(episode.task.tolist(), pictured(episode.query), strict=True):
        found = {tuple(one) for one in query.tolist()}
        assert first.setdefault(task, found) == found


def test_more_queries_leave_support_sets_as_they_are(tasks):
    few = stream(tasks).sample("test", seed=0, start=0, count=9, n_query=1)
    many = stream(tasks).sample("test", seed=0, start=0, count=9, n_query=6)
    assert torch.equal(few.support.x, many.support.x)


def test_shuffled_labels_and_exchanged_classes(tasks):
    shuffled = stream(tasks, labels="shuffled").sample("test", seed=0, start=0, count=40)
    orders = {
        tuple(c) for t, c in zip(shuffled.task, shuffled.classes.tolist(), strict=True) if t == 0
    }
    assert len(orders) > 2
    assert len({frozenset(order) for order in orders}) == 1
    exchanged = stream(tasks, exchanged=1).sample("test", seed=0, start=0, count=40)
    own = exchanged.classes[exchanged.task == 0]
    assert len(own) > 3
    for later in own[1:]:
        assert len(set(later.tolist()) & set(own[0].tolist())) == 2


@pytest.mark.parametrize(
    ("law", "expected"),
    [("uniform", [0.25] * 4), ("zipf", [0.48, 0.24, 0.16, 0.12]), ("rounds", [0.25] * 4)],
)
def test_how_often_tasks_come_back(tasks, law, expected):
    visits = stream(tasks, law=law).visits("test", seed=0, start=0, count=2000)
    shares = np.bincount([v.task for v in visits], minlength=4) / 2000
    assert np.abs(shares - expected).max() < 0.04


def test_rounds_bursts_and_drift_visit_a_few_tasks_at_a_time(tasks):
    rounds = stream(tasks, law="rounds", once=0.5).visits("test", seed=0, start=0, count=60)
    recurring = [v.task for v in rounds if v.task != ONCE]
    assert recurring == [i % 4 for i in range(len(recurring))]
    for law in ("bursts", "drift"):
        spec = {"pool": 50, "law": law, "active": 3, "span": 20}
        visits = stream(tasks, **spec).visits("test", seed=0, start=0, count=200)
        sets = [{v.task for v in visits[i : i + 20]} for i in range(0, 200, 20)]
        assert all(len(one) <= 3 for one in sets)
        if law == "drift":
            assert sets[4] <= {4, 5, 6}
        else:
            assert len(set.union(*sets)) > 12


def test_the_same_function_comes_back_with_new_points():
    config = DataConfig(source=("regression:sine",), n_shot=5, stream=StreamSpec(pool=2, once=0.2))
    episode = open_source(config).sample("test", seed=0, start=0, count=30)
    own = (episode.task == 0).nonzero().flatten()
    assert len(own) > 3
    for later in own[1:]:
        assert torch.equal(episode.query.x[later], episode.query.x[own[0]])
        assert torch.equal(episode.query.y[later], episode.query.y[own[0]])
        assert not torch.equal(episode.support.x[later], episode.support.x[own[0]])
    once = (episode.task == ONCE).nonzero().flatten()
    assert len({tuple(y.flatten().tolist()) for y in episode.query.y[once]}) == len(once)


def test_the_points_of_all_visits_lie_on_one_function():
    config = DataConfig(source=("regression:line",), n_shot=5, stream=StreamSpec(pool=1))
    episode = open_source(config).sample("test", seed=0, start=0, count=4)
    x, y = (
        episode.support.x.double().flatten().numpy(),
        episode.support.y.double().flatten().numpy(),
    )
    slope, offset = np.polyfit(x, y, 1)
    assert np.abs(slope * x + offset - y).max() < 1e-5


def test_what_cannot_be_drawn_is_refused(tasks):
    with pytest.raises(DataError, match="need 9"):
        stream(tasks, exchanged=6).sample("test", seed=0, start=0, count=1)
    with pytest.raises(ConfigError, match=r"data\.stream\.pool"):
        StreamTasks(tasks, StreamSpec())
    with pytest.raises(ConfigError, match=r"data\.stream\.once"):
        StreamSpec(pool=1, once=2)
    config = DataConfig(source=("regression:line",), stream=StreamSpec(pool=2, labels="shuffled"))
    with pytest.raises(ConfigError, match="classes"):
        open_source(config).sample("test", seed=0, start=0, count=1)


def test_a_stream_has_a_fingerprint_of_its_own(tasks):
    assert stream(tasks).fingerprint != tasks.fingerprint
    assert stream(tasks).fingerprint != stream(tasks, pool=5).fingerprint
    assert stream(tasks).fingerprint == stream(tasks).fingerprint
