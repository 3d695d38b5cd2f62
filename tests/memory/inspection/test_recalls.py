"""Diagnostics of a recall against hand-made cases."""

import pytest
import torch

from torchemo.memory.inspection.recalls import recall_statistics
from torchemo.memory.recall import Retrieval
from torchemo.memory.store import EpisodicMemory


def remembered():
    memory = EpisodicMemory(3, 2)
    keys = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    values = {"w": torch.tensor([[1.0, 0.0], [0.0, 1.0]])}
    memory.write(keys[:1], {"w": values["w"][:1]}, notes={"domain": torch.tensor([7])})
    memory.end_batch()
    memory.write(keys[1:], {"w": values["w"][1:]}, notes={"domain": torch.tensor([8])})
    memory.end_batch()
    return memory


def test_age_distance_domain_cosine_and_norm_are_means_over_the_recall():
    memory = remembered()
    recall = Retrieval(2)(memory, torch.zeros(1, 2))
    own = {"w": torch.tensor([[2.0, 0.0]])}
    found = recall_statistics(memory, recall, own, domain=torch.tensor([7]))
    assert found.age == 1.5  # written two batches and one batch ago
    assert found.distance == 2.5
    assert found.same_domain == 0.5
    assert found.cosine["w"] == pytest.approx(0.5**0.5)
    assert found.norm_ratio["w"] == pytest.approx(0.5**0.5 / 2)


def test_a_single_number_per_task_has_a_cosine_too():
    memory = EpisodicMemory(3, 2)
    memory.write(torch.zeros(1, 2), {"b": torch.tensor([2.0])})
    recall = Retrieval(1)(memory, torch.zeros(1, 2))
    found = recall_statistics(memory, recall, {"b": torch.tensor([-4.0])})
    assert (found.cosine["b"], found.norm_ratio["b"]) == (-1.0, 0.5)


def test_a_tensor_without_a_gradient_but_rounding_is_left_out():
    memory = EpisodicMemory(3, 2)
    memory.write(torch.zeros(1, 2), {"w": torch.ones(1, 2), "bias": torch.full((1, 2), 0.5)})
    recall = Retrieval(1)(memory, torch.zeros(2, 2))
    own = {"w": torch.ones(2, 2), "bias": torch.tensor([[1e-9, 0.0], [0.0, 0.0]])}
    found = recall_statistics(memory, recall, own)
    assert list(found.cosine) == list(found.norm_ratio) == ["w"]
    half = {"w": torch.ones(2, 2), "bias": torch.tensor([[2.0, 2.0], [0.0, 0.0]])}
    found = recall_statistics(memory, recall, half)  # one of two tasks has one
    assert found.cosine["bias"] == pytest.approx(1.0)
    assert found.norm_ratio["bias"] == pytest.approx(0.25)
    assert recall_statistics(memory, recall, {}).cosine == {}


def test_an_empty_recall_tells_nothing():
    memory = EpisodicMemory(3, 2)
    found = recall_statistics(memory, Retrieval(2)(memory, torch.zeros(1, 2)), {})
    assert found.age is None
    assert found.same_domain is None
    assert found.cosine == {}
