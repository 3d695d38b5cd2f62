"""When to skip recall: the rules against loops, and what they change of a recall and of a run."""

import copy
import json
import math

import numpy as np
import pytest
import torch

from torchemo.apps.cli.memory import ShowMemory
from torchemo.config.registry import Part
from torchemo.config.run import DataConfig, RunConfig, TrainConfig
from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.core.types import Recall
from torchemo.memory import MEMORIES
from torchemo.memory.offsets import OffsetMemory
from torchemo.memory.recall import Retrieval
from torchemo.memory.selective import BOUND, RIDGE, SkipUnfamiliar, SkipUnhelpful, _left_out
from torchemo.memory.store import EpisodicMemory
from torchemo.runs import events
from torchemo.runs.folder import RunFolder
from torchemo.runs.load import load_best
from torchemo.runs.score import Protocol, memory_digest, score_run
from torchemo.runs.train import train_run
from torchemo.training.evaluate import evaluate, judge_slots

DIM, SLOTS = 6, 4


def recall_of(*, keys=None, slots=None, weights=None):
    """A recall of which a rule sees the keys, or the slots and their weights."""
    keys = torch.zeros(len(slots), DIM) if keys is None else keys
    slots = torch.zeros(len(keys), 0, dtype=torch.int64) if slots is None else slots
    weights = torch.zeros(slots.shape) if weights is None else weights
    active = torch.ones(len(keys), dtype=torch.bool)
    return Recall(
        keys, slots, torch.zeros(slots.shape), weights, {}, torch.ones_like(slots), active
    )


# -- tasks unlike those of training --------------------------------------------------------------------


