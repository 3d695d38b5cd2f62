"""Runs: resume is bitwise, what diverges is skipped and then stopped, other data are refused."""

import json
import re
from dataclasses import replace

import pytest
import torch

from tests.pretend import on_pretend
from tests.runs.small import AFTER, TASKS, config, final_state, log, stop_after
from torchemo.config.registry import Part
from torchemo.config.run import DataConfig, OuterConfig, RunConfig, TrainConfig
from torchemo.core.errors import CheckpointError, ConfigError, DataError, Diverged, ResourceError
from torchemo.learners import LEARNERS
from torchemo.memory.aggregators import AGGREGATORS
from torchemo.memory.controllers import CONTROLLERS
from torchemo.memory.keys.recognition import SelfRecognition
from torchemo.runs import experiment as experiment_module
from torchemo.runs import footprint as footprint_module
from torchemo.runs.experiment import build_trainer, complete
from torchemo.runs.load import load_best, load_trained, read_config
from torchemo.runs.score import Protocol, score_tasks
from torchemo.runs.storage import checkpoint
from torchemo.runs.storage.seal import with_digest
from torchemo.runs.train import train_run
from torchemo.training import predict as predict_module
from torchemo.training import trainer as trainer_module
from torchemo.training.device import Place, to_device

METRIC = [n for n in LEARNERS if LEARNERS[n].__module__.startswith("torchemo.learners.metric.")]
"""Learners without an inner loop; they need classes, and so does Proto-MAML."""


def assert_same_end(one, other):
    """Two runs have the same last checkpoint, bit for bit, and the same log."""
    first, second = final_state(one), final_state(other)
    assert first.step == second.step
    assert first.info == second.info
    assert first.groups.keys() == second.groups.keys()
    for group, tensors in first.groups.items():
        assert tensors.keys() == second.groups[group].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, second.groups[group][name]), (group, name)
    assert log(one) == log(other)


def matrix():
    yield from (("maml", kind, "lru", "gradients") for kind in AGGREGATORS)
    yield from (("maml", "sum", controller, "gradients") for controller in CONTROLLERS)
    for learner in LEARNERS:
        if learner not in ("proto-maml", *METRIC):  # these resume on images below
            # Reptile has no gradient for what an aggregator learns.
            yield learner, "mean" if learner == "reptile" else "gated", "clock", "gradients"
            yield learner, "sum", "fifo", "offsets"
    yield "maml", "sum", "fifo", AFTER


@pytest.mark.parametrize(("learner", "aggregator", "controller", "memory"), list(matrix()))
def test_an_interrupted_run_ends_bit_for_bit_like_an_uninterrupted_one(
    learner, aggregator, controller, memory, tmp_path
):
    chosen = config(learner, aggregator=aggregator, controller=controller, memory=memory)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_run(whole, chosen)
    assert train_run(parts, chosen, should_stop=stop_after(3)).ended == "stopped"
    assert train_run(parts, should_stop=stop_after(4)).ended == "stopped"
    assert train_run(parts).ended == "finished"
    assert final_state(whole).step == 9
    assert_same_end(whole, parts)
    # Consecutive checkpoints differ, so equality above means something.
    last, earlier = final_state(whole), checkpoint.load(checkpoint.published(parts)[0])
    learning = "memory" if memory == AFTER else "params"
    assert any(
        not torch.equal(t, earlier.groups[learning][n]) for n, t in last.groups[learning].items()
    )


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("cut", [3, 4, 5])
def test_a_run_resumes_bit_for_bit_around_the_step_where_the_memory_trains_alone(
    cut, schedule, tmp_path
):
    chosen = replace(config(memory=AFTER), outer=OuterConfig(schedule=schedule))
    train_run(tmp_path / "whole", chosen)
    train_run(tmp_path / "parts", chosen, should_stop=stop_after(cut))
    assert train_run(tmp_path / "parts").iteration == 9
    assert_same_end(tmp_path / "whole", tmp_path / "parts")
    # The learner is frozen from step 4 on, and the slots begin there.
    train_run(tmp_path / "begun", chosen, should_stop=stop_after(4))
    frozen, last = final_state(tmp_path / "begun"), final_state(tmp_path / "whole")
    assert (frozen.step, last.step) == (4, 9)
    for name, tensor in frozen.groups["params"].items():
        assert torch.equal(tensor, last.groups["params"][name])
    slots = {n: t for n, t in last.groups["memory"].items() if n.startswith("store.values.")}
    assert slots
    for name, tensor in slots.items():
        assert not frozen.groups["memory"][name].any()
        assert tensor.any()


