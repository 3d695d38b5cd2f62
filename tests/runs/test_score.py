"""Test results: every task once, as a plain loop over tasks would score it."""

import json

import pytest
import torch

from tests.runs.small import config
from torchemo.core.errors import DataError
from torchemo.core.rng import generator_for
from torchemo.runs.load import load_best
from torchemo.runs.score import Protocol, memory_digest, result_file, score_run, score_tasks
from torchemo.runs.train import train_run

INNER_RATE, INNER_STEPS = 0.01, 2
"""Those of the small runs."""


def trained(root, **options):
    train_run(root, config(**options))
    return load_best(root)


def half_failed(memory, source):
    """Let the slots fail on which the first test task puts most weight."""
    first = source.sample("test", seed=0, start=0, count=1, n_query=None)
    recall = memory.recall(memory.encode(first.support))
    memory.skip_unhelpful.failed.zero_()
    memory.skip_unhelpful.failed[recall.slots[0, recall.weights[0].argmax()]] = True


def start_by_hand(system, recall):
    """Add the recalled offsets, each times its weight, to the initialisation."""
    theta = {n: p.clone() for n, p in system.params.items()}
    if recall is None or not system.memory.offsets_start or not bool(recall.active[0]):
        return theta
    for name, value in system.memory.store.values.items():
        for weight, slot in zip(recall.weights[0], recall.slots[0], strict=True):
            theta[name] = theta[name] + weight.detach() * value[slot]
    return theta


def task_by_hand(system, episode):
    """Score one task after 0, 1, ... steps of plain SGD; and whether it used its recall."""
    model, memory, recall = system.learner.model, system.memory, None
    if memory is not None:
        recall = memory.recall(memory.encode(episode.support))
    theta, losses = start_by_hand(system, recall), []
    for step in range(INNER_STEPS + 1):
        theta = {n: t.detach().requires_grad_() for n, t in theta.items()}
        tasks = {n: t[None] for n, t in theta.items()}
        with torch.no_grad():
            losses.append(float((model(tasks, episode.query.x) - episode.query.y).square().mean()))
        error = (model(tasks, episode.support.x) - episode.support.y).square().mean()
        grads = dict(zip(theta, torch.autograd.grad(error, list(theta.values())), strict=True))
        if recall is not None:
            joined = memory.combine({n: g[None] for n, g in grads.items()}, recall, step=step)
            grads = {n: g[0] for n, g in joined.items()}
        theta = {n: t - INNER_RATE * grads[n] for n, t in theta.items()}
    return losses, recall is not None and bool(recall.active[0])


@pytest.mark.parametrize("memory", ["none", "gradients", "offsets"])
def test_a_result_is_that_of_a_loop_over_single_tasks(memory, tmp_path):
    opened = trained(tmp_path, memory=memory)
    system, source = opened.system, opened.source
    if memory == "offsets":
        half_failed(system.memory, source)
    if memory != "none":  # there is something to recall
        assert any(value.any() for value in system.memory.store.values.values())
    record = score_tasks(opened, Protocol(tasks=14))
    expected, used = [], []
    for start in range(14):
        task = source.sample("test", seed=0, start=start, count=1, n_query=None)
        losses, recalled = task_by_hand(system, task)
        expected.append(losses)
        used.append(recalled)
        assert record["domain"][start] == int(task.domain)
    assert torch.allclose(torch.tensor(record["per_task"]), torch.tensor(expected), atol=1e-5)
    assert record["episode"] == list(range(14))
    assert record["summary"]["last"]["value"] == pytest.approx(
        sum(losses[-1] for losses in expected) / 14, rel=1e-5
    )
    if memory == "offsets":
        assert 0 < sum(used) < 14  # some skip their recall, others do not
        assert record["recalled"] == pytest.approx(sum(used) / 14)
        assert record["failed"] == system.memory.skip_unhelpful.failed.nonzero().flatten().tolist()
    else:
        assert record["recalled"] is record["failed"] is None


