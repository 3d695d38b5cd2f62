"""Runs: resume is bitwise, what diverges is skipped and then stopped, other data are refused."""

import json
from dataclasses import replace

import pytest
import torch

from torchemo.config.run import (
    AggregatorConfig,
    DataConfig,
    EMOConfig,
    KeyConfig,
    LearnerConfig,
    MemoryConfig,
    ModelConfig,
    OuterConfig,
    RetrievalConfig,
    RunConfig,
    TrainConfig,
    ValueConfig,
)
from torchemo.core.errors import CheckpointError, ConfigError, DataError, Diverged, ResourceError
from torchemo.core.rng import generator_for
from torchemo.learners import LEARNERS
from torchemo.memory.aggregators import AGGREGATORS
from torchemo.memory.controllers import CONTROLLERS
from torchemo.runs import events
from torchemo.runs import experiment as experiment_module
from torchemo.runs.compare import compare, read_result
from torchemo.runs.load import load_best, read_config
from torchemo.runs.score import Protocol, score_run
from torchemo.runs.storage import checkpoint, history
from torchemo.runs.train import train_run

TASKS = DataConfig(source=("regression:hsml4",), n_shot=4, n_query=4)
AFTERWARDS = "afterwards"
"""Slots that consolidate after the learner has learned, as `config` is asked for them."""
KEYS = KeyConfig(embedder="pairs", dim=8, heads=2, ff=8, layers=1)


def config(learner="maml", *, aggregator="sum", controller="lru", consolidate=False, seed=0):
    memory = MemoryConfig(capacity=5, controller=controller)
    value = ValueConfig(recall_dropout=0.3)
    keys = KEYS
    if consolidate:
        memory = MemoryConfig(capacity=3, write="consolidate", warmup=3)
        value = ValueConfig(content="meta", recall_dropout=0.3)
        if consolidate == AFTERWARDS:
            memory = replace(memory, afterwards=0.5)
            value = replace(value, recall_dropout=0.0)
        keys = replace(KEYS, training="self_recognition", recognition_older=6, recognition_every=2)
    return RunConfig(
        learner=LearnerConfig(name=learner, inner_lr=0.01, steps=2, rate_init=(0.01, 0.02)),
        model=ModelConfig(name="mlp", hidden=(6,)),
        emo=EMOConfig(
            memory=memory,
            key=keys,
            retrieval=RetrievalConfig(
                k=3, familiar=0.9 if consolidate else None, trust=0.0 if consolidate else None
            ),
            aggregator=AggregatorConfig(kind=aggregator, layers=1),
            value=value,
        ),
        data=TASKS,
        train=TrainConfig(iterations=9, tasks=2, validate_every=4, validation_tasks=4, seed=seed),
    )


def stop_after(steps):
    """Ask to stop once this many outer steps are done."""
    seen = []

    def should_stop():
        seen.append(1)
        return len(seen) >= steps

    return should_stop


def final_state(root):
    return checkpoint.load(history.latest(root).path)


def log(root):
    return [
        {k: v for k, v in event.items() if k != "time"}
        for event in events.read(root / "events.jsonl")
    ]


def matrix():
    yield from (("maml", kind, "lru", False) for kind in AGGREGATORS)
    yield from (("maml", "sum", controller, False) for controller in CONTROLLERS)
    for learner in LEARNERS:
        if learner != "proto-maml":  # needs classes; its resume is shown on pictures below
            # Reptile has no gradient for what an aggregator learns.
            yield learner, "mean" if learner == "reptile" else "gated", "clock", False
            yield learner, "sum", "fifo", True
    yield "maml", "sum", "fifo", AFTERWARDS


@pytest.mark.parametrize(("learner", "aggregator", "controller", "consolidate"), list(matrix()))
def test_an_interrupted_run_ends_bit_for_bit_like_an_uninterrupted_one(
    learner, aggregator, controller, consolidate, tmp_path
):
    chosen = config(learner, aggregator=aggregator, controller=controller, consolidate=consolidate)
    train_run(tmp_path / "whole", chosen)
    parts = tmp_path / "parts"
    assert train_run(parts, chosen, should_stop=stop_after(3)).ended == "stopped"
    assert train_run(parts, should_stop=stop_after(4)).ended == "stopped"
    assert train_run(parts).ended == "finished"
    whole, resumed = final_state(tmp_path / "whole"), final_state(parts)
    assert whole.step == resumed.step == 9
    assert whole.info == resumed.info
    assert whole.groups.keys() == resumed.groups.keys()
    for group, tensors in whole.groups.items():
        assert tensors.keys() == resumed.groups[group].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, resumed.groups[group][name]), (group, name)
    assert log(tmp_path / "whole") == log(parts)
    # Consecutive checkpoints differ, so equality above means something.
    earlier = checkpoint.load(checkpoint.published(parts)[0])
    learning = "emo" if consolidate == AFTERWARDS else "params"
    assert any(
        not torch.equal(t, earlier.groups[learning][n]) for n, t in whole.groups[learning].items()
    )