def test_a_run_whose_optimizer_has_no_state_resumes_and_is_read_again(tmp_path):
    chosen = replace(config("reptile"), outer=OuterConfig(optimizer="sgd", lr=0.1, clip=None))
    train_run(tmp_path / "whole", chosen)
    train_run(tmp_path / "parts", chosen, should_stop=stop_after(3))
    train_run(tmp_path / "parts")
    whole, resumed = final_state(tmp_path / "whole"), final_state(tmp_path / "parts")
    best = load_best(tmp_path / "whole").system.params
    for name, tensor in whole.groups["params"].items():
        assert torch.equal(tensor, resumed.groups["params"][name])
        assert best[name].shape == tensor.shape


@pytest.mark.parametrize("memory", ["none", "offsets"])
@pytest.mark.parametrize("of_classes", ["proto-maml", *METRIC])
def test_learners_of_classes_resume_on_images_bit_for_bit(of_classes, memory, tmp_path):
    few = {"capacity": 2, "warmup": 1, "key": Part("learned-statistics", {"dim": 4})}
    chosen = RunConfig(
        learner=Part(of_classes, {"steps": 1} if of_classes == "proto-maml" else {}),
        model=Part("conv4", {"filters": 6}),
        memory=Part(memory, few if memory == "offsets" else {}),
        data=DataConfig(image_size=16, classes_per_family=25, n_way=2, n_query=2),
        train=TrainConfig(steps=4, tasks=2, validate_every=2, validation_tasks=2),
    )
    train_run(tmp_path / "whole", chosen)
    train_run(tmp_path / "parts", chosen, should_stop=stop_after(1))
    train_run(tmp_path / "parts")
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


def test_continuing_where_bits_may_differ_is_reported(tmp_path):
    run, told = tmp_path / "run", []

    def tell(event, step, fields):
        if event == "environment":
            told.append((step, fields["why"]))

    train_run(run, config(), should_stop=stop_after(2))
    train_run(run, should_stop=stop_after(2), on_event=tell)
    assert told == []
    path = run / "environment.json"
    then = {**json.loads(path.read_text()), "convolutions": "elsewhere"}
    del then["sha256"]
    path.write_text(json.dumps(with_digest(then)))
    train_run(run, on_event=tell)
    ((step, why),) = told
    assert step > 0
    assert "not bit for bit" in why
    assert "convolutions elsewhere -> " in why


def test_a_run_is_not_written_over_and_its_configuration_is_read_back(tmp_path):
    chosen = config()
    train_run(tmp_path, chosen)
    assert read_config(tmp_path) == complete(chosen)
    with pytest.raises(ConfigError, match="holds a run already"):
        train_run(tmp_path, chosen)
    with pytest.raises(ConfigError, match="not a run"):
        read_config(tmp_path / "elsewhere")


def test_a_run_refuses_other_data_unless_told_to_accept_them(tmp_path):
    train_run(tmp_path, config(), should_stop=stop_after(2))
    text = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(text.replace("regression:hsml4", "regression:sinusoid"))
    with pytest.raises(DataError, match="data differ"):
        train_run(tmp_path)
    assert train_run(tmp_path, accept_new_data=True).ended == "finished"


