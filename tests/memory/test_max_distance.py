"""Recall of the visits of a task alone: slots that are too far away are not used."""

import pytest
import torch

from torchemo.core.errors import ConfigError
from torchemo.memory.aggregators import Gated, Mean, Sum
from torchemo.memory.aggregators.gate import GateTransformer
from torchemo.memory.emo import EMO
from torchemo.memory.recall import Retrieval
from torchemo.memory.store import EpisodicMemory

KEYS = torch.tensor([[0.0, 0.0], [0.1, 0.0], [5.0, 0.0], [5.0, 0.1], [5.1, 0.0]])


def filled(aggregator, order=range(5), *, capacity=5, weights="uniform", **retrieval):
    """Return an EMO with two visits of one task and three of another, and their gradients."""
    own = Retrieval(k=5, weights=weights, **{"max_distance": 1.0, **retrieval}).double()
    emo = EMO(
        EpisodicMemory(capacity, 2, key_dtype=torch.float64, value_dtype=torch.float64),
        own,
        aggregator,
    )
    grads = torch.arange(1.0, 6.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, -2.0])
    order = list(order)
    emo.remember(emo.recall(KEYS[order].double()), {"w": grads[order]})
    return emo, grads


def asked():
    """Return keys of a task seen twice, one seen three times, and a new one, with their gradients."""
    keys = torch.tensor([[0.0, 0.1], [5.0, 0.0], [50.0, 0.0]], dtype=torch.float64)
    return keys, {"w": torch.tensor([[0.3, 0.7], [1.3, 0.1], [0.9, 0.8]], dtype=torch.float64)}


def test_mean_averages_over_the_visits_of_the_task_alone():
    emo, stored = filled(Mean(5))
    keys, own = asked()
    found = emo.combine(own, emo.recall(keys))["w"]
    pooled = [torch.cat([own["w"][:1], stored[:2]]), torch.cat([own["w"][1:2], stored[2:]])]
    for row, gradients in zip(found, pooled, strict=False):
        torch.testing.assert_close(row, gradients.mean(0), rtol=0, atol=1e-12)


def test_sum_adds_the_mean_of_the_visits_alone():
    emo, stored = filled(Sum())
    keys, own = asked()
    found = emo.combine(own, emo.recall(keys))["w"]
    torch.testing.assert_close(found[0], own["w"][0] + stored[:2].mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], own["w"][1] + stored[2:].mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("weights", ["uniform", "softmax"])
@pytest.mark.parametrize("aggregator", [Mean(5), Sum(), Gated(["w"])], ids=["mean", "sum", "gated"])
def test_a_new_task_is_the_base_learner_bit_for_bit(aggregator, weights):
    emo, _ = filled(aggregator, weights=weights)
    keys, own = asked()
    recall = emo.recall(keys)
    assert recall.active.tolist() == [True, True, False]
    assert torch.equal(emo.combine(own, recall)["w"][2], own["w"][2])
    alone = emo.combine({"w": own["w"][2:]}, emo.recall(keys[2:]))
    assert torch.equal(alone["w"], own["w"][2:])


def test_the_order_of_the_visits_makes_no_difference():
    keys, own = asked()
    found = []
    for order in (range(5), (4, 1, 3, 0, 2)):
        emo, _ = filled(Mean(5), order)
        found.append(emo.combine(own, emo.recall(keys))["w"])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_slots_that_are_not_used_are_not_touched():
    """LRU forgets visits of the task that did not come back, though all were among the k nearest."""
    emo, stored = filled(Mean(5))
    keys, _ = asked()
    emo.remember(
        emo.recall(keys[:1]), {"w": stored[:1]}
    )  # touches slots 0 and 1, overwrites the oldest
    left = emo.store.keys[:, 0] < 1
    assert left.tolist() == [True, True, True, False, False]


def test_all_slots_near_is_the_plain_rule():
    keys, own = asked()
    near, _ = filled(Mean(5), max_distance=1000.0)
    plain, _ = filled(Mean(5), max_distance=None)
    for emo in (near, plain):
        emo.eval()
    torch.testing.assert_close(
        near.combine(own, near.recall(keys))["w"], plain.combine(own, plain.recall(keys))["w"]
    )


def test_what_cannot_mix_some_slots_is_refused():
    gate = GateTransformer({"w": torch.Size([2])}, generator=torch.Generator(), layers=1)
    with pytest.raises(ConfigError, match="max_distance"):
        EMO(EpisodicMemory(5, 2), Retrieval(5, max_distance=1.0), gate)
    with pytest.raises(ConfigError, match="max_distance"):
        Retrieval(5, max_distance=-1.0)