def test_a_run_whose_optimizer_has_no_state_resumes_and_is_read_again(tmp_path):
    chosen = replace(config("reptile"), outer=OuterConfig(optimizer="sgd", lr=0.1, clip=None))
    train_run(tmp_path / "whole", chosen)
    train_run(tmp_path / "parts", chosen, should_stop=stop_after(3))
    train_run(tmp_path / "parts")
    whole, resumed = final_state(tmp_path / "whole"), final_state(tmp_path / "parts")
    best = load_best(tmp_path / "whole").trainer.params
    for name, tensor in whole.groups["params"].items():
        assert torch.equal(tensor, resumed.groups["params"][name])
        assert best[name].shape == tensor.shape


def test_proto_maml_on_pictures_resumes_bit_for_bit(tmp_path):
    chosen = RunConfig(
        learner=LearnerConfig(name="proto-maml", steps=1),
        model=ModelConfig(filters=2),
        data=DataConfig(image_size=16, classes_per_family=25, n_way=2, n_query=2),
        train=TrainConfig(iterations=4, tasks=2, validate_every=2, validation_tasks=2),
    )
    train_run(tmp_path / "whole", chosen)
    train_run(tmp_path / "parts", chosen, should_stop=stop_after(1))
    train_run(tmp_path / "parts")
    whole, resumed = final_state(tmp_path / "whole"), final_state(tmp_path / "parts")
    for name, tensor in whole.groups["params"].items():
        assert torch.equal(tensor, resumed.groups["params"][name])


def test_going_on_where_bits_may_differ_is_told(tmp_path):
    run, told = tmp_path / "run", []

    def tell(event, step, fields):
        if event == "environment":
            told.append((step, fields["why"]))

    train_run(run, config(), should_stop=stop_after(2))
    train_run(run, should_stop=stop_after(2), on_event=tell)
    assert told == []
    path = run / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "convolutions": "elsewhere"}))
    train_run(run, on_event=tell)
    ((step, why),) = told
    assert step > 0
    assert "not bit for bit" in why
    assert "convolutions elsewhere -> " in why


def test_a_run_is_not_written_over_and_its_configuration_is_read_back(tmp_path):
    chosen = config()
    train_run(tmp_path, chosen)
    assert read_config(tmp_path) == chosen
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
        patch.setattr("os.sysconf", lambda name: 10)  # ten pages of ten bytes
        with pytest.raises(ResourceError, match=r"5 slots takes .* this machine has 100 bytes"):
            train_run(tmp_path / "run", config())
    assert not (tmp_path / "run").exists()


def test_the_best_validation_step_is_kept_and_loaded(tmp_path):
    outcome = train_run(tmp_path, config())
    steps = [checkpoint.step_of(path) for path in checkpoint.published(tmp_path)]
    assert outcome.best_step in steps
    assert load_best(tmp_path).trainer.iteration == outcome.best_step
    scores = [e["score"] for e in log(tmp_path) if e["event"] == "validation"]
    assert outcome.best_score == max(scores)


def test_training_stops_early_when_validation_no_longer_improves(tmp_path):
    chosen = config()
    frozen = replace(
        chosen,
        outer=replace(chosen.outer, lr=1e-30),
        emo=replace(chosen.emo, memory=MemoryConfig(capacity=0)),
        train=replace(chosen.train, iterations=40, validate_every=2, patience=2),
    )
    outcome = train_run(tmp_path, frozen)
    assert outcome.ended == "early"
    assert outcome.iteration == 6


def test_slots_that_learn_afterwards_are_given_as_much_time_before_training_stops(tmp_path):
    chosen = config(consolidate=AFTERWARDS)
    still = replace(chosen.emo.memory, slot_lr=0.0, slot_key_lr=0.0)
    frozen = replace(
        chosen,
        outer=replace(chosen.outer, lr=1e-30),
        emo=replace(chosen.emo, memory=still),
        train=replace(chosen.train, iterations=40, validate_every=2, patience=2),
    )
    told = []
    outcome = train_run(tmp_path, frozen, on_event=lambda *event: told.append(event))
    assert (outcome.ended, outcome.iteration) == ("early", 20 + 2 * 2)
    assert next(fields["turn"] for event, _, fields in told if event == "start") == 20
    # Slots that are not there yet are not judged.
    judged = {step: fields["doubted"] for event, step, fields in told if event == "validation"}
    assert [step for step, doubted in judged.items() if doubted] == [20, 22, 24]


