"""Runs with a dense stage: they resume bit for bit, and others may start from their network."""

from dataclasses import replace

import pytest
import torch

from tests.runs.small import final_state, log, stop_after
from torchemo.config.registry import Part
from torchemo.config.run import DataConfig, DenseConfig, RunConfig, TrainConfig
from torchemo.core.errors import CheckpointError, ConfigError, DataError
from torchemo.runs.experiment import build_trainer
from torchemo.runs.load import load_best, read_config
from torchemo.runs.train import train_run

DENSE = DenseConfig(steps=3, batch=6, share=0.7, optimizer="sgd", momentum=0.9)
CONFIG = RunConfig(
    learner=Part("protonet"),
    model=Part("conv4", {"filters": 4, "bn": "running"}),
    data=DataConfig(image_size=16, classes_per_family=25, n_way=2, n_query=2),
    train=TrainConfig(steps=4, tasks=2, validate_every=2, validation_tasks=2, dense=DENSE),
)


def trained(root, *, start_from=None, steps=4, dense_steps=0):
    """Train with other dense options; one checkpoint, at the end."""
    own = replace(DENSE, share=0.0, steps=dense_steps) if start_from is None else DenseConfig()
    place = None if start_from is None else str(start_from)
    how = {"steps": steps, "validate_every": 100, "dense": own, "start_from": place}
    train_run(root, replace(CONFIG, train=replace(CONFIG.train, **how)))
    return root


def same(one, other, group):
    first, second = (final_state(root).groups[group] for root in (one, other))
    assert first.keys() == second.keys()
    return all(torch.equal(t, second[n]) for n, t in first.items())


@pytest.mark.parametrize("cut", [2, 3, 5])
def test_a_run_resumes_bit_for_bit_before_at_and_after_the_end_of_its_dense_stage(cut, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train_run(whole, CONFIG).iteration == 7
    assert train_run(parts, CONFIG, should_stop=stop_after(cut)).ended == "stopped"
    assert train_run(parts).ended == "finished"
    for group in ("params", "optimizer", "dense"):
        assert same(whole, parts, group), group
    assert log(whole) == log(parts)


def test_a_stage_before_episodes_is_a_dense_run_that_episodes_start_from(tmp_path):
    dense = trained(tmp_path / "dense", dense_steps="all")
    stage = trained(tmp_path / "stage", dense_steps=4, steps=2)
    after = trained(tmp_path / "after", start_from=dense, steps=2)
    assert (final_state(stage).step, final_state(after).step) == (6, 2)
    for group in ("params", "optimizer"):
        assert same(stage, after, group)
    assert not same(dense, after, "params")


def test_a_dense_run_answers_new_classes_and_has_no_optimizer_of_episodes(tmp_path):
    root = trained(tmp_path / "run", dense_steps="all")
    saved = final_state(root)
    assert saved.step == read_config(root).outer_steps == 4
    assert "optimizer" not in saved.groups
    opened = load_best(root)
    tasks = opened.source.sample("test", seed=0, start=0, count=2)
    assert opened.system.predict(tasks).outputs[-1].isfinite().all()


def test_a_network_trained_on_other_classes_is_refused(tmp_path):
    dense = trained(tmp_path / "dense", dense_steps="all")
    train = replace(CONFIG.train, start_from=str(dense))
    other = replace(CONFIG, data=replace(CONFIG.data, classes_per_family=30), train=train)
    with pytest.raises(DataError, match="trained on other data"):
        train_run(tmp_path / "other", other)
    nowhere = replace(CONFIG.train, start_from=str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="no checkpoint"):
        train_run(tmp_path / "none", replace(CONFIG, train=nowhere))


def test_training_tasks_of_more_classes_need_a_learner_that_takes_them(tmp_path):
    data = replace(CONFIG.data, train_way=4)
    wide = replace(CONFIG, data=data, train=replace(CONFIG.train, dense=DenseConfig(), steps=2))
    assert train_run(tmp_path / "wide", wide).ended == "finished"
    opened = load_best(tmp_path / "wide")
    tasks = opened.source.sample("test", seed=0, start=0, count=2)
    assert opened.system.predict(tasks).outputs[-1].shape[-1] == 2
    with pytest.raises(ConfigError, match="MAML learns a head for the classes"):
        build_trainer(replace(wide, learner=Part("maml")), opened.source.shape)
    memory = Part("offsets", {"capacity": 2})
    with pytest.raises(ConfigError, match="a memory remembers tasks of one size"):
        build_trainer(replace(wide, memory=memory), opened.source.shape)
