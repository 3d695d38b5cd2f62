"""Recognisers against brute force over all assignments."""

from itertools import permutations

import pytest
import torch
from torch.nn.functional import cosine_similarity

from tests.memory.lifelong.recognisers import ByClass, ByMean, ByTask
from torchemo.core.errors import ConfigError
from torchemo.memory.lifelong.memory import LifelongMemory, Recognised
from torchemo.memory.lifelong.ratio import SameClass
from torchemo.memory.lifelong.recognise import ByName, Recogniser
from torchemo.memory.lifelong.shares import ByRatio
from torchemo.memory.lifelong.visits import PastVisit, Sight, class_means

WAY, DIM = 3, 32


def centres(seed: int) -> torch.Tensor:
    return torch.randn(WAY, DIM, generator=torch.Generator().manual_seed(seed))


def around(means: torch.Tensor, seed: int, noise: float = 0.3) -> Sight:
    g = torch.Generator().manual_seed(1000 + seed)
    return Sight((1,) * len(means), {"f": means + noise * torch.randn(means.shape, generator=g)})


def filled(recogniser: Recogniser, tasks: int = 4) -> LifelongMemory:
    memory = LifelongMemory(recogniser)
    for t in range(tasks):
        for v in range(2):
            names = tuple(f"{t}.{c}" for c in range(WAY))
            memory.add(PastVisit(names, around(centres(t), 10 * t + v), {}))
    return memory


@pytest.mark.parametrize("kind", [ByClass, ByTask, ByMean])
def test_a_task_comes_back_in_another_order(kind: type[ByTask]) -> None:
    memory = filled(kind("f", 0.5))
    for t in range(4):
        order = [2, 0, 1]
        found = memory.recognise(around(centres(t)[order], 77 + t))
        assert found.names == tuple(f"{t}.{c}" for c in order)
        assert found.visits == (2, 2, 2)


@pytest.mark.parametrize("kind", [ByClass, ByTask, ByMean])
def test_what_is_not_sure_is_new(kind: type[ByTask]) -> None:
    found = filled(kind("f", 0.95)).recognise(around(centres(50), 5))
    assert found.names == (None,) * WAY
    assert found.slots == ()


def test_classes_are_recognised_in_new_company() -> None:
    memory = filled(ByClass("f", 0.6))
    mixed = torch.stack([centres(3)[1], centres(0)[2], centres(60)[0]])
    assert memory.recognise(around(mixed, 1, noise=0.1)).names == ("3.1", "0.2", None)


@pytest.mark.parametrize("seed", range(5))
def test_the_best_task_is_that_of_brute_force(seed: int) -> None:
    memory = filled(ByTask("f", -1.0))
    sight = around(torch.randn(WAY, DIM, generator=torch.Generator().manual_seed(seed)), seed)
    best, expected = -2.0, None
    for t in range(4):
        means = torch.stack(
            [torch.stack([v.sight.means["f"][c] for v in memory.visits[2 * t : 2 * t + 2]]).mean(0)
             for c in range(WAY)]
        )  # fmt: skip
        for order in permutations(range(WAY)):
            score = float(cosine_similarity(sight.means["f"], means[list(order)]).mean())
            if score > best:
                best, expected = score, tuple(f"{t}.{c}" for c in order)
    assert memory.recognise(sight).names == expected


def test_names_are_exact_for_subsets_and_supersets() -> None:
    memory = filled(ByName())
    names = ("0.2", "new", "0.0", "3.1")
    assert memory.recognise(Sight((1,) * 4, {}, names)).names == ("0.2", None, "0.0", "3.1")


def test_means_of_visits_are_those_of_all_examples() -> None:
    x, y = torch.randn(12, 2, 4), torch.arange(12) % 3
    shots, means = class_means(x, y, way=3)
    assert shots == (4, 4, 4)
    torch.testing.assert_close(means[1], x[1::3].flatten(1).mean(0))
    memory = LifelongMemory(ByName())
    for part in (slice(0, 3), slice(3, 9)):
        own, centre = class_means(x[part], y[part], way=3)
        memory.add(PastVisit(("a", "b", "c"), Sight(own, {"f": centre}), {}))
    own, centre = class_means(x[9:], y[9:], way=3)
    found = memory.means_with(Sight(own, {"f": centre}), Recognised(("a", "b", None), (), (), ""))[
        "f"
    ]
    torch.testing.assert_close(found[:2], means[:2])
    torch.testing.assert_close(found[2], centre[2])


def test_a_space_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no class means in the space 'g'"):
        ByRatio(SameClass(torch.zeros(2), torch.eye(2), torch.ones(2)), "g").seen(
            {"f": torch.ones(1, 2)}
        )