def test_a_step_that_is_not_finite_is_skipped_and_ten_in_a_row_stop_the_run(tmp_path, monkeypatch):
    real = experiment_module.Trainer.step
    bad = {3}

    def step(self, episode):
        if self.iteration in bad:
            raise Diverged(f"outer step {self.iteration}: task 5 has a non-finite loss.")
        return real(self, episode)

    monkeypatch.setattr(experiment_module.Trainer, "step", step)
    assert train_run(tmp_path / "once", config()).ended == "finished"
    skipped = [e for e in log(tmp_path / "once") if e["event"] == "skipped"]
    assert len(skipped) == 1
    assert "task 5" in skipped[0]["why"]
    bad |= set(range(5, 40))
    longer = replace(config(), train=replace(config().train, iterations=40))
    with pytest.raises(Diverged):
        train_run(tmp_path / "often", longer)
    assert final_state(tmp_path / "often").step == 12  # saved on the way, before it gave up


def test_test_tasks_are_scored_per_task_and_compared_in_pairs(tmp_path):
    protocol = Protocol(tasks=12)
    for name, capacity in (("base", 0), ("memory", 5)):
        chosen = config()
        emo = replace(chosen.emo, memory=MemoryConfig(capacity=capacity))
        train_run(tmp_path / name, replace(chosen, emo=emo))
        record = score_run(tmp_path / name, load_best(tmp_path / name), protocol)
        assert len(record["per_task"]) == 12
        assert len(record["per_task"][0]) == 3  # after 0, 1 and 2 steps
    base, memory = (read_result(tmp_path / name) for name in ("base", "memory"))
    found = compare([base], [memory])
    pairs = [b[-1] - a[-1] for a, b in zip(base["per_task"], memory["per_task"], strict=True)]
    assert found["difference"]["difference"]["value"] == pytest.approx(sum(pairs) / 12)
    assert (base["method"], memory["method"]) == ("MAML", "MAML + EMO")
    json.dumps(found, allow_nan=False)


def test_a_result_says_how_many_tasks_were_familiar_to_a_memory_that_judges_it(tmp_path):
    train_run(tmp_path / "run", config(consolidate=True))
    experiment = load_best(tmp_path / "run")
    emo, protocol = experiment.trainer.emo, Protocol(tasks=12)
    emo.trust = None

    def share():
        return score_run(tmp_path / "run", experiment, protocol)["familiar"]

    tasks = experiment.source.sample("test", seed=0, start=0, count=12, n_query=None)
    fourth = emo.encode(tasks.support)[:, 0].sort().values[3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emo.familiarity, "forward", lambda keys: keys[:, 0] <= fourth)
        assert share() == pytest.approx(4 / 12)
    noise = torch.randn(64, emo.memory.key_dim, generator=generator_for(0))
    emo.familiarity.see(1e3 + noise)
    assert share() == 0.0
    emo.familiarity = None
    assert share() is None


def test_runs_on_other_tasks_are_not_compared(tmp_path):
    train_run(tmp_path / "run", config())
    experiment = load_best(tmp_path / "run")
    one = score_run(tmp_path / "run", experiment, Protocol(tasks=4))
    other = score_run(tmp_path / "run", experiment, Protocol(tasks=4, seed=1))
    with pytest.raises(DataError, match="protocol differs"):
        compare([one], [other])
    with pytest.raises(DataError, match="torchemo eval"):
        read_result(tmp_path / "run", protocol="paper")


def test_several_seeds_are_compared_one_to_one(tmp_path):
    results = {}
    for seed in (0, 1):
        for name, capacity in (("base", 0), ("memory", 5)):
            chosen = config(seed=seed)
            root = tmp_path / f"{name}{seed}"
            train_run(
                root,
                replace(chosen, emo=replace(chosen.emo, memory=MemoryConfig(capacity=capacity))),
            )
            results[name, seed] = score_run(root, load_best(root), Protocol(tasks=6))
    found = compare([results["base", s] for s in (0, 1)], [results["memory", s] for s in (0, 1)])
    assert found["seeds"] == 2
    assert "both" in found["over_seeds"]
    with pytest.raises(DataError, match="one to one"):
        compare([results["base", 0]], [results["memory", 0], results["memory", 1]])
