"""From a configuration to its parts: what trains, what answers, and what is refused before any work."""

from dataclasses import replace

import pytest
import torch

from tests.runs.small import AFTER, config
from torchemo.config.registry import Part
from torchemo.config.toml import dumps
from torchemo.core.errors import CheckpointError, ConfigError
from torchemo.runs.experiment import (
    build_system,
    build_trainer,
    complete,
    open_experiment,
    reduced,
)
from torchemo.runs.load import config_hash
from torchemo.training.device import Place

KINDS = ("none", "gradients", "offsets", AFTER)


@pytest.mark.parametrize("memory", KINDS)
def test_a_complete_configuration_is_the_same_run(memory):
    chosen = config("anil", memory=memory)
    whole = complete(chosen)
    assert complete(whole) == whole
    assert complete(reduced(whole)) == whole
    assert reduced(whole) == reduced(chosen)
    assert config_hash(whole) == config_hash(chosen) == config_hash(reduced(chosen))
    assert whole.learner.options["order"] == 2  # a default that was not given
    assert "order" not in reduced(whole).learner.options
    assert whole.outer_steps == chosen.outer_steps == 9
    assert dumps(whole) == dumps(complete(chosen))


def test_another_option_is_another_run():
    chosen = config()
    for other in (
        replace(chosen, learner=chosen.learner.set(steps=3)),
        replace(chosen, memory=chosen.memory.set(k=2)),
        replace(chosen, train=replace(chosen.train, seed=1)),
    ):
        assert config_hash(other) != config_hash(chosen)


@pytest.mark.parametrize("memory", KINDS)
def test_what_is_opened_answers_like_what_was_trained(memory):
    experiment = open_experiment(config(memory=memory))
    source, trainer = experiment.source, experiment.trainer
    for start in range(0, 14, 2):
        trainer.step(source.sample("train", seed=0, start=start, count=2))
    opened = build_system(experiment.config, source.shape, trainer.state_dict())
    tasks = source.sample("test", seed=0, start=0, count=5)
    if trainer.memory is not None:
        trainer.memory.eval()
        assert len(opened.memory.store) > 0
    trained = experiment.system
    assert (
        (opened.iteration, opened.title) == (trained.iteration, trained.title) == (7, opened.title)
    )
    for one, other in zip(
        opened.predict(tasks).outputs, trained.predict(tasks).outputs, strict=True
    ):
        assert torch.equal(one, other)


def test_what_is_opened_shares_nothing_with_what_trains_on():
    experiment = open_experiment(config(memory="offsets"))
    source, trainer = experiment.source, experiment.trainer
    trainer.step(source.sample("train", seed=0, start=0, count=2))
    opened = build_system(experiment.config, source.shape, trainer.state_dict())
    before = {n: p.clone() for n, p in opened.params.items()}
    keys = {n: p.clone() for n, p in opened.memory.encoder.state_dict().items()}
    trainer.step(source.sample("train", seed=0, start=2, count=2))
    assert any(not torch.equal(before[n], p) for n, p in trainer.params.items())
    for name, tensor in opened.params.items():
        assert torch.equal(tensor, before[name])
    for name, tensor in opened.memory.encoder.state_dict().items():
        assert torch.equal(tensor, keys[name])


@pytest.mark.parametrize(("saved", "asked"), [("none", "offsets"), ("gradients", "none")])
def test_the_state_of_another_memory_is_refused(saved, asked):
    experiment = open_experiment(config(memory=saved))
    groups = experiment.trainer.state_dict()
    with pytest.raises(CheckpointError, match="configuration the run was started with"):
        build_system(config(memory=asked), experiment.source.shape, groups)


def test_the_state_of_another_network_is_refused():
    experiment = open_experiment(config(memory="none"))
    groups = experiment.trainer.state_dict()
    wider = replace(experiment.config, model=Part("mlp", {"hidden": (7,)}))
    with pytest.raises(CheckpointError, match="saved state has shape"):
        build_system(wider, experiment.source.shape, groups)


def test_only_keys_that_recognise_their_own_task_have_a_training_of_their_own():
    for memory, own in (("none", False), ("gradients", False), ("offsets", True), (AFTER, True)):
        trainer = open_experiment(config(memory=memory)).trainer
        assert (trainer.recognition is not None) == own
        assert any(n.startswith("encoder.") for n in trainer.memory_learned) == (
            memory == "gradients"
        )


def test_a_learner_of_two_stages_is_not_frozen_before_the_second():
    shape = open_experiment(config()).source.shape
    staged = Part("tsa-maml", {"groups": 2, "first_stage": 2, "cluster_tasks": 4})
    after = replace(config(memory=AFTER), learner=staged)  # two tasks per step: groups at step 4
    with pytest.raises(ConfigError, match=r"groups at step 4, but it is frozen at step 4"):
        build_trainer(after, shape)
    longer = replace(after, train=replace(after.train, steps=5))
    assert build_trainer(longer, shape).phases.turn == 5
    joint = replace(config(memory="offsets"), learner=staged, train=after.train)
    assert build_trainer(joint, shape).phases.turn is None


@pytest.mark.parametrize(("word", "batched"), [("auto", None), ("yes", True), ("no", False)])
def test_how_tasks_are_run_is_chosen_by_a_word(word, batched):
    chosen = config()
    chosen = replace(chosen, train=replace(chosen.train, batched=word))
    experiment = open_experiment(chosen, place=Place(workers=2))
    opened = build_system(chosen, experiment.source.shape, experiment.trainer.state_dict())
    for system in (experiment.system, opened):
        assert system.batched is batched
    assert (experiment.system.workers, opened.workers) == (2, 1)
