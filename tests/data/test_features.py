"""Features computed once: equal to the direct pass, resumed, checked, found again by content."""

import json
import shutil

import numpy as np
import pytest

from torchemo.config.run import DataConfig
from torchemo.core.errors import DataError
from torchemo.data.episodes import EpisodeSpec, sample_episodes
from torchemo.data.features import AT_ONCE, cached_features, digest_of, pack_features
from torchemo.data.load import find, load
from torchemo.data.packed import made_by, open_packed
from torchemo.data.source import open_source
from torchemo.data.splits import Proportions

CLASSES, EACH = 6, 12


class Network:
    """Features by plain numpy: means over rows, in a fixed random basis."""

    def __init__(self, seed=0, fail_at=None):
        self.size, self.seen, self.fail_at = 10, 0, fail_at
        self.basis = np.random.default_rng(seed).normal(size=(30, 7))
        self.seed = seed

    def described(self):
        return {"name": "stand-in", "digest": str(self.seed), "size": self.size}

    def __call__(self, images):
        self.seen += len(images)
        if self.fail_at is not None and self.seen > self.fail_at:
            raise KeyboardInterrupt
        return (images.mean(3).reshape(len(images), -1) / 255 @ self.basis).astype(np.float32)


@pytest.fixture
def images(tree, picture):
    files = {
        f"class{c}/{i:02}.png": picture(EACH * c + i, size=10)
        for c in range(CLASSES)
        for i in range(EACH)
    }
    return tree(files, name="images")


def direct(images, network=None):
    return (network or Network())(load(images, image_size=10, channels=3).images)


def test_packed_features_equal_the_direct_pass(images, tmp_path):
    report = pack_features(find(images), tmp_path / "packed", Network())
    index, plain = open_packed(tmp_path / "packed"), load(images)
    assert (report.images, report.classes) == (CLASSES * EACH, CLASSES)
    np.testing.assert_allclose(index.images, direct(images), rtol=1e-6)
    assert index.images.dtype == np.float32
    for field in ("class_names", "class_split", "class_domain"):
        assert getattr(index, field) == getattr(plain, field)
    assert made_by(tmp_path / "packed") == Network().described()


def test_tasks_hold_the_features_unscaled(images, tmp_path):
    pack_features(find(images), tmp_path / "packed", Network())
    index, spec = load(tmp_path / "packed", image_size=84), EpisodeSpec(2, 1, 3)
    tasks = sample_episodes(index, spec, seed=0, split="train", start=0, count=3)
    assert tasks.support.x.shape == (3, 2, 7)
    rows = {row.tobytes() for row in direct(images)}
    assert all(row.tobytes() in rows for row in tasks.query.x.reshape(-1, 7).numpy())
    with pytest.raises(DataError, match="features cannot be turned"):
        sample_episodes(
            index, EpisodeSpec(2, 1, 3, rotations=True), seed=0, split="train", start=0, count=1
        )


