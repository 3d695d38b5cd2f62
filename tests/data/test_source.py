"""Where tasks come from: several sets, one choice of splits, and refusals before any work."""

import json

import numpy as np
import pytest

from torchemo.config.run import DataConfig
from torchemo.core.errors import ConfigError, DataError
from torchemo.data.source import open_source

SMALL = {"image_size": 4, "n_way": 2, "n_query": 1}


def scheme(order):
    return dict(zip(("train", "val", "test"), (order[0:2], order[2:4], order[4:6]), strict=True))


@pytest.fixture
def sets(tmp_path):
    """Two sets of six classes; ``one`` has two schemes of splits, ``two`` has one."""
    for name in ("one", "two"):
        images = np.random.default_rng(len(name)).integers(0, 256, (12, 4, 4, 3), np.uint8)
        np.savez(tmp_path / f"{name}.npz", images=images, label=np.arange(12) // 2)
    up, down = list(range(6)), list(range(5, -1, -1))
    listed = {"one.npz": {"up": scheme(up), "down": scheme(down)}, "two.npz": {"mine": scheme(up)}}
    (tmp_path / "splits.json").write_text(json.dumps(listed))
    return [str(tmp_path / "one.npz"), str(tmp_path / "two.npz")]


def train_classes(source):
    index = source.index
    return {
        domain: {index.class_names[c] for c in index.classes(split="train", domain=domain)}
        for domain in index.domains
    }


def test_a_scheme_decides_which_classes_are_for_training(sets):
    for name, expected in (
        ("up", {"class 0000", "class 0001"}),
        ("down", {"class 0005", "class 0004"}),
    ):
        found = open_source(DataConfig(source=(sets[0],), scheme=name, **SMALL))
        assert train_classes(found) == {"one": expected}


def test_one_scheme_serves_the_set_that_lists_it_and_the_other_needs_no_choice(sets):
    found = open_source(DataConfig(source=tuple(sets), scheme="down", **SMALL))
    assert train_classes(found) == {
        "one": {"class 0005", "class 0004"},
        "two": {"class 0000", "class 0001"},
    }


def test_a_set_with_several_schemes_asks_for_one(sets):
    for chosen in (None, "mine"):
        with pytest.raises(DataError, match="none was chosen") as caught:
            open_source(DataConfig(source=tuple(sets), scheme=chosen, **SMALL))
        assert "up, down" in caught.value.hint


def test_a_misspelt_scheme_is_suggested_and_without_any_it_is_said(sets, tmp_path):
    with pytest.raises(DataError, match="has no splits called 'donw'") as caught:
        open_source(DataConfig(source=tuple(sets), scheme="donw", **SMALL))
    assert caught.value.hint == "Did you mean 'down'?"
    with pytest.raises(DataError) as caught:
        open_source(DataConfig(source=tuple(sets), scheme="zzz", **SMALL))
    assert caught.value.hint == "There are: down, mine, up."
    (tmp_path / "splits.json").unlink()
    with pytest.raises(DataError) as caught:
        open_source(DataConfig(source=tuple(sets), scheme="up", **SMALL))
    assert "No splits are listed" in caught.value.hint


def test_a_named_file_of_splits_counts_instead_of_the_one_beside_the_data(sets, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"odd": scheme([1, 3, 5, 0, 2, 4]), "up": scheme(list(range(6)))}))
    found = open_source(DataConfig(source=(sets[0],), splits=str(file), scheme="odd", **SMALL))
    assert train_classes(found) == {"one": {"class 0001", "class 0003"}}
    with pytest.raises(DataError, match="none was chosen"):
        open_source(DataConfig(source=(sets[0],), splits=str(file), **SMALL))
    with pytest.raises(ConfigError, match="there is no such file of splits"):
        open_source(DataConfig(source=(sets[0],), splits=str(tmp_path / "none.json"), **SMALL))


def test_only_the_splits_that_are_needed_must_fit(sets, tmp_path):
    (tmp_path / "splits.json").write_text(json.dumps({"one.npz": {"test": [0, 1, 2]}}))
    config = DataConfig(source=(sets[0],), **SMALL)
    with pytest.raises(DataError, match="no class has split 'train'"):
        open_source(config)
    found = open_source(config, needed=("test",))
    assert found.sample("test", seed=0, start=0, count=1).support.x.shape == (1, 2, 3, 4, 4)
