"""Options of a run: defaults, checks, and how long it is."""

import subprocess
import sys
from dataclasses import replace

import pytest

from torchemo.config.registry import Part
from torchemo.config.run import DataConfig, DenseConfig, OuterConfig, RunConfig, TrainConfig
from torchemo.core.errors import ConfigError
from torchemo.runs.experiment import complete, reduced


def test_a_run_without_options_is_maml_on_images_without_a_memory():
    config = RunConfig()
    assert (config.learner, config.model, config.memory) == (
        Part("maml"),
        Part("conv4"),
        Part("none"),
    )
    assert config.data == DataConfig()
    assert reduced(complete(config)) == config


@pytest.mark.parametrize(
    ("memory", "after", "total"),
    [
        (Part("none"), None, 30),
        (Part("gradients"), None, 30),
        (Part("offsets"), None, 30),
        (Part("offsets", {"steps": "joint"}), None, 30),
        (Part("offsets", {"steps": "same"}), 30, 60),
        (Part("offsets", {"steps": 12}), 12, 42),
    ],
)
def test_a_run_is_as_long_as_its_learner_and_its_memory_train(memory, after, total):
    config = RunConfig(memory=memory, train=TrainConfig(steps=30))
    for form in (config, complete(config), reduced(config)):
        assert (form.memory_steps, form.outer_steps) == (after, total)


@pytest.mark.parametrize(
    ("kind", "wrong", "words"),
    [
        (OuterConfig, {"lr": -0.1}, "outer rate should be 0 or more, got -0.1"),
        (OuterConfig, {"lr": float("nan")}, "outer rate should be 0 or more"),
        (OuterConfig, {"rates_lr": 0.0}, "rates_lr should be None or above 0"),
        (OuterConfig, {"clip": -1.0}, "clip should be None or above 0"),
        (OuterConfig, {"momentum": 1.0, "optimizer": "sgd"}, r"share in \[0, 1\), got 1.0"),
        (OuterConfig, {"momentum": 0.9}, "momentum is for optimizer = sgd, got 0.9 with adam"),
        (OuterConfig, {"nesterov": True, "optimizer": "sgd"}, "momentum is 0"),
        (OuterConfig, {"weight_decay": -1.0}, "weight_decay should be 0 or more"),
        (OuterConfig, {"milestones": (0.5,)}, "have a factor each"),
        (OuterConfig, {"milestones": (0.9, 0.5, 0.6)}, "milestones should rise"),
        (TrainConfig, {"steps": 0}, "train.steps should be 1 or more, got 0"),
        (TrainConfig, {"tasks": 0}, "train.tasks should be 1 or more"),
        (TrainConfig, {"validate_every": 0}, "train.validate_every should be 1 or more"),
        (TrainConfig, {"validation_tasks": -3}, "train.validation_tasks should be 1 or more"),
    ],
)
def test_impossible_options_are_refused(kind, wrong, words):
    with pytest.raises(ConfigError, match=words):
        kind(**wrong)


@pytest.mark.parametrize(("steps", "parts"), [(0, (0, 30)), (12, (12, 30)), ("all", (30, 0))])
def test_a_dense_stage_adds_to_the_steps_or_takes_all_of_them(steps, parts):
    config = RunConfig(train=TrainConfig(steps=30, dense=DenseConfig(steps=steps)))
    assert (config.dense_steps, config.episode_steps) == parts
    assert config.outer_steps == sum(parts)


def test_complete_checks_parts_and_leaves_the_rest_as_it_is():
    config = replace(RunConfig(), train=TrainConfig(steps=3), data=DataConfig(n_way=2))
    whole = complete(config)
    assert (whole.train, whole.data, whole.outer) == (config.train, config.data, config.outer)
    assert complete(whole) == whole
    for section, part in (("learner", Part("mml")), ("memory", Part("none", {"k": 2}))):
        with pytest.raises(ConfigError):
            complete(replace(config, **{section: part}))


def test_options_need_no_torch():
    code = "import sys; import torchemo.config.presets as p; p.preset('maml-emo'); p.names()"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
