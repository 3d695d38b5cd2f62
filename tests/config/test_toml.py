"""Configs as TOML: round trip, strictness, suggestions, and files laid over each other."""

import contextlib
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchemo.config.presets import names, preset
from torchemo.config.registry import Part
from torchemo.config.run import RunConfig, TrainConfig
from torchemo.config.toml import (
    UNSET,
    dumps,
    from_dict,
    load,
    loads,
    merged,
    override,
    part_dict,
    to_dict,
)
from torchemo.core.errors import ConfigError
from torchemo.learners import LEARNERS
from torchemo.runs.experiment import complete, reduced


def plain(config):
    return to_dict(complete(config))


@pytest.mark.parametrize("name", names())
def test_every_preset_survives_a_round_trip(name):
    for regression in (False,) if name.endswith("-published") else (False, True):
        config = preset(name, regression=regression)
        whole = complete(config)
        for written in (config, whole, reduced(config)):
            again = loads(dumps(written), RunConfig, where="test")
            assert plain(again) == to_dict(whole)
        assert reduced(complete(reduced(config))) == reduced(config)


def test_a_whole_configuration_names_every_option_of_its_parts():
    written = dumps(complete(preset("maml-emo")))
    for line in ("inner_loss = ", "filters = ", "[memory.key]", "[memory.controller]", "clip = "):
        assert line in written
    assert dumps(reduced(preset("maml"))).count("=") < written.count("=")


def test_options_that_are_none_are_written_and_read_back():
    config = replace(RunConfig(), memory=Part("gradients", {"k": None}))
    assert f'k = "{UNSET}"' in dumps(config)
    again = complete(loads(dumps(config), RunConfig, where="test"))
    assert again.memory.options["k"] == UNSET
    outer = replace(RunConfig().outer, clip=None)
    again = loads(dumps(replace(RunConfig(), outer=outer)), RunConfig, where="test")
    assert again.outer.clip is None


def test_parts_are_written_by_their_name_with_what_is_set():
    part = Part("bmg", {"base": Part("meta-sgd", {"rate_init": (0.1, 0.2)}), "target_rate": None})
    assert part_dict(part) == {
        "name": "bmg",
        "base": {"name": "meta-sgd", "rate_init": [0.1, 0.2]},
        "target_rate": UNSET,
    }
    again = loads(dumps(RunConfig(learner=part)), RunConfig, where="test").learner
    assert LEARNERS.resolve(again)[1].target_rate is None
    assert LEARNERS.reduced(again) == LEARNERS.reduced(part)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nstps = 5", "Did you mean 'train.steps'"),
        ("[memory]\nname = 'gradients'\ncontroler = 'lru'", "Did you mean 'memory.controller'"),
        ("[memory]\nname = 'gradients'\n[memory.controller]\nname = 'mru'", "Did you mean 'lru'"),
        ("[memory]\nname = 'gradients'\ncontroller = 'lru'", "Choose the part by memory.contro"),
        ("[memory]\ncapacity = 5", r"memory 'none': unknown option 'memory.capacity'"),
        ("[learner]\nstepz = 5", "Did you mean 'learner.steps'"),
        ("[learner]\nsubspaces = 5", "It is an option of musml"),
        ("[learner]\nrule = 'rmsprop'", "one of 'sgd', 'momentum', 'adam', got 'rmsprop'"),
        ("[train]\nsteps = '5'", "'train.steps' should be int, got '5'"),
        ("[train]\nsteps = true", "should be int, got True"),
        ("[train]\nsteps = 0", "1 or more"),
        ("train = 3", "'train' should be a table"),
        ("learner = 'maml'", "'learner' should be a table with a name, got 'maml'"),
        ("[learner]\nname = 3", "'learner' should be a table with a name"),
        ("[train", "not a TOML file"),
        ("[zebra]\nx = 1", "unknown option 'zebra'"),
    ],
)
def test_mistakes_are_named_with_what_to_do(text, words):
    with pytest.raises(ConfigError, match=words):
        complete(loads(text, RunConfig, where="run.toml"))


def test_options_without_a_name_are_those_of_the_default_part():
    config = loads("[learner]\nsteps = 3\n[model]\nfilters = 4", RunConfig, where="test")
    assert config.learner == Part("maml", {"steps": 3})
    assert config.model == Part("conv4", {"filters": 4})
    text = "[memory]\nname = 'gradients'\n[memory.key]\ndim = 8"
    memory = complete(loads(text, RunConfig, where="test")).memory
    assert (memory.options["key"].name, memory.options["key"].options["dim"]) == ("transformer", 8)


