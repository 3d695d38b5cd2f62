"""Many users at once against one `LifelongMemory` per user, step by step."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.memory.lifelong.recognisers import ByClass, ByMean, ByTask
from torchemo.config.registry import Part
from torchemo.core.losses import cross_entropy
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch
from torchemo.lab.study.streams.bank import NONE
from torchemo.lab.study.streams.game import Game, meet
from torchemo.lab.study.streams.play import Player
from torchemo.lab.study.streams.users import Moment
from torchemo.lab.study.streams.visits import Streams, Visits
from torchemo.learners.gradient.anil import ANIL
from torchemo.learners.gradient.inner import SGD
from torchemo.learners.gradient.loop import InnerLoop
from torchemo.learners.gradient.maml import MAML
from torchemo.memory.controllers import CONTROLLERS, build_controller
from torchemo.memory.lifelong.memory import LifelongMemory
from torchemo.memory.lifelong.mixture import Mixture
from torchemo.memory.lifelong.ratio import SameClass
from torchemo.memory.lifelong.recognise import ByName
from torchemo.memory.lifelong.shares import ByRatio
from torchemo.models import MLP
from torchemo.training.lifelong import revisit

WAY, DIM, USERS, VISITS = 3, 6, 4, 7
MODEL = MLP(WAY, n_in=DIM, hidden=(5,), initializer="kaiming", activation="tanh")
CENTRES = 2 * torch.randn(5, DIM, generator=generator_for(5))
LOOP = InnerLoop(MODEL, loss=cross_entropy, rule=SGD(0.3), steps=3, shared_row=True)


def make_moment(number: int) -> Moment:
    """Draw visits of three of five classes, in any order."""
    g = generator_for(number, "visit")
    classes = torch.stack([torch.randperm(5, generator=g)[:WAY] for _ in range(USERS)])
    y = torch.arange(WAY).repeat(2)[torch.randperm(2 * WAY, generator=g)].expand(USERS, -1)
    query_y = torch.arange(WAY).repeat(8).expand(USERS, -1)

    def near(labels: torch.Tensor) -> torch.Tensor:
        found = CENTRES[classes.gather(1, labels)]
        return found + 0.7 * torch.randn(found.shape, generator=g)

    none = torch.zeros(USERS, dtype=torch.int64)
    return Moment(
        torch.arange(USERS), none, none + number, classes, Batch(near(y), y),
        Batch(near(query_y), query_y), none,
    )  # fmt: skip


SAME = SameClass(
    torch.zeros(DIM), torch.randn(DIM, 4, generator=generator_for(6)), torch.full((4,), 8.0)
)
MIXTURE = ((1.0, 20.0, 5.0),) * 2 + ((0.5, 10.0, 30.0),) * 3

TWINS = {
    "names": ByName(),
    "class cosine": ByClass("inputs", 0.5),
    "task cosine": ByTask("inputs", 0.5),
    "mean": ByMean("inputs", 0.5),
    "shares": ByRatio(SAME, "inputs", trust=0.5),
}


@pytest.mark.parametrize("find", TWINS)
@pytest.mark.parametrize("kind", [MAML, ANIL])
@pytest.mark.parametrize("content", ["per_step", "secant", "gauss_newton"])
def test_users_have_the_memories_of_the_library(find, kind, content):
    learner = kind(LOOP)
    params = learner.init(generator_for(1))
    visits = Visits(Streams(), find=find, threshold=0.5, content=content)
    visits = replace(visits, trust=0.5)
    asked = [
        visits,
        replace(visits, answer="both"),
        replace(visits, answer="mixture", weights=MIXTURE),
    ]
    same = SAME if find == "shares" else None
    game = Game(Player(learner, params, WAY, same), asked, USERS, VISITS)
    memories = [LifelongMemory(TWINS[find], head=MODEL.head, content=content) for _ in range(USERS)]
    recalled = 0
    for number in range(VISITS):
        moment = make_moment(number)
        adapted, both, mixed = game.meet(game.player.see(moment))
        for b, memory in enumerate(memories):
            one = moment.rows(torch.tensor([b]))
            names = [tuple(str(int(c)) for c in one.classes[0])]
            found = revisit(
                learner, params, one.support, memory, names=names if find == "names" else None
            )
            recalled += len(found.recognised[0].slots)
            for met, answer in (
                (adapted, "adapted"),
                (both, "both"),
                (mixed, Mixture(MIXTURE)),
            ):
                right = found.outputs(one.query.x, answer=answer).argmax(2) == one.query.y
                assert met.scores[b, -1] == pytest.approx(float(right.float().mean()))
            kept = found.remember()[0]
            for name, value in kept.values.items():
                ours = stored(game, name, b, number)
                torch.testing.assert_close(
                    comparable(ours, content), comparable(value, content), rtol=1e-4, atol=1e-5
                )
    assert recalled > USERS


def stored(game, name, b, slot):
    """Return a stored value in the shape of the library, where rows of the head are not first."""
    value = game.bank.values[name][b, slot]
    return value.movedim(0, game.bank.axes) if name in MODEL.head else value


def comparable(value, content):
    """Return what does not depend on the signs of eigenvectors, which factors of curvature have."""
    if content != "gauss_newton":
        return value
    flat = value[0].flatten(1)
    return torch.cat([flat[:2], flat[2:].mT @ flat[2:]])


@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_full_memory_forgets_what_the_library_forgets(name):
    learner = ANIL(LOOP)
    params = learner.init(generator_for(1))
    visits = Visits(Streams(), find="names", slots=3, controller=name)
    game = Game(Player(learner, params, WAY), [visits], USERS, VISITS)
    memories = [
        LifelongMemory(
            ByName(), head=MODEL.head, capacity=3, controller=build_controller(Part(name))
        )
        for _ in range(USERS)
    ]
    for number in range(VISITS):
        moment = make_moment(number)
        game.meet(game.player.see(moment))
        for b, memory in enumerate(memories):
            one = moment.rows(torch.tensor([b]))
            names = [tuple(str(int(c)) for c in one.classes[0])]
            revisit(learner, params, one.support, memory, names=names).remember()
            for slot, visit in enumerate(memory.visits):
                ours = stored(game, "head.weight", b, slot)
                torch.testing.assert_close(ours, visit.values["head.weight"], rtol=1e-4, atol=1e-5)


def test_replay_fits_to_the_examples_of_all_visits():
    learner = MAML(LOOP)
    params = learner.init(generator_for(1))
    game = Game(
        Player(learner, params, WAY), [Visits(Streams(), find="task", replay=True)], USERS, VISITS
    )
    first, second = make_moment(0), make_moment(1)
    shuffled = first.classes.roll(1, 1)  # the same classes again, in another order
    second = second._replace(classes=shuffled, task=first.task)
    game.meet(game.player.see(first))
    met = game.meet(game.player.see(second))[0]
    old = (first.support.y + 1) % WAY
    for b in range(USERS):
        x = torch.cat([second.support.x[b], first.support.x[b]])[None]
        y = torch.cat([second.support.y[b], old[b]])[None]
        pooled = revisit(
            learner, params, Batch(x, y), LifelongMemory(ByName()), names=[("a", "b", "c")]
        )
        right = pooled.outputs(second.query.x[b : b + 1]).argmax(2) == second.query.y[b]
        assert met.scores[b, 0] == pytest.approx(float(right.float().mean()))


@pytest.mark.parametrize(("find", "recalled"), [("same domain", [1]), ("other domains", [2])])
def test_visits_of_other_tasks_are_chosen_by_their_domain(find, recalled):
    learner = ANIL(LOOP)
    params = learner.init(generator_for(1))
    game = Game(Player(learner, params, WAY), [Visits(Streams(), find=find)], USERS, VISITS)
    # The task itself, one of its domain, one of another domain; then the task once more.
    for number, (task, domain) in enumerate([(0, 5), (1, 5), (2, 6)]):
        game.meet(game.player.see(visit_of(number, task, domain, visit=0)))
    again = game.player.see(visit_of(3, 0, 5, visit=2))
    parts = game._parts(again, game._find(again))
    assert parts.flatten(2).any(2).nonzero()[:, 1].unique().tolist() == recalled


def visit_of(number, task, domain, visit):
    """Draw a visit of a task of a domain."""
    full = torch.full((USERS,), task)
    return make_moment(number)._replace(
        task=full, domain=torch.full((USERS,), domain), visit=torch.full((USERS,), visit)
    )


def test_a_visit_leaves_its_gradients_or_its_inputs():
    learner = ANIL(LOOP)
    params = learner.init(generator_for(1))
    kinds = {"task": {}, "nothing": {}, "names": {"answer": "both"}}
    bytes_of = {}
    for find, more in [*kinds.items(), ("task", {"replay": True})]:
        game = Game(Player(learner, params, WAY), [Visits(Streams(), find=find, **more)], USERS, 2)
        bytes_of[find, bool(more)] = game.meet(game.player.see(make_moment(0)))[0].bytes
    gradients = 4 * LOOP.steps * (5 * DIM + 5 + 5 * WAY + WAY)
    means = 4 * WAY * (5 + DIM)
    assert bytes_of == {
        ("task", False): gradients,
        ("nothing", False): 0,
        ("names", True): gradients + means,
        ("task", True): 4 * 2 * WAY * DIM,
    }


def test_recall_alone_of_one_visit_repeats_it():
    learner = MAML(LOOP)
    params = learner.init(generator_for(1))
    kinds = [Visits(Streams(), find="names"), Visits(Streams(), find="names", own=False)]
    moment = make_moment(0)
    games = [Game(Player(learner, params, WAY), [kind], USERS, VISITS) for kind in kinds]
    first = games[0].meet(games[0].player.see(moment))[0]
    games[1].meet(games[1].player.see(moment))
    other = make_moment(1)._replace(classes=moment.classes, query=moment.query)
    again = games[1].meet(games[1].player.see(other))[0]
    assert torch.equal(first.scores, again.scores)


def test_judgements_count_what_was_recognised():
    learner = ANIL(LOOP)
    params = learner.init(generator_for(1))
    game = Game(Player(learner, params, WAY), [Visits(Streams(), find="names")], USERS, VISITS)
    seen: list[set[int]] = [set() for _ in range(USERS)]
    for number in range(VISITS):
        moment = make_moment(number)
        met = game.meet(game.player.see(moment))[0]
        for b, classes in enumerate(moment.classes.tolist()):
            assert int(met.known[b]) == int(met.right[b]) == len(seen[b] & set(classes))
            seen[b] |= set(classes)
        assert int(met.wrong.sum()) == 0
    assert all(a != NONE for a, _ in pairwise(game.bank.classes[0, :, 0].tolist()))


@pytest.mark.parametrize("kind", [MAML, ANIL])
def test_games_that_are_fitted_together_are_as_alone(kind):
    learner = kind(LOOP)
    params = learner.init(generator_for(1))
    asked = [
        Visits(Streams(), find=find, **more)
        for find, more in [
            ("nothing", {}), ("names", {}), ("names", {"k": 2}), ("task", {"broken": "labels"}),
            ("shares", {"trust": 0.5}), ("task", {"replay": True}), ("names", {"join": "sum"}),
        ]
    ]  # fmt: skip
    player = Player(learner, params, WAY, SAME)
    together, alone = ([Game(player, [one], USERS, VISITS) for one in asked] for _ in range(2))
    for number in range(VISITS):
        seen = player.see(make_moment(number))
        for (found,), game, own in zip(meet(together, seen), together, alone, strict=True):
            assert torch.equal(found.scores, own.meet(seen)[0].scores)
            for name, value in own.bank.values.items():
                torch.testing.assert_close(game.bank.values[name], value, rtol=1e-5, atol=1e-6)


def test_visits_recalled_as_one_move_tasks_as_all_of_them():
    learner = MAML(LOOP)
    params = learner.init(generator_for(1))
    game = Game(Player(learner, params, WAY), [Visits(Streams(), find="names")], USERS, VISITS)
    for number in range(4):
        game.meet(game.player.see(make_moment(number)))
    seen = game.player.see(make_moment(4))
    parts = game._parts(seen, game._find(seen))
    users, grads = seen.moment.users, {n: v[:, 0] for n, v in own_gradients(game, seen).items()}
    one, all_of_them = (
        game.memory.combine(grads, game.bank.recall(users, parts, own=6.0, pooled=pooled), step=1)
        for pooled in (True, False)
    )
    assert game.bank.recall(users, parts, own=6.0).m == 1
    for name, value in all_of_them.items():
        torch.testing.assert_close(one[name], value)
        assert not torch.equal(value, grads[name])


def own_gradients(game, seen):
    """Return support gradients without any recall."""
    nothing = game.bank.recall(seen.moment.users, torch.zeros(USERS, 4, WAY, WAY), own=1.0)
    return game.fit(seen, [nothing])[0].values
