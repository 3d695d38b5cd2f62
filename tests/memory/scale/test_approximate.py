"""Approximate search: it finds what is there, follows every write, and is restored as it was."""

import hashlib
import sys
from importlib import util

import pytest
import torch
from torch.nn.functional import normalize

from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.core.types import TaskShape
from torchemo.learners.build import build_learner
from torchemo.learners.hosting import host
from torchemo.memory import MEMORIES
from torchemo.memory.aggregators import Sum
from torchemo.memory.controllers import CONTROLLERS
from torchemo.memory.emo import EMO
from torchemo.memory.recall import Retrieval
from torchemo.memory.scale.approximate import ApproximateIndex
from torchemo.memory.search import ExactIndex
from torchemo.memory.store import EpisodicMemory
from torchemo.models import MLP

DIM, SLOTS = 8, 600


def clustered(count, seed=0, *, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    centres = normalize(torch.randn(30, DIM, generator=torch.Generator().manual_seed(99)), dim=1)
    near = centres[torch.randint(0, 30, (count,), generator=g)]
    return normalize(near + 0.05 * torch.randn(count, DIM, generator=g), dim=1).to(dtype)


def make(*, probes=8, least=200, k=5, controller="lru", dtype=torch.float32):
    memory = EpisodicMemory(SLOTS, DIM, controller=CONTROLLERS[controller](), key_dtype=dtype)
    return EMO(memory, Retrieval(k, index=ApproximateIndex(least=least, probes=probes)), Sum())


def remember(emo, keys):
    recall = emo.recall(keys[:1])
    recall = recall._replace(keys=keys, slots=recall.slots.expand(len(keys), -1))
    recall = recall._replace(
        active=torch.ones(len(keys), dtype=torch.bool),
        generations=emo.store.ledger.generation[recall.slots],
    )
    emo.remember(recall, {"w": torch.arange(float(len(keys)))[:, None]})


def brute_force(emo, key):
    """The nearest slots by a Python sort of plain numbers."""
    rows = emo.store.keys[: len(emo.store)].tolist()
    distance = [sum((a - b) ** 2 for a, b in zip(row, key.tolist(), strict=True)) for row in rows]
    return sorted(range(len(rows)), key=lambda slot: (distance[slot], slot))[: emo.retrieval.k]


def recall_rate(emo, keys):
    found = emo.recall(keys).slots.tolist()
    hits = [
        len(set(row) & set(brute_force(emo, key))) for row, key in zip(found, keys, strict=True)
    ]
    return sum(hits) / (len(keys) * emo.retrieval.k)


faiss = pytest.mark.skipif(util.find_spec("faiss") is None, reason="the extra ann is not installed")


@faiss
def test_all_cells_looked_at_is_exact_search_and_few_find_nearly_all():
    emo = make(probes=10**6)
    remember(emo, clustered(SLOTS))
    keys = clustered(20, seed=1)
    assert emo.retrieval.index.centroids.shape == (int(2 * SLOTS**0.5), DIM)
    for row, key in zip(emo.recall(keys).slots.tolist(), keys, strict=True):
        assert row == brute_force(emo, key)
    few = make(probes=8)
    remember(few, clustered(SLOTS))
    assert 0.9 < recall_rate(few, keys) <= 1
    one = make(probes=1)
    remember(one, clustered(SLOTS))
    assert recall_rate(one, keys) < recall_rate(few, keys)


@faiss
@pytest.mark.parametrize("controller", CONTROLLERS)
def test_overwritten_slots_are_found_by_their_new_keys_only(controller):
    emo = make(probes=10**6, controller=controller)
    remember(emo, clustered(SLOTS))
    emo.recall(clustered(1))
    cells = emo.retrieval.index._cells
    for seed in range(2, 5):
        new = clustered(40, seed=seed)
        remember(emo, new)
        for key in new[::13]:
            assert emo.recall(key[None]).slots[0].tolist() == brute_force(emo, key)
            assert float(emo.recall(key[None]).distances[0, 0]) == 0
    assert emo.retrieval.index._cells is cells  # it followed, and did not begin again


@faiss
def test_slots_filled_later_are_found_and_cells_are_placed_anew_at_four_times_as_many():
    emo = make(probes=10**6, least=100)
    remember(emo, clustered(120))
    assert int(emo.retrieval.index.learned_at) == 120
    emo.recall(clustered(1))
    remember(emo, clustered(200, seed=2))
    key = clustered(1, seed=7)
    assert emo.recall(key).slots[0].tolist() == brute_force(emo, key[0])
    assert int(emo.retrieval.index.learned_at) == 120
    remember(emo, clustered(200, seed=3))
    assert int(emo.retrieval.index.learned_at) == 520
    assert emo.recall(key).slots[0].tolist() == brute_force(emo, key[0])


@faiss
def test_few_slots_are_searched_exactly_and_nothing_is_learned():
    emo = make(least=SLOTS + 1)
    remember(emo, clustered(SLOTS))
    assert emo.retrieval.index.centroids.numel() == 0
    assert recall_rate(emo, clustered(10, seed=1)) == 1


@faiss
def test_permuting_the_slots_permutes_what_is_found():
    emo = make()
    remember(emo, clustered(SLOTS))
    keys = clustered(10, seed=1)
    before = emo.recall(keys)
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(4))
    emo.store.keys = emo.store.keys[order]
    emo.store.values = {"w": emo.store.values["w"][order]}
    after = emo.recall(keys)
    assert torch.equal(order[after.slots], before.slots)
    assert torch.equal(after.values["w"], before.values["w"])


