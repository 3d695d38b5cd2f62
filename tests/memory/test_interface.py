"""What a training loop may ask of any memory, and states of earlier versions under today's names."""

import pytest
import torch

from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.learners.build import build_learner
from torchemo.learners.hosting import host
from torchemo.memory.aggregators import Gated, Sum
from torchemo.memory.emo import EMO
from torchemo.memory.interface import (
    BoundMemory,
    TaskMemory,
    check_choice,
    column,
    current_names,
    remembers,
)
from torchemo.memory.offsets import OffsetMemory
from torchemo.memory.recall import Retrieval
from torchemo.memory.selective import SkipUnfamiliar, SkipUnhelpful
from torchemo.memory.store import EpisodicMemory
from torchemo.models import MLP
from torchemo.training.predict import predict
from torchemo.training.step import outer_step

DIM = 2
KEYS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
GRADS = {"w": torch.arange(6.0).view(3, 2)}


def emo(capacity=4, **options):
    aggregator = Gated(("w",))
    torch.nn.init.ones_(aggregator.gate)  # it begins closed
    store = EpisodicMemory(capacity, DIM)
    return EMO(store, Retrieval(2, weights="softmax"), aggregator, **options)


def offsets(capacity=3, **options):
    retrieval = Retrieval(None, weights="softmax")
    return OffsetMemory(EpisodicMemory(capacity, DIM), retrieval, **{"warmup": 1} | options)


both = pytest.mark.parametrize("make", [emo, offsets])


def taught(memory, batches=2):
    for _ in range(batches):
        memory.remember(memory.recall(KEYS), GRADS)
    return memory


# -- the interface -----------------------------------------------------------------------------------


@both
def test_a_memory_adds_to_the_start_or_joins_the_steps_but_not_both(make):
    memory = taught(make())
    recall = memory.recall(KEYS)
    offset, bound = memory.offset(recall), memory.bind(recall)
    assert isinstance(memory, TaskMemory)
    assert bool(offset) == memory.offsets_start == (make is offsets)
    assert (bound is None) == memory.offsets_start
    joined = memory.combine(GRADS, recall)
    assert torch.equal(joined["w"], GRADS["w"]) == memory.offsets_start
    assert memory.opening(recall) is None


def test_each_memory_says_what_it_wants_and_how_it_is_called():
    assert (emo().title, offsets().title) == ("EMO", "offsets")
    assert (emo().wants, offsets().wants) == ("support", "outer")
    assert emo(content="query").wants == "query"
    assert emo(content="meta").wants == "outer"
    assert (emo().content, offsets().content) == ("first", "meta")
    assert (emo().startup, emo().seeded_at) == (100, None)
    assert (offsets(warmup=7).startup, offsets(warmup=7).seeded_at) == (7, 7)
    for memory in (emo(), offsets()):
        assert (memory.keeps_support, memory.keeps_prototypes) == (False, False)


def test_inner_parameters_are_those_of_the_aggregator_under_their_own_names():
    memory = emo()
    inner = memory.inner_parameters()
    assert list(inner) == ["aggregator.gate"]
    assert inner["aggregator.gate"] is dict(memory.named_parameters())["aggregator.gate"]
    memory.aggregator.requires_grad_(False)
    assert memory.inner_parameters() == offsets().inner_parameters() == {}


def test_parameters_of_the_aggregator_come_before_those_of_the_key_network():
    class Key(torch.nn.Linear):
        dim = DIM

    names = [n for n, _ in emo(encoder=Key(1, DIM)).named_parameters()]
    assert names == [
        "retrieval.log_temperature",
        "aggregator.gate",
        "encoder.weight",
        "encoder.bias",
    ]


def test_a_bound_memory_counts_the_steps_before_it():
    memory = taught(emo(memory_steps="first", recall_step="always"))
    recall = memory.recall(KEYS)
    fresh, late = BoundMemory(memory, recall), BoundMemory(memory, recall, first=1)
    assert not torch.equal(fresh.direction(GRADS, 0)["w"], GRADS["w"])
    assert torch.equal(fresh.direction(GRADS, 1)["w"], GRADS["w"])
    assert torch.equal(late.direction(GRADS, 0)["w"], GRADS["w"])
    assert fresh.opening() is not None
    assert late.opening() is None


@both
def test_recalling_and_encoding_change_nothing(make):
    memory = taught(make())
    before = {n: t.clone() for n, t in memory.state_dict().items()}
    recall = memory.recall(KEYS, domain=torch.tensor([1, 2, 3]), index=torch.arange(3))
    memory.offset(recall)
    memory.combine(GRADS, recall)
    assert recall.own_notes["domain"].tolist() == [1, 2, 3]
    assert all(torch.equal(t, before[n]) for n, t in memory.state_dict().items())
    with pytest.raises(ConfigError, match="no key encoder"):
        memory.encode(Batch(torch.zeros(1, 2, 1), torch.zeros(1, 2, 1)))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, ["body", "scale", "head"]),
        ({"tensors": "norm"}, ["scale"]),
        ({"drop_head": True}, ["body", "scale"]),
        ({"tensors": "norm", "drop_head": True}, ["scale"]),
    ],
    ids=str,
)
def test_which_tensors_are_remembered(options, kept):
    memory = offsets(head=("head",), norm=("scale",), **options)
    names = ["body", "scale", "head"]
    assert [n for n in names if memory.remembers(n)] == kept
    whole = {"tensors": "all", "drop_head": False} | options
    assert [n for n in names if remembers(n, head=("head",), norm=("scale",), **whole)] == kept
    rows = {n: torch.ones(1, 1) for n in names}
    assert list(memory.value(rows=rows)) == kept


