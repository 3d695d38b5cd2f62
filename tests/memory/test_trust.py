"""Trust: against a loop over slots and tasks, what it changes of a recall, and who is judged by what."""

import json
import math
from dataclasses import replace

import pytest
import torch

from tests.runs.test_train import config
from torchemo.apps.cli.memory import ShowMemory
from torchemo.config.run import EMOConfig, MemoryConfig, RetrievalConfig
from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.memory.trust import BOUND, Trust
from torchemo.runs import events
from torchemo.runs.folder import RunFolder
from torchemo.runs.load import load_best
from torchemo.runs.score import Protocol, memory_digest, score_run
from torchemo.runs.train import train_run
from torchemo.training.evaluate import evaluate, evaluate_trust
from torchemo.training.step import look_up

SLOTS = 4


def recalls(tasks=40, *, seed=0):
    """Draw recalls of all slots, nearest first, the last slot hardly ever, and gains that differ by slot."""
    g = generator_for(seed, "recalls")
    weights = (3 * torch.randn(tasks, SLOTS, generator=g)).softmax(1)
    slots = torch.stack([torch.randperm(SLOTS, generator=g) for _ in range(tasks)])
    ordered = torch.zeros_like(weights).scatter_(1, slots, weights)
    worth = torch.tensor([0.3, 0.02, -0.3, 0.1])
    gains = (ordered * worth).sum(1) + 0.1 * torch.randn(tasks, generator=g)
    return slots, weights, gains


def by_loop(slots, weights, gains, least):
    """Return which slots are doubted, one slot and one task at a time."""
    found = []
    for slot in range(SLOTS):
        pairs = [
            (float(a), float(d))
            for row, own, d in zip(slots, weights, gains, strict=True)
            for j, a in zip(row.tolist(), own, strict=True)
            if j == slot
        ]
        total = sum(a for a, _ in pairs)
        gain = sum(a * d for a, d in pairs) / total
        error = math.sqrt(sum((a * (d - gain)) ** 2 for a, d in pairs)) / total
        found.append(not gain - BOUND * error > least)
    return found


@pytest.mark.parametrize("least", [-0.1, 0.0, 0.05])
@pytest.mark.parametrize("seed", range(4))
def test_slots_are_judged_as_by_a_loop(least, seed):
    slots, weights, gains = recalls(seed=seed)
    trust = Trust(SLOTS, least=least)
    trust.judge(slots, weights, gains)
    assert trust.doubted.tolist() == by_loop(slots, weights, gains, least)
    assert trust.doubted.tolist()[0] is False
    assert trust.doubted.tolist()[2] is True


def test_all_are_trusted_until_they_are_judged_and_what_nobody_recalled_is_not_shown_to_help():
    slots, weights, gains = recalls()
    trust = Trust(SLOTS + 1)
    assert bool(trust(slots, weights).all())
    trust.judge(slots, weights, gains)
    assert bool(trust.doubted[SLOTS])
    trust.judge(slots, weights, torch.ones_like(gains))  # anew, not on top
    assert trust.doubted.tolist() == [False] * SLOTS + [True]