def test_a_run_is_not_scored_on_data_that_changed_since(tmp_path, monkeypatch):
    """Other classes are another split: classes of training would be among those of the test."""
    train_run(tmp_path, config())
    kind = type(load_best(tmp_path).source)
    monkeypatch.setattr(kind, "fingerprint", "another")
    with pytest.raises(DataError, match="the data differ from those the run was trained on"):
        load_best(tmp_path)
    load_best(tmp_path, data=TASKS)  # who names them says that they are meant


def test_a_run_without_a_checkpoint_that_can_be_read_does_not_begin_anew(tmp_path):
    train_run(tmp_path, config(), should_stop=stop_after(2))
    (path,) = checkpoint.published(tmp_path)
    for file in path.glob("*.safetensors"):
        file.write_bytes(b"damaged")
    before = log(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint that can be read"):
        train_run(tmp_path)
    assert log(tmp_path) == before


def test_a_folder_with_something_else_in_it_is_not_made_a_run(tmp_path):
    (tmp_path / "picture.png").touch()
    with pytest.raises(ConfigError, match="something that is not a run"):
        train_run(tmp_path, config())
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


def test_a_memory_larger_than_the_machine_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("os.sysconf", lambda name: 10, raising=False)  # ten pages of ten bytes
        with pytest.raises(ResourceError, match=r"5 slots takes .* this machine has 100 bytes"):
            train_run(tmp_path / "run", config())
    assert not (tmp_path / "run").exists()


def test_a_memory_larger_than_the_device_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(footprint_module, "device_memory", lambda device: 100)
    with on_pretend() as device, pytest.raises(ResourceError) as caught:
        train_run(tmp_path / "run", config(), place=Place(device))
    assert re.fullmatch(rf"a memory of 5 slots takes .*, {device} has .*\.", caught.value.message)
    assert "memory.capacity" in caught.value.hint
    assert not (tmp_path / "run").exists()


def test_images_of_training_validation_and_scoring_travel_to_a_device_in_uint8(
    tmp_path, monkeypatch
):
    moved = []

    def spy(episode, device):
        moved.append(episode.support.x.dtype)
        return to_device(episode, device)

    for module in (trainer_module, predict_module):
        monkeypatch.setattr(module, "to_device", spy)
    chosen = config(memory="none")
    small = replace(
        chosen,
        model=Part("conv4", {"filters": 2}),
        data=DataConfig(image_size=16, n_query=2),
        train=replace(chosen.train, steps=2, validate_every=2, validation_tasks=2),
    )
    with on_pretend() as device:
        train_run(tmp_path, small, place=Place(device))
        trained = len(moved)
        assert trained >= 3  # two steps, one validation
        score_tasks(load_best(tmp_path, place=Place(device)), Protocol(tasks=2))
    assert len(moved) > trained
    assert set(moved) == {torch.uint8}


def test_the_best_validation_step_is_kept_and_loaded(tmp_path):
    outcome = train_run(tmp_path, config())
    steps = [checkpoint.step_of(path) for path in checkpoint.published(tmp_path)]
    assert outcome.best_step in steps
    assert load_best(tmp_path).system.iteration == outcome.best_step
    scores = [e["score"] for e in log(tmp_path) if e["event"] == "validation"]
    assert outcome.best_score == max(scores)


def test_training_stops_early_when_validation_no_longer_improves(tmp_path):
    chosen = config()
    frozen = replace(
        chosen,
        outer=replace(chosen.outer, lr=1e-30),
        memory=Part("none"),
        train=replace(chosen.train, steps=40, validate_every=2, patience=2),
    )
    outcome = train_run(tmp_path, frozen)
    assert outcome.ended == "early"
    assert outcome.iteration == 6


def test_a_memory_that_trains_after_the_learner_gets_as_much_time_before_training_stops(tmp_path):
    chosen = config(memory=AFTER)
    frozen = replace(
        chosen,
        outer=replace(chosen.outer, lr=1e-30),
        memory=chosen.memory.set(slot_lr=0.0, steps="same"),
        train=replace(chosen.train, steps=20, validate_every=2, patience=2),
    )
    told = []
    outcome = train_run(tmp_path, frozen, on_event=lambda *event: told.append(event))
    assert (outcome.ended, outcome.iteration) == ("early", 20 + 2 * 2)
    start = next(fields for event, _, fields in told if event == "start")
    assert (start["turn"], start["steps"]) == (20, 40)
    # Slots that are not there yet are not judged.
    judged = {step: fields["failed"] for event, step, fields in told if event == "validation"}
    assert [step for step, failed in judged.items() if failed] == [20, 22, 24]


def test_slots_that_help_nowhere_stop_training_half_way_and_that_is_told(tmp_path):
    chosen = config(memory=AFTER)
    in_vain = replace(
        chosen,
        memory=chosen.memory.set(slot_lr=0.0, steps=20),
        train=replace(chosen.train, validate_every=2),
    )
    told = []
    outcome = train_run(tmp_path, in_vain, on_event=lambda *event: told.append(event))
    assert (outcome.ended, outcome.iteration) == ("early", 4 + 20 // 2)
    step, fields = next((step, fields) for event, step, fields in told if event == "slots stopped")
    assert step == outcome.iteration
    assert "no slot helps on validation tasks" in fields["why"]


def test_a_memory_without_slots_adds_no_steps_to_a_run(tmp_path):
    chosen = config(memory=AFTER)
    none = replace(chosen, memory=chosen.memory.set(capacity=0))
    assert (chosen.outer_steps, none.outer_steps) == (9, 4)
    assert train_run(tmp_path / "slots", none).iteration == 4
    train_run(tmp_path / "none", replace(chosen, memory=Part("none")))
    first, second = (final_state(tmp_path / name) for name in ("slots", "none"))
    for name, tensor in first.groups["params"].items():
        assert torch.equal(tensor, second.groups["params"][name])


def test_a_step_that_is_not_finite_is_skipped_and_ten_in_a_row_stop_the_run(tmp_path, monkeypatch):
    real = experiment_module.Trainer.step
    bad = {3}

    def step(self, episode, **more):
        if self.iteration in bad:
            raise Diverged(f"outer step {self.iteration}: task 5 has a non-finite loss.")
        return real(self, episode, **more)

    monkeypatch.setattr(experiment_module.Trainer, "step", step)
    assert train_run(tmp_path / "once", config()).ended == "finished"
    skipped = [e for e in log(tmp_path / "once") if e["event"] == "skipped"]
    assert len(skipped) == 1
    assert "task 5" in skipped[0]["why"]
    bad |= set(range(5, 40))
    longer = replace(config(), train=replace(config().train, steps=40))
    with pytest.raises(Diverged):
        train_run(tmp_path / "often", longer)
    assert final_state(tmp_path / "often").step == 12  # saved on the way, before it gave up


@pytest.mark.parametrize("memory", ["gradients", "offsets", AFTER])
def test_opening_a_run_makes_nothing_that_trains(memory, tmp_path, monkeypatch):
    chosen = config(memory=memory)
    train_run(tmp_path, chosen)

    def refuse(self, *args, **kwargs):
        raise AssertionError(f"{type(self).__name__} was made")

    for kind in (torch.optim.Optimizer, torch.optim.Adam, torch.optim.SGD, SelfRecognition):
        monkeypatch.setattr(kind, "__init__", refuse)
    with pytest.raises(AssertionError, match="was made"):
        build_trainer(chosen, load_trained(tmp_path).shape)
    opened, trained = load_best(tmp_path), load_trained(tmp_path)
    assert len(score_tasks(opened, Protocol(tasks=4))["per_task"]) == 4
    for name, tensor in opened.system.params.items():
        assert torch.equal(tensor, trained.system.params[name])
        assert not tensor.requires_grad
    assert not opened.system.memory.training
