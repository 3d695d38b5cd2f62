"""Recall in shares against sums written out by hand, and its limits."""

import math

import pytest
import torch

from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.core.types import Params
from torchemo.memory.lifelong.memory import LifelongMemory, Recognised
from torchemo.memory.lifelong.ratio import SameClass
from torchemo.memory.lifelong.recognise import ByName
from torchemo.memory.lifelong.shares import COMPARED, ByRatio, in_shares, names_of
from torchemo.memory.lifelong.visits import PastVisit, Sight

HEAD = ("w",)
SHAPES = {"w": (2, 4), "trunk": (5,)}


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator_for(seed), dtype=torch.float64)


def visit(number: int, *classes: str) -> PastVisit:
    values = {
        "w": random(3, len(classes), 4, seed=number),
        "trunk": random(3, 5, seed=90 + number),
    }
    return PastVisit(classes, Sight((1,) * len(classes), {}), values)


def joined(recognised: Recognised, *visits: PastVisit) -> Params:
    memory = LifelongMemory(ByName(), head=HEAD)
    for one in visits:
        memory.add(one)
    recall = memory.recall([Sight((1, 1), {})], [recognised], shapes=SHAPES)
    return memory.combine({"w": random(1, 2, 4, seed=7), "trunk": random(1, 5, seed=8)}, recall)


def test_shares_are_probabilities_of_classes_and_of_a_new_one() -> None:
    ratios = torch.tensor([[2.0, -1.0, -torch.inf]])
    found = in_shares(ratios, trust=0.5, new=3.0)[0]
    total = math.exp(1.0) + math.exp(-0.5) + 3.0
    assert found.tolist() == pytest.approx([math.exp(1.0) / total, math.exp(-0.5) / total, 0.0])


def test_a_class_that_is_sure_is_named_and_no_name_is_used_twice() -> None:
    shares = torch.tensor([[0.6, 0.3], [0.2, 0.4], [0.1, 0.7]])
    assert names_of(shares, ("a", "b")) == ("a", None, "b")
    assert names_of(shares[[0, 0]], ("a", "b")) == (None, None)
    assert names_of(torch.zeros(2, 0), ()) == (None, None)


def test_whole_shares_recall_what_names_recall() -> None:
    visits = [visit(0, "a", "b"), visit(1, "b", "c")]
    whole = {"a": [0, 1], "b": [1, 0], "c": [0, 0]}
    shares = {n: torch.tensor(s).double() for n, s in whole.items()}
    named = joined(Recognised(("b", "a"), (0, 1), (2, 1), ""), *visits)
    shared = joined(Recognised(("b", "a"), (0, 1), (2, 1), "", shares), *visits)
    for name, direction in named.items():
        torch.testing.assert_close(shared[name], direction)


def test_a_share_of_a_class_counts_as_so_many_examples() -> None:
    shares = {"a": torch.tensor([0.5, 0.1]).double(), "b": torch.tensor([0.25, 0.0]).double()}
    one = visit(0, "a", "b")
    found = joined(Recognised((None, None), (0,), (0, 0), "", shares), one)
    rows, own = one.values["w"][0], random(1, 2, 4, seed=7)[0]
    # Two examples at hand and two in the visit: row c counts 2 p_c against 2.
    first = (own[0] + 0.5 * rows[0] + 0.25 * rows[1]) / 1.75
    second = (own[1] + 0.1 * rows[0]) / 1.1
    torch.testing.assert_close(found["w"][0], torch.stack([first, second]))
    share = (0.75 + 0.1) / 2
    trunk = (random(1, 5, seed=8)[0] + share * one.values["trunk"][0]) / (1 + share)
    torch.testing.assert_close(found["trunk"][0], trunk)


def test_class_means_take_their_share() -> None:
    memory = LifelongMemory(ByName())
    means = {"f": random(2, 3, seed=1)}
    memory.add(PastVisit(("a", "b"), Sight((4, 2), means), {}))
    own = Sight((1, 1), {"f": random(2, 3, seed=2)})
    shares = {"a": torch.tensor([0.5, 0.0]), "b": torch.tensor([0.5, 0.0])}
    recognised = Recognised((None, None), (0,), (0, 0), "", shares)
    found = memory.means_with(own, recognised)["f"]
    expected = (own.means["f"][0] + 2 * means["f"][0] + 1 * means["f"][1]) / 4
    torch.testing.assert_close(found[0], expected)
    assert torch.equal(found[1], own.means["f"][1])
    assert memory.examples_with(own, recognised) == pytest.approx((2 + 3) / 2)


def test_what_came_before_has_a_share_and_what_is_far_has_none() -> None:
    same = SameClass(torch.zeros(2), torch.eye(2), torch.tensor([25.0, 25.0]), unit=False)
    recogniser = ByRatio(same, "f", trust=1.0)
    memory = LifelongMemory(recogniser)
    x = torch.tensor([[8.0, 0.0], [0.0, 8.0]])
    seen = {COMPARED: recogniser.seen({"f": x})[COMPARED]}
    memory.add(PastVisit(("a", "b"), Sight((1, 1), seen), {}))
    again = {COMPARED: torch.tensor([[0.5, 7.5], [-9.0, -9.0]])}
    found = memory.recognise(Sight((1, 1), again))
    assert found.names == ("b", None)
    assert found.slots == (0,)
    assert found.shares is not None
    assert found.shares["b"][0] > 0.9
    assert found.shares["a"][0] < 0.01
    far = {COMPARED: torch.tensor([[-9.0, -9.0], [9.0, -9.0]])}
    assert memory.recognise(Sight((1, 1), far)).slots == ()


def test_trust_and_the_weight_of_new_classes_are_positive() -> None:
    same = SameClass(torch.zeros(2), torch.eye(2), torch.ones(2))
    with pytest.raises(ConfigError, match="trust and new should be above 0, got 0"):
        ByRatio(same, "f", trust=0)