def test_a_task_needs_half_of_its_weight_on_trusted_slots():
    trust = Trust(3)
    trust.doubted[0] = True
    slots = torch.tensor([[0, 1, 2], [1, 0, 2], [2, 0, 1], [0, 1, 2]])
    weights = torch.tensor([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
    assert trust(slots, weights).tolist() == [False, True, True, True]


def test_a_memory_without_slots_that_last_has_nothing_to_judge():
    with pytest.raises(ConfigError, match="judges slots that last"):
        EMOConfig(memory=MemoryConfig(capacity=4), retrieval=RetrievalConfig(trust=0.0))
    with pytest.raises(ConfigError, match="has none to judge"):
        Trust(0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose memory judges its slots."""
    root = tmp_path_factory.mktemp("runs") / "trusting"
    train_run(root, config(consolidate=True))
    return root


def opened(run, *, tasks=24):
    """Open the run at its end, with validation tasks in two batches, and slots that change the start."""
    experiment = load_best(run, step=9)
    trainer = experiment.trainer
    trainer.emo.familiarity = None
    sample = experiment.source.sample
    episodes = [sample("val", seed=3, start=s, count=tasks // 2) for s in (0, tasks // 2)]
    return trainer, episodes


def both(trainer, episodes):
    """Return the losses of all tasks with their recall and without."""
    trainer.emo.trust.doubted.zero_()
    return (
        evaluate(trainer.learner, trainer.params, episodes, emo=emo, every_step=False).loss[:, -1]
        for emo in (trainer.emo, None)
    )


def test_slots_are_judged_by_the_gain_of_the_tasks_that_recall_them(run):
    trainer, episodes = opened(run)
    emo = trainer.emo
    given, alone = both(trainer, episodes)
    assert not torch.equal(given, alone)
    emo.eval()
    found = [look_up(trainer.learner, trainer.params, e, emo=emo) for e in episodes]
    emo.train()
    expected = Trust(len(emo.trust.doubted))
    slots, weights = torch.cat([r.slots for r in found]), torch.cat([r.weights for r in found])
    expected.judge(slots, weights, alone - given)  # squared errors: less is better
    scores = evaluate_trust(trainer.learner, trainer.params, episodes, emo=emo)
    assert torch.equal(emo.trust.doubted, expected.doubted)
    assert torch.equal(scores.loss[:, -1], torch.where(expected(slots, weights), given, alone))
    assert emo.training
    again = evaluate(trainer.learner, trainer.params, episodes, emo=emo, every_step=False)
    torch.testing.assert_close(again.loss, scores.loss)


def test_a_doubted_slot_leaves_its_tasks_to_the_learner_alone_in_evaluation_only(run):
    trainer, episodes = opened(run)
    emo, keys = trainer.emo, trainer.emo.encode(episodes[0].support).detach()
    _, alone = both(trainer, episodes)
    emo.trust.doubted.fill_(True)
    silent = evaluate(trainer.learner, trainer.params, episodes, emo=emo, every_step=False)
    assert torch.equal(silent.loss[:, -1], alone)
    assert not emo.eval().recall(keys).active.any()
    index = torch.arange(len(keys))
    with_doubt = emo.train().recall(keys, index=index)
    emo.trust = None
    assert torch.equal(with_doubt.weights, emo.recall(keys, index=index).weights)


def test_one_that_trusts_all_cannot_be_made_to_judge(run):
    trainer, episodes = opened(run)
    trainer.emo.trust = None
    with pytest.raises(ConfigError, match="trusts all"):
        evaluate_trust(trainer.learner, trainer.params, episodes, emo=trainer.emo)


def test_validations_say_which_slots_are_doubted_and_results_too(run):
    said = [e for e in events.read(RunFolder(run).events) if e["event"] == "validation"]
    assert [e["step"] for e in said] == [4, 8, 9]
    last = load_best(run, step=9).trainer.emo.trust.doubted.nonzero().flatten().tolist()
    assert said[-1]["doubted"] == last
    experiment = load_best(run)
    emo = experiment.trainer.emo
    emo.trust.doubted.fill_(True)
    before = memory_digest(emo)
    record = score_run(run, experiment, Protocol(tasks=6))
    assert (record["familiar"], record["doubted"]) == (0.0, [0, 1, 2])
    assert memory_digest(emo) == before


def test_training_is_the_same_with_and_without_judgement(tmp_path):
    trusting = config(consolidate=True)
    emo = replace(trusting.emo, retrieval=replace(trusting.emo.retrieval, trust=None))
    losses = []
    for name, one in (("trusting", trusting), ("plain", replace(trusting, emo=emo))):
        train_run(tmp_path / name, one)
        steps = events.read(RunFolder(tmp_path / name).events)
        losses.append([e["loss"] for e in steps if e["event"] == "step"])
    assert losses[0] == losses[1]


def test_showing_a_memory_names_the_slots_that_are_not_trusted(run, capsys):
    doubted = load_best(run, step=9).trainer.emo.trust.doubted.nonzero().flatten().tolist()
    ShowMemory(run, step=9, json=True).run()
    assert json.loads(capsys.readouterr().out)["doubted"] == doubted
    ShowMemory(run, step=9).run()
    said = f"did not help on validation tasks: {', '.join(map(str, doubted))}"
    assert doubted
    assert said in capsys.readouterr().out
