"""Configs as TOML: round trip, strictness, suggestions."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchemo.config.presets import names, preset
from torchemo.config.run import RunConfig, TrainConfig
from torchemo.config.toml import dumps, from_dict, loads, override, to_dict
from torchemo.core.errors import ConfigError


@pytest.mark.parametrize("name", names())
def test_every_preset_survives_a_round_trip(name):
    for regression in (False,) if name.endswith("-published") else (False, True):
        config = preset(name, regression=regression)
        assert loads(dumps(config), RunConfig, where="test") == config


def test_options_that_are_none_are_written_and_read_back():
    config = RunConfig()
    emo = replace(config.emo, retrieval=replace(config.emo.retrieval, k=None))
    again = loads(dumps(replace(config, emo=emo)), RunConfig, where="test")
    assert again.emo.retrieval.k is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\niteratons = 5", "Did you mean 'train.iterations'"),
        ("[emo.memory]\ncontroler = 'lru'", "Did you mean 'emo.memory.controller'"),
        ("[emo.memory]\ncontroller = 'mru'", "one of 'fifo', 'lru', 'clock', got 'mru'"),
        ("[train]\niterations = '5'", "'train.iterations' should be int, got '5'"),
        ("[train]\niterations = true", "should be int, got True"),
        ("[train]\niterations = 0", "1 or more"),
        ("train = 3", "'train' should be a table"),
        ("[train", "not a TOML file"),
        ("[zebra]\nx = 1", "unknown option 'zebra'"),
    ],
)
def test_mistakes_are_named_with_what_to_do(text, words):
    with pytest.raises(ConfigError, match=words):
        loads(text, RunConfig, where="run.toml")


def test_a_file_lies_over_a_preset_and_an_option_over_both():
    base = preset("anil")
    config = loads("[train]\niterations = 7", RunConfig, where="test", base=base)
    assert (config.train.iterations, config.train.tasks, config.learner.name) == (7, 8, "anil")
    plain = to_dict(config)
    for option in ("train.iterations=9", "learner.inner_lr=1", "learner.rule=adam"):
        override(plain, option)
    config = from_dict(plain, RunConfig, where="command line")
    assert (config.train.iterations, config.learner.inner_lr, config.learner.rule) == (
        9,
        1.0,
        "adam",
    )


def test_an_option_without_a_value_or_inside_a_value_is_refused():
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        override({}, "train.iterations")
    with pytest.raises(ConfigError, match="not a group"):
        override({"train": 3}, "train.iterations=5")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text())
def test_arbitrary_text_is_a_config_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        assert isinstance(loads(text, TrainConfig, where="fuzz"), TrainConfig)


def test_a_misspelt_preset_is_suggested_and_an_unknown_one_lists_the_known_ones():
    with pytest.raises(ConfigError, match="Did you mean 'maml'"):
        preset("mamal")
    with pytest.raises(ConfigError, match="maml-emo-paper"):
        preset("zzz")
