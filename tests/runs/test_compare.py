"""Results compared in pairs: the same tasks, seed by seed."""

import json

import pytest

from tests.runs.small import config
from torchemo.core.errors import DataError
from torchemo.runs.compare import compare, read_result
from torchemo.runs.load import load_best
from torchemo.runs.score import Protocol, score_run
from torchemo.runs.storage.seal import with_digest
from torchemo.runs.train import train_run


def test_test_tasks_are_scored_per_task_and_compared_in_pairs(tmp_path):
    protocol = Protocol(tasks=12)
    for name in ("none", "gradients"):
        train_run(tmp_path / name, config(memory=name))
        record = score_run(tmp_path / name, load_best(tmp_path / name), protocol)
        assert len(record["per_task"]) == 12
        assert len(record["per_task"][0]) == 3  # after 0, 1 and 2 steps
    base, memory = (read_result(tmp_path / name) for name in ("none", "gradients"))
    found = compare([base], [memory])
    pairs = [b[-1] - a[-1] for a, b in zip(base["per_task"], memory["per_task"], strict=True)]
    assert found["difference"]["difference"]["value"] == pytest.approx(sum(pairs) / 12)
    assert (base["method"], memory["method"]) == ("MAML", "MAML + EMO")
    json.dumps(found, allow_nan=False)


def test_runs_on_other_tasks_are_not_compared(tmp_path):
    train_run(tmp_path / "run", config())
    opened = load_best(tmp_path / "run")
    one = score_run(tmp_path / "run", opened, Protocol(tasks=4))
    other = score_run(tmp_path / "run", opened, Protocol(tasks=4, seed=1))
    with pytest.raises(DataError, match="protocol differs"):
        compare([one], [other])
    with pytest.raises(DataError, match="torchemo eval"):
        read_result(tmp_path / "run", protocol="paper")


def test_answers_one_by_one_are_not_compared_with_answers_all_at_once(tmp_path):
    train_run(tmp_path / "run", config())
    opened = load_best(tmp_path / "run")
    for statistics in ("inductive", "transductive"):
        score_run(tmp_path / "run", opened, Protocol(tasks=4, statistics=statistics))
    alone = read_result(tmp_path / "run")
    together = read_result(tmp_path / "run", statistics="transductive")
    assert [r["protocol"]["statistics"] for r in (alone, together)] == ["inductive", "transductive"]
    with pytest.raises(DataError, match="protocol differs"):
        compare([alone], [together])


def test_several_seeds_are_compared_one_to_one(tmp_path):
    results = {}
    for seed in (0, 1):
        for name in ("none", "gradients"):
            root = tmp_path / f"{name}{seed}"
            train_run(root, config(memory=name, seed=seed))
            results[name, seed] = score_run(root, load_best(root), Protocol(tasks=6))
    base, memory = ([results[name, s] for s in (0, 1)] for name in ("none", "gradients"))
    found = compare(base, memory)
    assert found["seeds"] == 2
    assert "both" in found["over_seeds"]
    with pytest.raises(DataError, match="one to one"):
        compare(base[:1], memory)


@pytest.mark.parametrize(
    "change",
    [
        {"outer_steps": "%s%n"},
        {"outer_steps": 10**400},
        {"cpu_seconds": [1]},
        {"seed": {}},
        {"method": 5},
        {"domains": [None] * 4},
        {"per_task": [[10**400]]},
    ],
)
def test_a_sealed_result_with_fields_of_another_kind_is_none(tmp_path, change):
    train_run(tmp_path / "run", config())
    made = score_run(tmp_path / "run", load_best(tmp_path / "run"), Protocol(tasks=4))
    file = tmp_path / "result.json"
    file.write_text(json.dumps(with_digest({**made, **change})))
    with pytest.raises(DataError, match="does not hold the scores of tasks"):
        read_result(file)