def test_a_file_lies_over_a_preset_and_an_option_over_both():
    base = preset("anil")
    config = loads("[train]\nsteps = 7", RunConfig, where="test", base=base)
    assert (config.train.steps, config.train.tasks, config.learner.name) == (7, 8, "anil")
    assert config.learner == base.learner
    plain = to_dict(config)
    for option in ("train.steps=9", "learner.inner_lr=1", "learner.rule=adam"):
        override(plain, option)
    config = from_dict(plain, RunConfig, where="command line")
    learner = complete(config).learner.options
    assert (config.train.steps, learner["inner_lr"], learner["rule"]) == (9, 1.0, "adam")


def test_a_part_of_another_name_brings_its_own_options_alone():
    base = {"a": {"name": "x", "p": 1, "q": {"name": "z", "r": 2}}, "b": 3}
    assert merged(base, {"a": {"name": "y", "s": 4}}) == {"a": {"name": "y", "s": 4}, "b": 3}
    assert merged(base, {"a": {"name": "x", "p": 5}})["a"] == {**base["a"], "p": 5}
    assert merged(base, {"a": {"p": 5}})["a"] == {**base["a"], "p": 5}
    assert merged(base, {"a": {"q": {"name": "w"}}})["a"] == {**base["a"], "q": {"name": "w"}}
    assert merged(base, {"a": 7}) == {"a": 7, "b": 3}
    assert merged({"outer": {"lr": 1, "clip": 2}}, {"outer": {"lr": 3}}) == {
        "outer": {"lr": 3, "clip": 2}
    }
    assert base == {"a": {"name": "x", "p": 1, "q": {"name": "z", "r": 2}}, "b": 3}


def test_naming_another_part_drops_the_options_of_the_one_before():
    plain = to_dict(complete(preset("maml-emo")))
    override(plain, "memory.name=offsets")
    assert plain["memory"] == {"name": "offsets"}
    override(plain, "memory.capacity=4")
    override(plain, "memory.key.name=mean")
    config = complete(from_dict(plain, RunConfig, where="command line"))
    assert config.memory.options["capacity"] == 4
    assert config.memory.options["key"].name == "mean"
    assert (
        config.memory.options["weights"] == "softmax"
    )  # the default of offsets, not that of before
    same = to_dict(complete(preset("maml-emo")))
    kept = dict(same["memory"])
    override(same, "memory.name=gradients")
    assert same["memory"] == kept


def test_a_part_inside_a_part_is_named_and_set_by_its_path():
    plain = to_dict(complete(preset("bmg")))
    override(plain, "learner.base.inner_lr=0.3")
    override(plain, "learner.match=l2")
    config = complete(from_dict(plain, RunConfig, where="command line"))
    assert config.learner.options["base"].options["inner_lr"] == 0.3
    assert config.learner.options["match"] == "l2"
    override(plain, "learner.base.name=anil")
    assert plain["learner"]["base"] == {"name": "anil"}
    override(plain, "learner.inner_lr=0.1")
    wrong = from_dict(plain, RunConfig, where="command line")
    with pytest.raises(ConfigError, match=r"unknown option 'learner\.inner_lr'"):
        complete(wrong)


def test_an_option_without_a_value_or_inside_a_value_is_refused():
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        override({}, "train.steps")
    with pytest.raises(ConfigError, match="not a group"):
        override({"train": 3}, "train.steps=5")


@pytest.mark.parametrize(
    ("text", "value"),
    [("5", 5), ("0.5", 0.5), ("true", True), ("adam", "adam"), ("[1, 2]", [1, 2]), ("'5'", "5")],
)
def test_the_value_of_an_option_is_read_as_toml_or_taken_as_text(text, value):
    plain = {}
    override(plain, f"a.b={text}")
    assert plain == {"a": {"b": value}}


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for name, content, words in (
        ("none.toml", None, "there is no such file"),
        ("bad.toml", b"[train", "not a TOML file"),
        ("binary.toml", b"\xff\xfe\x00", "not a text file"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=words) as caught:
            load(path, RunConfig)
        assert str(path) in caught.value.message


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text())
def test_arbitrary_text_is_a_config_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        assert isinstance(loads(text, TrainConfig, where="fuzz"), TrainConfig)


def test_a_misspelt_preset_is_suggested_and_an_unknown_one_says_where_the_known_ones_are():
    with pytest.raises(ConfigError, match="Did you mean 'maml'"):
        preset("mamal")
    with pytest.raises(ConfigError, match="torchemo presets"):
        preset("zzz")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_numbers_that_no_arithmetic_can_work_with_are_refused(value):
    with pytest.raises(ConfigError, match=r"'outer\.lr' should be finite"):
        from_dict({"outer": {"lr": value}}, RunConfig, where="x")


def test_whole_numbers_are_bounded():
    with pytest.raises(ConfigError, match=r"'train\.steps' should be finite, at most"):
        from_dict({"train": {"steps": 10**16}}, RunConfig, where="x")