def test_an_interrupted_computation_continues(images, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        pack_features(find(images), tmp_path / "packed", Network(fail_at=AT_ONCE))
    assert not (tmp_path / "packed").exists()
    network, told = Network(), []
    pack_features(find(images), tmp_path / "packed", network, progress=lambda *at: told.append(at))
    assert network.seen == CLASSES * EACH - AT_ONCE
    assert told[-1] == (CLASSES * EACH, CLASSES * EACH)
    np.testing.assert_allclose(open_packed(tmp_path / "packed").images, direct(images), rtol=1e-6)
    assert [path.name for path in tmp_path.glob(".partial*")] == []


def interrupted(images, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        pack_features(find(images), tmp_path / "packed", Network(fail_at=AT_ONCE))
    return tmp_path / ".partial-packed"


def damage(folder):
    content = bytearray((folder / "features.npy").read_bytes())
    content[-1] ^= 1
    (folder / "features.npy").write_bytes(content)


@pytest.mark.parametrize("harm", ["rows", "note", "lost"])
def test_what_was_damaged_meanwhile_is_computed_again(images, tmp_path, harm):
    folder = interrupted(images, tmp_path)
    if harm == "rows":
        damage(folder)
    elif harm == "note":
        (folder / "done.json").write_text('{"seen": 3')
    else:
        (folder / "features.npy").unlink()
    network = Network()
    pack_features(find(images), tmp_path / "packed", network)
    assert network.seen == CLASSES * EACH
    np.testing.assert_allclose(open_packed(tmp_path / "packed").images, direct(images), rtol=1e-6)


def test_another_network_does_not_continue(images, tmp_path):
    interrupted(images, tmp_path)
    network = Network(seed=1)
    pack_features(find(images), tmp_path / "packed", network)
    assert network.seen == CLASSES * EACH
    np.testing.assert_allclose(
        open_packed(tmp_path / "packed").images, direct(images, Network(seed=1)), rtol=1e-6
    )


def test_rows_after_the_last_note_are_dropped(images, tmp_path):
    folder = interrupted(images, tmp_path)
    with (folder / "features.npy").open("ab") as stream:
        stream.write(b"half a row")
    pack_features(find(images), tmp_path / "packed", Network())
    np.testing.assert_allclose(open_packed(tmp_path / "packed").images, direct(images), rtol=1e-6)


def test_a_damaged_set_is_refused(images, tmp_path):
    pack_features(find(images), tmp_path / "packed", Network())
    damage(tmp_path / "packed")
    with pytest.raises(DataError, match=r"features\.npy: is damaged, its checksum does not fit"):
        load(tmp_path / "packed")


def test_bad_images_are_refused_or_left_out(images, tmp_path):
    (images / "class1" / "00.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"00\.png"):
        pack_features(find(images), tmp_path / "packed", Network())
    report = pack_features(find(images), tmp_path / "packed", Network(), skip_bad=True)
    assert report.images == CLASSES * EACH - 1
    assert [bad.name.endswith("00.png") for bad in report.skipped] == [True]
    packed = open_packed(tmp_path / "packed")
    counts = dict(zip(packed.class_names, packed.counts.tolist(), strict=True))
    assert counts == {f"class{c}": EACH - (c == 1) for c in range(CLASSES)}


def test_the_cache_is_keyed_by_images_and_network(images, tmp_path):
    cache, first = tmp_path / "cache", Network()
    index = cached_features(find(images), first, cache)
    np.testing.assert_allclose(index.images, direct(images), rtol=1e-6)
    again = Network()
    moved = shutil.copytree(images, tmp_path / "elsewhere")
    cached_features(find(moved, domain="images"), again, cache)
    assert (first.seen, again.seen) == (CLASSES * EACH, 0)
    for network in (Network(seed=1), Network(seed=2)):
        cached_features(find(images), network, cache)
        assert network.seen == CLASSES * EACH
    (moved / "class0" / "00.png").write_bytes((moved / "class0" / "01.png").read_bytes())
    assert digest_of(find(moved)) != digest_of(find(images))


def test_other_splits_keep_their_features(images, tmp_path):
    cache, network = tmp_path / "cache", Network()
    cached_features(find(images), network, cache)
    listing = find(images, splits=Proportions(2, 2, 2))
    index = cached_features(listing, network, cache)
    assert network.seen == CLASSES * EACH
    assert sorted(index.class_split) == ["test"] * 2 + ["train"] * 2 + ["val"] * 2


def test_a_packed_set_takes_other_splits(images, tmp_path):
    pack_features(find(images), tmp_path / "packed", Network())
    index = load(tmp_path / "packed", splits=Proportions(2, 2, 2))
    assert sorted(index.class_split) == ["test"] * 2 + ["train"] * 2 + ["val"] * 2
    assert index.holds_features


def test_a_source_opens_features_of_its_own_network_only(images, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHEMO_CACHE", str(tmp_path / "cache"))
    pack_features(find(images), tmp_path / "packed", Network())
    config = {"n_way": 2, "n_query": 3}
    for path in (images, tmp_path / "packed"):
        data = DataConfig(source=(str(path),), **config)
        source = open_source(data, needed=("train",), network=Network())
        assert source.shape.x == (7,)
        assert len(source.index) == CLASSES * EACH
    with pytest.raises(DataError, match=r"made with the weights '0', the run's network has '1'"):
        open_source(data, needed=("train",), network=Network(seed=1))


def test_features_that_are_not_finite_are_refused(images, tmp_path):
    network = Network()
    network.basis[0, 0] = np.nan
    with pytest.raises(DataError, match="not finite"):
        pack_features(find(images), tmp_path / "packed", network)


def test_the_index_says_who_made_it(images, tmp_path):
    pack_features(find(images), tmp_path / "packed", Network())
    said = json.loads((tmp_path / "packed" / "index.json").read_text())
    assert said["version"] == 2
    assert said["network"] == {"name": "stand-in", "digest": "0", "size": 10}
    assert said["data"] == digest_of(find(images))
