"""Splits: drawn, listed or found, and always disjoint by class."""

import collections
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchemo.core.errors import ConfigError, DataError
from torchemo.data.listing import ListedClass, Picture
from torchemo.data.splits import (
    Proportions,
    SplitFile,
    assign,
    proportional,
    read_split_file,
    schemes_for,
)


def classes(*names, domain="birds", split=None):
    return [ListedClass(name, [Picture(f"{name}.png", bytes)], split, domain) for name in names]


def splits_of(assigned):
    return {c.name: c.split for c in assigned}


@given(
    n=st.integers(0, 60),
    parts=st.tuples(*[st.integers(0, 100)] * 3).filter(lambda parts: sum(parts) > 0),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_drawn_splits_cover_every_class_once_in_the_right_numbers(n, parts, seed):
    names = [f"c{i}" for i in range(n)]
    drawn = proportional(names, Proportions(*parts, seed=seed))
    assert sorted(drawn) == sorted(names)
    counts = collections.Counter(drawn.values())
    for split, part in zip(("train", "val", "test"), parts, strict=True):
        assert abs(counts[split] - n * part / sum(parts)) < 1


def test_drawn_splits_have_the_published_sizes_where_they_fit():
    names = [f"c{i:04d}" for i in range(1623)]
    drawn = proportional(names, Proportions(1100, 100, 423))
    assert collections.Counter(drawn.values()) == {"train": 1100, "val": 100, "test": 423}


def test_drawn_splits_depend_on_seed_and_domain_and_not_on_the_order_of_names():
    names = [f"c{i}" for i in range(40)]
    drawn = proportional(names, Proportions(), domain="birds")
    assert proportional(names[::-1], Proportions(), domain="birds") == drawn
    assert proportional(names, Proportions(seed=1), domain="birds") != drawn
    assert proportional(names, Proportions(), domain="fungi") != drawn


def test_without_a_wish_the_split_of_the_data_counts_and_else_proportions():
    own = classes("wren", split="test") + classes("jay", split="train")
    assert splits_of(assign(own, None)) == {"wren": "test", "jay": "train"}
    names = [f"c{i}" for i in range(25)]
    assert collections.Counter(splits_of(assign(classes(*names), None)).values()) == {
        "train": 16,
        "val": 4,
        "test": 5,
    }


def test_a_list_decides_by_name_or_by_place_and_leaves_the_rest_out():
    found = classes("wren", "jay", "tit", "owl")
    by_name = assign(found, {"train": ["jay"], "test": ["owl", "wren"]})
    assert splits_of(by_name) == {"jay": "train", "owl": "test", "wren": "test"}
    by_place = assign(found, {"train": [1], "test": [3, 0]})
    assert by_place == by_name


def test_classes_come_sorted_by_domain_and_split():
    found = classes("a", "b", "c") + classes("a", "b", domain="fungi")
    got = assign(found, {"test": ["a"], "train": ["b", "c"]})
    assert [(c.domain, c.split, c.name) for c in got] == [
        ("birds", "train", "b"),
        ("birds", "train", "c"),
        ("birds", "test", "a"),
        ("fungi", "train", "b"),
        ("fungi", "test", "a"),
    ]


def test_names_in_a_list_may_be_written_with_combining_accents():
    assert len(assign(classes("caf\u00e9"), {"train": ["cafe\u0301"]})) == 1


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({"train": ["wren"], "test": ["wren"]}, "class 'wren' is listed in the splits 'train' and"),
        ({"train": ["wren", "dodo", "moa"]}, "2 listed classes are not in the data.*'dodo'"),
        ({"train": [7]}, "1 listed classes are not in the data.*7"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(listed, message):
    with pytest.raises(DataError, match=message):
        assign(classes("wren", "jay"), listed)


def test_data_split_by_picture_are_refused_and_joined_when_class_splits_are_given():
    found = classes("wren", "jay", split="train") + classes("wren", "jay", split="test")
    with pytest.raises(DataError, match="class 'wren' lies in the splits 'train' and 'test'"):
        assign(found, None)
    joined = assign(found, {"train": ["wren"], "test": ["jay"]})
    assert [(c.name, c.split, len(c.pictures)) for c in joined] == [
        ("wren", "train", 2),
        ("jay", "test", 2),
    ]


def test_a_split_file_may_hold_one_scheme_several_or_several_for_each_data_file(tmp_path):
    scheme, other = {"train": ["wren"], "test": ["jay"]}, {"train": ["jay"]}
    path = tmp_path / "splits.json"
    for content, expected in [
        (scheme, {"default": scheme}),
        ({"a": scheme, "b": other, "note": "text"}, {"a": scheme, "b": other}),
        ({"birds.zip": {"a": scheme, "family": {"wren": "tit"}}}, {"a": scheme}),
        ({"birds.zip": scheme}, {"default": scheme}),
        ({"other.zip": {"a": scheme}}, {}),
        ({"train": "wren"}, {}),
        ([1, 2], {}),
    ]:
        path.write_text(json.dumps(content))
        assert schemes_for(path, data_name="birds.zip") == expected


def test_choosing_a_scheme_is_asked_for_only_where_there_are_several(tmp_path):
    path = tmp_path / "splits.json"
    scheme, other = {"train": ["wren"]}, {"train": ["jay"]}
    path.write_text(json.dumps({"a": scheme, "b": other}))
    assert read_split_file(SplitFile(path, "b"), data_name="x") == other
    with pytest.raises(DataError, match=r"has 2 schemes .*none was chosen.\nChoose one: a, b"):
        read_split_file(SplitFile(path), data_name="x")
    with pytest.raises(DataError, match="'c' is not among them"):
        read_split_file(SplitFile(path, "c"), data_name="x")


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "\xff"])
def test_a_damaged_split_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "splits.json"
    path.write_bytes(content.encode("latin1"))
    with pytest.raises(DataError, match=r"splits\.json: cannot be read as a file of splits"):
        schemes_for(path, data_name="x")


@pytest.mark.parametrize("parts", [(0, 0, 0), (-1, 1, 1)])
def test_impossible_proportions_are_refused(parts):
    with pytest.raises(ConfigError, match="positive"):
        Proportions(*parts)


def test_drawn_splits_depend_on_class_names_alone_unless_an_earlier_run_asks_for_the_set():
    names = [f"c{i}" for i in range(40)]
    here, there = (classes(*names, domain=domain) for domain in ("mine", "mine (copy)"))
    assert splits_of(assign(here, None)) == splits_of(assign(there, None))
    assert splits_of(assign(here, None, by_set=True)) == proportional(
        names, Proportions(), domain="mine"
    )
    assert splits_of(assign(here, None, by_set=True)) != splits_of(assign(there, None, by_set=True))


def test_groups_of_classes_are_split_as_a_whole(tmp_path):
    file = tmp_path / "splits.json"
    family = {"wren": "small", "robin": "small", "heron": "large", "crane": "large", "owl": "night"}
    listed = {"train": ["family:small", "owl"], "test": ["family:large"], "family": family}
    file.write_text(json.dumps(listed))
    found = read_split_file(SplitFile(file), data_name="birds")
    assert splits_of(assign(classes(*family), found)) == {
        "wren": "train", "robin": "train", "owl": "train", "heron": "test", "crane": "test",
    }  # fmt: skip
    file.write_text(json.dumps({**listed, "test": ["family:huge"]}))
    found = read_split_file(SplitFile(file), data_name="birds")
    with pytest.raises(DataError, match="family:huge"):
        assign(classes(*family), found)