def test_helpers_of_memories():
    assert column(torch.tensor([1.0, 2.0]), torch.zeros(2, 3, 4)).shape == (2, 1, 1)
    assert column(torch.tensor([1.0, 2.0]), torch.zeros(2)).shape == (2,)
    check_choice("tensors", "all", ("all", "norm"))
    with pytest.raises(
        ConfigError, match=r"tensors should be one of \['all', 'norm'\], got 'some'"
    ):
        check_choice("tensors", "some", ("all", "norm"))


# -- learners without an inner loop ------------------------------------------------------------------

TASKS = TaskShape("classification", (3,), 3)


def metric_problem():
    """A learner that fits in closed form, its parameters, and three tasks."""
    learner = build_learner(Part("protonet"), MLP(3, n_in=3, hidden=(8,)), TASKS)
    g = torch.Generator().manual_seed(0)
    y = torch.arange(3).repeat(3, 2)
    episode = Episode(*(Batch(torch.randn(3, 6, 3, generator=g), y) for _ in range(2)))
    return learner, learner.init(torch.Generator().manual_seed(1)), episode


def built(kind, **options):
    learner, _, _ = metric_problem()
    own = kind.Options(capacity=3, key=Part("statistics"), weights="softmax", **options)
    return kind.build(own, host(learner), TASKS)


def test_a_memory_of_gradients_refuses_a_learner_without_an_inner_loop():
    with pytest.raises(ConfigError, match="takes no gradient steps") as caught:
        built(EMO)
    assert "offsets" in caught.value.hint


def test_offsets_start_a_learner_without_an_inner_loop_elsewhere_and_learn():
    learner, params, episode = metric_problem()
    keys = torch.eye(4)[:3]
    memory = OffsetMemory(
        EpisodicMemory(3, 4), Retrieval(None, weights="softmax", temperature=0.05), warmup=1
    )
    memory.encode = lambda support, params=None: keys  # every task has a slot of its own
    alone = outer_step(learner, params, episode)
    losses = []
    for _ in range(40):
        step = outer_step(learner, params, episode, memory=memory)
        losses.append(step.losses)
        memory.remember(
            step.recall, step.values, rate_factor=10, slot_key_gradient=step.slot_key_gradient
        )
    # Slots are zero when they are seeded, so the first two steps are those of the learner alone.
    assert torch.equal(losses[0], alone.losses)
    torch.testing.assert_close(losses[1], alone.losses)
    assert bool((losses[-1] < alone.losses).all())
    assert losses[-1].mean() < 0.7 * alone.losses.mean()
    memory.eval()
    given = predict(learner, params, episode, memory=memory)
    assert given.recall.m == 3
    assert not torch.equal(given.outputs[-1], predict(learner, params, episode).outputs[-1])


# -- states of earlier versions ------------------------------------------------------------------------


def test_old_names_become_those_of_today_and_others_stay():
    old = {
        "memory.keys": "store.keys",
        "memory.warm_keys": "store.warm_keys",
        "memory.ledger.now": "store.ledger.now",
        "memory.values.memory.weight": "store.values.memory.weight",
        "memory.moments.first.values.w": "store.moments.first.values.w",
        "familiarity.keys": "skip_unfamiliar.keys",
        "familiarity.seen": "skip_unfamiliar.seen",
        "trust.doubted": "skip_unhelpful.failed",
        "retrieval.log_temperature": "retrieval.log_temperature",
        "retrieval.index.centroids": "retrieval.index.centroids",
        "aggregator.gate": "aggregator.gate",
        "encoder.memory.weight": "encoder.memory.weight",
        "encoder.trust.doubted": "encoder.trust.doubted",
    }
    state = {name: torch.tensor(i) for i, name in enumerate(old)}
    found = current_names(state)
    assert list(found) == list(old.values())
    assert all(found[now] is state[was] for was, now in old.items())
    assert current_names(found) == found


def of_earlier(memory):
    """Return the state of a memory as earlier versions named it."""
    was = {"store.": "memory.", "skip_unfamiliar.": "familiarity."}
    found = {}
    for name, tensor in memory.state_dict().items():
        for now, old in was.items():
            name = old + name.removeprefix(now) if name.startswith(now) else name
        found[name.replace("skip_unhelpful.failed", "trust.doubted")] = tensor.clone()
    return found


def rules():
    return {"skip_unfamiliar": SkipUnfamiliar(DIM), "skip_unhelpful": SkipUnhelpful(3)}


@both
def test_a_state_of_an_earlier_version_opens(make):
    memory, other = taught(make(3, **rules())), make(3, **rules())
    memory.skip_unhelpful.failed[1] = True
    old = of_earlier(memory)
    assert not any(n.startswith(("store", "skip")) for n in old)
    assert {"memory.keys", "familiarity.seen", "trust.doubted"} <= old.keys()
    other.load_state_dict(current_names(old))
    state = other.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in memory.state_dict().items())
    assert state.keys() == memory.state_dict().keys()


def test_an_unused_aggregator_of_earlier_offsets_is_ignored():
    """Earlier versions gave a memory of offsets an aggregator too, which no step used."""
    memory, other = taught(offsets()), offsets()
    old = {**of_earlier(memory), "aggregator.gate": torch.ones(1)}
    other.load_state_dict(current_names(old))
    assert torch.equal(other.store.values["w"], memory.store.values["w"])


def test_a_state_of_no_version_is_refused():
    memory = EMO(EpisodicMemory(2, DIM), Retrieval(1), Sum())
    with pytest.raises(RuntimeError, match="surprise"):
        memory.load_state_dict(current_names({**of_earlier(memory), "surprise": torch.ones(1)}))
