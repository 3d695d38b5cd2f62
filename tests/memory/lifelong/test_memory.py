"""The lifelong memory against the paper's Mean, naive references and an independent cache."""

import pytest
import torch
from cachetools import FIFOCache, LRUCache

from torchemo.core.errors import ConfigError
from torchemo.core.types import Recall
from torchemo.memory.aggregators import Mean, Sum
from torchemo.memory.controllers import FIFO, LRU, Controller
from torchemo.memory.emo import EMO
from torchemo.memory.lifelong.memory import Join, LifelongMemory
from torchemo.memory.lifelong.recognise import ByName
from torchemo.memory.lifelong.visits import PastVisit, Sight
from torchemo.memory.recall import Retrieval
from torchemo.memory.store import EpisodicMemory

SHAPES = {"body": (4,), "head.weight": (3, 4), "head.bias": (3,)}
HEAD = ("head.weight", "head.bias")
STEPS = 2


def sight(*names: str, shots: int = 1) -> Sight:
    return Sight((shots,) * len(names), {}, names)


def visit(seed: int, *names: str, shots: int = 1) -> PastVisit:
    g = torch.Generator().manual_seed(seed)
    way = len(names)
    shapes = {n: (way, *s[1:]) if n in HEAD else s for n, s in SHAPES.items()}
    values = {n: torch.randn(STEPS, *s, generator=g) for n, s in shapes.items()}
    return PastVisit(names, sight(*names, shots=shots), values)


def recalled(memory: LifelongMemory, *names: str) -> Recall:
    seen = sight(*names)
    shapes = {n: (len(names), *s[1:]) if n in HEAD else s for n, s in SHAPES.items()}
    return memory.recall([seen], [memory.recognise(seen)], shapes=shapes)


def gradients(way: int = 3) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(99)
    shapes = {n: (way, *s[1:]) if n in HEAD else s for n, s in SHAPES.items()}
    return {n: torch.randn(1, *s, generator=g) for n, s in shapes.items()}


@pytest.mark.parametrize("join", ["mean", "sum"])
@pytest.mark.parametrize("step", [0, 1])
def test_equal_visits_are_joined_as_by_the_papers_aggregators(join: Join, step: int) -> None:
    memory = LifelongMemory(ByName(), head=HEAD, join=join)
    for seed in range(3):
        memory.add(visit(seed, "a", "b", "c"))
    recall = recalled(memory, "a", "b", "c")
    aggregator = Mean(3) if join == "mean" else Sum()
    emo = EMO(
        EpisodicMemory(1, 1), Retrieval(k=1), aggregator, content="per_step", memory_steps="all"
    )
    uniform = recall._replace(weights=torch.full((1, 3), 1 / 3), keys=torch.zeros(1, 1))
    theirs = emo.combine(gradients(), uniform, step=step)
    ours = memory.combine(gradients(), recall, step=step)
    if join == "sum":  # Eq. 9 with weights 1/m each is a mean of what is recalled
        theirs = {n: gradients()[n] + 3 * (t - gradients()[n]) for n, t in theirs.items()}
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value)


def test_rows_come_from_the_visits_that_had_their_class() -> None:
    memory = LifelongMemory(ByName(), head=HEAD)
    first, second = visit(0, "b", "a"), visit(1, "c", "b", "d", shots=2)
    memory.add(first)
    memory.add(second)
    grads, found = gradients(), memory.combine(gradients(), recalled(memory, "a", "b", "c"))
    own, bias = grads["head.bias"][0], found["head.bias"][0]
    one, two = first.values["head.bias"][0], second.values["head.bias"][0]
    torch.testing.assert_close(bias[0], (3 * own[0] + 2 * one[1]) / 5)
    torch.testing.assert_close(bias[1], (3 * own[1] + 2 * one[0] + 6 * two[1]) / 11)
    torch.testing.assert_close(bias[2], (3 * own[2] + 6 * two[0]) / 9)
    # Two of three classes were at each visit: so much of its examples counts for the body.
    shared = (2 * 2 / 3, 6 * 2 / 3)
    body = 3 * grads["body"][0] + shared[0] * first.values["body"][0]
    body = (body + shared[1] * second.values["body"][0]) / (3 + sum(shared))
    torch.testing.assert_close(found["body"][0], body)


def test_strangers_in_the_batch_keep_their_own_gradient() -> None:
    memory = LifelongMemory(ByName(), head=HEAD)
    memory.add(visit(0, "a", "b", "c"))
    seen = [sight("a", "b", "c"), sight("x", "y", "z")]
    recall = memory.recall(seen, [memory.recognise(s) for s in seen], shapes=SHAPES)
    grads = {n: torch.cat([g, g]) for n, g in gradients().items()}
    found = memory.combine(grads, recall)
    for name, grad in grads.items():
        assert torch.equal(found[name][1], grad[1])
        assert not torch.equal(found[name][0], grad[0])


@pytest.mark.parametrize(("controller", "cache"), [(FIFO(), FIFOCache), (LRU(), LRUCache)])
def test_a_full_memory_forgets_like_a_cache(
    controller: Controller, cache: type[FIFOCache[str, int]]
) -> None:
    memory, reference = LifelongMemory(ByName(), capacity=3, controller=controller), cache(3)
    g = torch.Generator().manual_seed(0)
    for _ in range(60):
        name = f"task {int(torch.randint(6, (), generator=g))}"
        seen = sight(name)
        found = memory.recognise(seen)
        assert bool(found.slots) == (name in reference)
        if found.slots:  # recalled, and not written: a cache holds a key once
            _ = reference[name]
            memory._touch(found.slots)
        else:
            reference[name] = 1
            memory.remember(seen, found, {})


def test_new_classes_without_names_get_names_of_their_own() -> None:
    memory = LifelongMemory(ByName())
    for _ in range(2):
        unknown = memory.recognise(sight("p", "q"))._replace(names=(None, None))
        memory.remember(Sight((1, 1), {}), unknown, {})
    assert len(memory.known().classes) == 4


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="capacity should be None, or 1 or more; got 0"):
        LifelongMemory(ByName(), capacity=0)
    with pytest.raises(ConfigError, match="class names should differ, got a, a"):
        LifelongMemory(ByName()).add(visit(0, "a", "a"))
    with pytest.raises(ConfigError, match="needs names of its classes"):
        LifelongMemory(ByName()).recognise(Sight((1, 1), {}))