def keys(n, seed, *, scale=1.0):
    """Draw keys that differ in two of six dimensions and hardly in the others, on the unit sphere."""
    g = generator_for(seed, "keys")
    drawn = torch.randn(n, DIM, generator=g, dtype=torch.float64)
    drawn *= torch.tensor([1.0, 1.0, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64) * scale
    drawn = drawn + torch.tensor([3.0, 0, 0, 0, 0, 0], dtype=torch.float64)
    return (drawn / drawn.norm(dim=1, keepdim=True)).float()


def after(seen, *, share=0.9, window=None):
    made = SkipUnfamiliar(DIM, share=share, window=window)
    for part in seen.split(5):
        made.see(part)
    return made


def allowed(made, fresh):
    return made.allows(recall_of(keys=fresh))


def squared(key, others, ridge):
    """Return the Mahalanobis distance of one key to the others, by the textbook."""
    centre, spread = others.mean(0), np.cov(others.T) + ridge * np.eye(DIM)
    return float((key - centre) @ np.linalg.inv(spread) @ (key - centre))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_the_verdict_is_that_of_a_loop_which_leaves_out_one_key_at_a_time(share):
    seen, fresh = keys(48, 0), keys(200, 1, scale=1.5)
    made = after(seen, share=share)
    kept = made.keys.double().numpy()
    ridge = RIDGE * np.cov(kept.T).diagonal().mean()
    own = [squared(kept[i], np.delete(kept, i, 0), ridge) for i in range(len(kept))]
    limit = np.quantile(own, share)
    expected = [squared(key, kept, ridge) <= limit for key in fresh.double().numpy()]
    assert allowed(made, fresh).tolist() == expected
    assert 0 < sum(expected) < len(expected)


def test_distances_to_all_others_are_those_of_the_loop():
    kept = keys(30, 0).double()
    away, covariance = kept - kept.mean(0), torch.cov(kept.T)
    got = _left_out(away, covariance, 0.3 * torch.eye(DIM, dtype=torch.float64))
    others = [np.delete(kept.numpy(), i, 0) for i in range(30)]
    expected = [squared(kept[i].numpy(), others[i], 0.3) for i in range(30)]
    assert got.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("share", [0.8, 0.95])
def test_about_this_share_of_unseen_tasks_of_the_same_kind_uses_its_recall(share):
    made = after(keys(400, 0), share=share, window=400)
    assert float(allowed(made, keys(4000, 1)).double().mean()) == pytest.approx(share, abs=0.04)


def test_a_key_is_unfamiliar_when_it_leaves_the_dimensions_of_training_though_slots_are_near():
    seen = keys(48, 0)
    made = after(seen)
    unfamiliar = seen[:1].clone()
    unfamiliar[0, 4] += 0.15  # less than what keys of training are apart
    assert float((seen - seen.mean(0)).norm(dim=1).median()) > 0.15
    both = torch.cat([seen.mean(0, keepdim=True), unfamiliar])
    assert allowed(made, both).tolist() == [True, False]


def test_all_tasks_use_their_recall_until_enough_were_seen():
    far = 100 * torch.ones(1, DIM)
    assert allowed(after(keys(2 * DIM - 1, 0)), far).tolist() == [True]
    assert allowed(after(keys(2 * DIM, 0)), far).tolist() == [False]


def test_the_last_keys_are_kept_whatever_the_batches():
    seen = keys(70, 0)
    small, large = SkipUnfamiliar(DIM, window=24), SkipUnfamiliar(DIM, window=24)
    for part in seen.split(4):
        small.see(part)
    large.see(seen)
    for made in (small, large):
        assert {tuple(k.tolist()) for k in made.keys} == {tuple(k.tolist()) for k in seen[-24:]}
    assert torch.equal(small.keys, large.keys)


def test_a_saved_state_judges_the_same():
    made, fresh = after(keys(40, 0)), keys(50, 1, scale=2.0)
    other = SkipUnfamiliar(DIM, share=0.9)
    other.load_state_dict(copy.deepcopy(made.state_dict()))
    assert torch.equal(allowed(other, fresh), allowed(made, fresh))
    for one in (made, other):
        one.see(keys(20, 2))
    assert torch.equal(other.keys, made.keys)


def test_judging_changes_nothing():
    made = after(keys(40, 0))
    before = copy.deepcopy(made.state_dict())
    allowed(made, keys(9, 1))
    assert all(torch.equal(before[name], value) for name, value in made.state_dict().items())


def test_keys_without_any_spread_are_no_reason_to_fail():
    made = after(torch.ones(30, DIM))
    assert allowed(made, torch.ones(1, DIM)).tolist() == [True]


@pytest.mark.parametrize("options", [{"share": 0.0}, {"share": 1.0}, {"window": 2 * DIM - 1}])
def test_what_cannot_be_judged_by_is_refused(options):
    with pytest.raises(ConfigError, match="skip_unfamiliar"):
        SkipUnfamiliar(DIM, **options)


# -- slots that do not help on new classes -------------------------------------------------------------


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
    """Return which slots fail, one slot and one task at a time."""
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
    rule = SkipUnhelpful(SLOTS, least=least)
    rule.judge(slots, weights, gains)
    assert rule.failed.tolist() == by_loop(slots, weights, gains, least)
    assert rule.failed.tolist()[0] is False
    assert rule.failed.tolist()[2] is True


def test_all_slots_pass_until_they_are_judged_and_one_that_nobody_recalled_fails():
    slots, weights, gains = recalls()
    rule = SkipUnhelpful(SLOTS + 1)
    assert bool(rule.allows(recall_of(slots=slots, weights=weights)).all())
    rule.judge(slots, weights, gains)
    assert bool(rule.failed[SLOTS])
    rule.judge(slots, weights, torch.ones_like(gains))  # anew, not on top
    assert rule.failed.tolist() == [False] * SLOTS + [True]


def test_a_task_needs_half_of_its_weight_on_slots_that_passed():
    rule = SkipUnhelpful(3)
    rule.failed[0] = True
    slots = torch.tensor([[0, 1, 2], [1, 0, 2], [2, 0, 1], [0, 1, 2]])
    weights = torch.tensor([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
    assert rule.allows(recall_of(slots=slots, weights=weights)).tolist() == [
        False,
        True,
        True,
        True,
    ]


def test_a_memory_without_slots_that_last_has_nothing_to_judge():
    with pytest.raises(ConfigError, match="skip_unhelpful") as caught:
        MEMORIES.resolve(Part("gradients", {"capacity": 4, "skip_unhelpful": 0.0}))
    assert "offsets" in caught.value.hint
    with pytest.raises(ConfigError, match="has none to judge"):
        SkipUnhelpful(0)


def test_both_rules_must_allow_a_task_its_recall():
    axis = torch.eye(DIM)
    store = EpisodicMemory(2, DIM)
    store.seed(torch.stack([axis[0], -axis[0]]), {"w": torch.Size([1])})
    memory = OffsetMemory(
        store,
        Retrieval(None, weights="softmax"),
        skip_unfamiliar=SkipUnfamiliar(DIM),
        skip_unhelpful=SkipUnhelpful(2),
    )
    noise = 0.05 * torch.randn(48, DIM, generator=generator_for(0))
    memory.skip_unfamiliar.see(store.keys.repeat(24, 1) + noise)
    memory.skip_unhelpful.failed[1] = True
    keys = torch.stack([axis[0], -axis[0], axis[0] + 3 * axis[1], -axis[0] + 3 * axis[1]])
    assert memory.recall(keys).active.all()
    recall = memory.eval().recall(keys)
    assert memory.skip_unfamiliar.allows(recall).tolist() == [True, True, False, False]
    assert recall.active.tolist() == [True, False, False, False]
    assert (recall.weights.sum(1) > 0).tolist() == recall.active.tolist()


# -- in a run ------------------------------------------------------------------------------------------

KEY = Part(
    "transformer",
    {
        "embedder": "pairs",
        "dim": 8,
        "heads": 2,
        "ff": 8,
        "layers": 1,
        "training": "self_recognition",
        "recognition_older": 6,
    },
)
OFFSETS = Part(
    "offsets",
    {"capacity": 3, "warmup": 3, "k": 3, "recall_dropout": 0.3, "skip_unfamiliar": 0.9, "key": KEY},
)
JUDGING = OFFSETS.set(skip_unhelpful=0.0)


def config(memory):
    return RunConfig(
        learner=Part("maml", {"inner_lr": 0.01, "steps": 2}),
        model=Part("mlp", {"hidden": (6,)}),
        memory=memory,
        data=DataConfig(source=("regression:hsml4",), n_shot=4, n_query=4),
        train=TrainConfig(steps=9, tasks=2, validate_every=4, validation_tasks=4),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose memory judges its slots."""
    root = tmp_path_factory.mktemp("runs") / "judging"
    train_run(root, config(JUDGING))
    return root


def opened(run, *, tasks=24):
    """Open the run at its end, with validation tasks in two batches, and slots that change the start."""
    found = load_best(run, step=9)
    found.system.memory.skip_unfamiliar = None
    sample = found.source.sample
    episodes = [sample("val", seed=3, start=s, count=tasks // 2) for s in (0, tasks // 2)]
    return found.system, episodes


def scored(system, episodes, memory):
    """Return the scores of all tasks after the last step."""
    return evaluate(system.learner, system.params, episodes, memory=memory, every_step=False)


def both(system, episodes):
    """Return the losses of all tasks with their recall and without."""
    system.memory.skip_unhelpful.failed.zero_()
    return (scored(system, episodes, memory).loss[:, -1] for memory in (system.memory, None))


def test_slots_are_judged_by_the_gain_of_the_tasks_that_recall_them(run):
    system, episodes = opened(run)
    memory = system.memory
    given, alone = both(system, episodes)
    assert not torch.equal(given, alone)
    found = [system.predict(episode).recall for episode in episodes]
    memory.train()
    expected = SkipUnhelpful(len(memory.skip_unhelpful.failed))
    slots, weights = torch.cat([r.slots for r in found]), torch.cat([r.weights for r in found])
    expected.judge(slots, weights, alone - given)  # squared errors: less is better
    scores = judge_slots(system.learner, system.params, episodes, memory=memory)
    assert torch.equal(memory.skip_unhelpful.failed, expected.failed)
    allowed = expected.allows(recall_of(slots=slots, weights=weights))
    assert torch.equal(scores.loss[:, -1], torch.where(allowed, given, alone))
    assert torch.equal(scores.recalled, allowed)
    assert memory.training
    again = scored(system, episodes, memory)
    torch.testing.assert_close(again.loss, scores.loss)
    assert torch.equal(again.recalled, allowed)


def test_a_slot_that_failed_leaves_its_tasks_to_the_learner_alone_in_evaluation_only(run):
    system, episodes = opened(run)
    memory, keys = system.memory, system.memory.encode(episodes[0].support).detach()
    _, alone = both(system, episodes)
    memory.skip_unhelpful.failed.fill_(True)
    skipped = scored(system, episodes, memory)
    assert torch.equal(skipped.loss[:, -1], alone)
    assert not skipped.recalled.any()
    assert not memory.eval().recall(keys).active.any()
    index = torch.arange(len(keys))
    judged = memory.train().recall(keys, index=index)
    memory.skip_unhelpful = None
    assert torch.equal(judged.weights, memory.recall(keys, index=index).weights)


def test_a_memory_that_uses_all_slots_cannot_be_made_to_judge(run):
    system, episodes = opened(run)
    system.memory.skip_unhelpful = None
    with pytest.raises(ConfigError, match="uses all of its slots"):
        judge_slots(system.learner, system.params, episodes, memory=system.memory)


def test_validations_and_results_say_which_slots_failed(run):
    said = [e for e in events.read(RunFolder(run).events) if e["event"] == "validation"]
    assert [e["step"] for e in said] == [4, 8, 9]
    last = failed_at(run, 9)
    assert said[-1]["failed"] == last
    found = load_best(run)
    memory = found.system.memory
    memory.skip_unhelpful.failed.fill_(True)
    before = memory_digest(memory)
    record = score_run(run, found, Protocol(tasks=6))
    assert (record["recalled"], record["failed"]) == (0.0, [0, 1, 2])
    assert memory_digest(memory) == before


def failed_at(run, step):
    return (
        load_best(run, step=step).system.memory.skip_unhelpful.failed.nonzero().flatten().tolist()
    )


def test_training_is_the_same_with_and_without_judgement(tmp_path):
    losses = []
    for name, memory in (("judging", JUDGING), ("plain", OFFSETS)):
        train_run(tmp_path / name, config(memory))
        steps = events.read(RunFolder(tmp_path / name).events)
        losses.append([e["loss"] for e in steps if e["event"] == "step"])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 9


def test_showing_a_memory_names_the_slots_that_failed(run, capsys):
    failed = failed_at(run, 9)
    ShowMemory(run, step=9, json=True).run()
    assert json.loads(capsys.readouterr().out)["failed"] == failed
    ShowMemory(run, step=9).run()
    said = f"failed validation, and are skipped in evaluation: {', '.join(map(str, failed))}"
    assert failed
    assert said in capsys.readouterr().out