@faiss
def test_keys_changed_behind_its_back_are_noticed():
    emo = make(probes=10**6)
    remember(emo, clustered(SLOTS))
    key = clustered(1, seed=9)
    emo.recall(key)
    emo.store.rekey(clustered(SLOTS, seed=5))
    assert emo.recall(key).slots[0].tolist() == brute_force(emo, key[0])
    emo.store.keys[17] = key[0]
    assert int(emo.recall(key).slots[0, 0]) == 17


@faiss
def test_a_saved_and_restored_index_finds_the_same():
    emo = make(probes=2)
    remember(emo, clustered(SLOTS))
    remember(emo, clustered(300, seed=2))  # the cells are those of keys that are gone by now
    keys = clustered(30, seed=1)
    other = make(probes=2)
    other.load_state_dict({n: t.clone() for n, t in emo.state_dict().items()})
    assert torch.equal(other.recall(keys).slots, emo.recall(keys).slots)
    remember(emo, keys)
    remember(other, keys)
    for name, tensor in emo.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@faiss
def test_recalling_changes_no_state_also_in_evaluation():
    def fingerprint(emo):
        digest = hashlib.sha256()
        for name, tensor in sorted(emo.state_dict().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        return digest.hexdigest()

    emo = make()
    remember(emo, clustered(SLOTS))
    fresh = make()
    fresh.load_state_dict(emo.state_dict())
    before = fingerprint(fresh)
    assert before == fingerprint(emo)
    fresh.recall(clustered(5))
    fresh.eval()
    fresh.recall(clustered(5, seed=3))
    assert fingerprint(fresh) == before


@faiss
def test_keys_of_double_precision_are_ordered_by_their_own_distances():
    emo = make(probes=10**6, dtype=torch.float64)
    keys = clustered(SLOTS, dtype=torch.float64)
    keys[5], keys[400] = keys[3] * (1 + 1e-12), keys[3] * (1 + 2e-12)
    remember(emo, keys)
    assert emo.recall(keys[3:4]).slots[0, :3].tolist() == [3, 5, 400]


@faiss
def test_cells_that_hold_too_few_are_no_excuse():
    index = ApproximateIndex(least=1, probes=1)
    memory = EpisodicMemory(20, DIM)
    memory.write(clustered(20), {"w": torch.zeros(20, 1)})
    index.learn(memory)
    index.follow(memory)
    keys = clustered(3, seed=1)
    assert torch.equal(
        index.search(keys, memory.keys, m=15), ExactIndex().search(keys, memory.keys, m=15)
    )


TASKS = TaskShape("classification", (3,), 2)


def built(name="gradients", **options):
    """Make the memory that a run with these options has."""
    learner = build_learner(Part("maml"), MLP(2, n_in=3, hidden=(4,)), TASKS)
    given = {"capacity": 5, "key": Part("statistics"), "index": "approximate", **options}
    kind, chosen = MEMORIES.resolve(Part(name, given))
    return kind.build(chosen, host(learner), TASKS)


@faiss
def test_the_options_of_a_run_make_it():
    index = built().retrieval.index
    assert isinstance(index, ApproximateIndex)
    assert (index.least, index.probes) == (10_000, 32)


@faiss
@pytest.mark.parametrize(
    "make",
    [
        lambda: built(k=None),
        lambda: built("offsets"),
        lambda: Retrieval(index=ApproximateIndex(), max_age=3),
    ],
    ids=["all slots", "slots that learn", "young slots only"],
)
def test_options_that_need_all_slots_are_refused(make):
    with pytest.raises(ConfigError, match="approximate"):
        make()


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match=r"torchemo\[ann\]"):
        ApproximateIndex()


@faiss
def test_an_index_without_cells_to_look_at_is_refused():
    with pytest.raises(ConfigError, match="probes"):
        ApproximateIndex(probes=0)
    with pytest.raises(ConfigError, match="neighbours k"):
        Retrieval(None, index=ApproximateIndex())