def test_every_test_task_is_drawn_encoded_and_recalled_once(tmp_path, monkeypatch):
    opened = trained(tmp_path, memory="offsets")
    drawn, encoded, recalled = [], [], []
    memory, kind = opened.system.memory, type(opened.source)
    sample, encode, recall = kind.sample, memory.encode, memory.recall

    def drawing(self, split, **which):
        drawn.append((split, which["start"], which["count"]))
        return sample(self, split, **which)

    def encoding(support, *args):
        encoded.append(len(support.x))
        return encode(support, *args)

    def recalling(keys, **about):
        recalled.append(len(keys))
        return recall(keys, **about)

    monkeypatch.setattr(kind, "sample", drawing)
    monkeypatch.setattr(memory, "encode", encoding)
    monkeypatch.setattr(memory, "recall", recalling)
    assert score_tasks(opened, Protocol(tasks=10))["recalled"] is not None
    assert drawn == [("test", 0, 4), ("test", 4, 4), ("test", 8, 2)]
    assert encoded == recalled == [4, 4, 2]


def test_the_last_step_alone_is_the_last_column(tmp_path):
    opened = trained(tmp_path)
    whole = score_tasks(opened, Protocol(tasks=6))["per_task"]
    last = score_tasks(opened, Protocol(tasks=6), every_step=False)["per_task"]
    assert last == [row[-1:] for row in whole]
    assert len(whole[0]) == INNER_STEPS + 1


def test_the_record_is_written_beside_the_run(tmp_path):
    opened = trained(tmp_path)
    record = score_run(tmp_path, opened, Protocol(tasks=4))
    other = score_run(tmp_path, opened, Protocol(tasks=4), on="birds/2 & more")
    name = result_file(tmp_path, Protocol(), on="birds/2 & more").name
    for file, expected in (("eval-test-standard.json", record), (name, other)):
        written = json.loads((tmp_path / file).read_text())
        assert len(written.pop("sha256")) == 64
        assert written == expected
    assert name == "eval-test-standard-birds_2___more.json"
    assert record["memory_sha256"] == memory_digest(opened.system.memory)


def test_a_result_is_refused_if_evaluation_changed_the_memory(tmp_path, monkeypatch):
    opened = trained(tmp_path)
    store, kind = opened.system.memory.store, type(opened.source)
    sample = kind.sample

    def spoiling(self, split, **which):
        store.keys[0] += 1
        return sample(self, split, **which)

    monkeypatch.setattr(kind, "sample", spoiling)
    with pytest.raises(DataError, match="evaluation changed the memory"):
        score_tasks(opened, Protocol(tasks=4))


def test_a_result_says_how_many_tasks_used_their_recall_if_some_may_skip_it(tmp_path):
    opened = trained(tmp_path / "run", memory="offsets")
    memory, protocol = opened.system.memory, Protocol(tasks=12)
    memory.skip_unhelpful = None

    def share():
        return score_run(tmp_path / "run", opened, protocol)["recalled"]

    tasks = opened.source.sample("test", seed=0, start=0, count=12, n_query=None)
    fourth = memory.encode(tasks.support)[:, 0].sort().values[3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.skip_unfamiliar, "allows", lambda recall: recall.keys[:, 0] <= fourth)
        assert share() == pytest.approx(4 / 12)
    noise = torch.randn(64, memory.store.key_dim, generator=generator_for(0))
    memory.skip_unfamiliar.see(1e3 + noise)
    assert share() == 0.0
    memory.skip_unfamiliar = None
    assert share() is None


def test_the_method_is_named_by_learner_and_memory(tmp_path):
    for place, options, name in (
        ("base", {"memory": "none"}, "MAML"),
        ("paper", {}, "MAML + EMO"),
        ("offsets", {"memory": "offsets", "learner": "anil"}, "ANIL + offsets"),
    ):
        opened = trained(tmp_path / place, **options)
        assert score_tasks(opened, Protocol(tasks=2))["method"] == name
