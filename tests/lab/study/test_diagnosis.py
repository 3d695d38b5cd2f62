"""Recalls of a trained run: likeness of domain where slots have one and where they have none."""

import pytest
import torch

from tests.lab.study.conftest import tiny_study
from torchemo.lab.study.diagnosis import diagnose, slot_purity
from torchemo.lab.study.entry import Cell
from torchemo.runs.experiment import open_experiment
from torchemo.runs.score import memory_digest


def test_slots_that_each_serve_one_domain_are_pure_and_shared_slots_are_at_chance():
    domain = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])
    own = torch.eye(2)[domain]
    assert slot_purity(own, domain) == pytest.approx(1.0)
    assert slot_purity(torch.full((8, 2), 0.5), domain) == pytest.approx(0.5)


def test_purity_is_judged_on_other_tasks_than_the_owners_were_found_on():
    # Even tasks say slot 0 is of domain 0 and slot 1 of domain 1; odd tasks do the opposite.
    domain = torch.tensor([0, 0, 1, 1])
    weights = torch.eye(2)[torch.tensor([0, 1, 1, 0])]
    assert slot_purity(weights, domain) == pytest.approx(0.0)


def trained(preset, steps=5, **options):
    study = tiny_study(
        cells=(Cell("x", "X", preset, "memory"),),
        contrasts=(),
        options=tuple(f"{name.replace('__', '.')}={v}" for name, v in options.items()),
    )
    experiment = open_experiment(study.config(study.cells[0], {"mixed": ("regression:hsml4",)}))
    for i in range(steps):
        experiment.trainer.step(experiment.source.sample("train", seed=0, start=4 * i, count=4))
    return experiment


def test_a_diagnosis_reports_every_number_and_changes_nothing():
    experiment = trained("maml-emo-paper")
    before = memory_digest(experiment.trainer.memory)
    found = diagnose(experiment, tasks=8)
    assert memory_digest(experiment.trainer.memory) == before
    assert found["chance"] == 0.25
    assert 0 <= found["same_domain"] <= 1
    assert -1 <= found["cosine"] <= 1
    assert found["norm_ratio"] > 0
    assert found["age"] >= 0
    assert set(found["cosine_by_tensor"]) == set(found["norm_ratio_by_tensor"])


def test_the_gates_of_an_aggregator_that_learns_them_are_reported():
    gated = trained("maml-emo-paper", memory__aggregator__name="gated")
    found = diagnose(gated, tasks=4)
    learned = gated.trainer.memory.aggregator.gate.tolist()
    assert list(found["gate_by_tensor"].values()) == learned
    assert any(learned)
    assert set(found["gate_by_tensor"]) == set(found["cosine_by_tensor"])
    assert "gate_by_tensor" not in diagnose(trained("maml-emo-paper"), tasks=4)


def test_offsets_agree_with_the_gradients_that_made_them():
    # One slot that all tasks share has moved against their gradients: its cosine with minus one of them is
    # positive.
    found = diagnose(trained("maml-offsets-joint", steps=20, memory__capacity=1), tasks=16)
    assert found["cosine"] > 0.05
    assert found["slots_in_use"] == 1


def test_a_run_without_memory_has_nothing_to_diagnose():
    assert diagnose(trained("maml"), tasks=4) == {"tasks": 0}
