"""Compressed keys: candidates re-ranked exactly find what exact search finds, whoever wrote when."""

import sys
from importlib import util

import pytest
import torch
from torch.nn.functional import normalize

from torchemo.core.errors import ConfigError
from torchemo.memory.controllers import FIFO
from torchemo.memory.recall import Retrieval
from torchemo.memory.scale import cells
from torchemo.memory.scale.compressed import CompressedIndex
from torchemo.memory.search import INDICES, ExactIndex
from torchemo.memory.store import EpisodicMemory

DIM, SLOTS, M = 8, 1500, 5
faiss = pytest.mark.skipif(util.find_spec("faiss") is None, reason="the extra ann is not installed")


def clustered(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    centres = normalize(torch.randn(30, DIM, generator=torch.Generator().manual_seed(99)), dim=1)
    near = centres[torch.randint(0, 30, (count,), generator=g)]
    return normalize(near + 0.05 * torch.randn(count, DIM, generator=g), dim=1)


def written(keys, *, probes=8, candidates=60, capacity=SLOTS, index=None):
    memory = EpisodicMemory(capacity, DIM, controller=FIFO())
    memory.write(keys, {"w": torch.zeros(len(keys), 1)})
    index = (
        CompressedIndex(least=256, probes=probes, candidates=candidates) if index is None else index
    )
    index.learn(memory)
    index.follow(memory)
    return memory, index


def exact(memory, keys, m=M):
    return ExactIndex().search(keys, memory.keys[: len(memory)], m=m)


def share_found(index, memory, keys):
    found, expected = index.search(keys, memory.keys[: len(memory)], m=M), exact(memory, keys)
    pairs = zip(found.tolist(), expected.tolist(), strict=True)
    return sum(len({*a} & {*b}) for a, b in pairs) / expected.numel()


@faiss
def test_all_candidates_are_exact_search_and_few_find_nearly_all_in_exact_order():
    keys = clustered(20, seed=1)
    memory, index = written(clustered(SLOTS), probes=10**6, candidates=2 * SLOTS)
    assert torch.equal(index.search(keys, memory.keys, m=M), exact(memory, keys))
    memory, index = written(clustered(SLOTS))
    assert share_found(index, memory, keys) >= 0.99
    memory, one = written(clustered(SLOTS), probes=1, candidates=1)
    assert share_found(one, memory, keys) < share_found(index, memory, keys)
    for row, key in zip(index.search(keys, memory.keys, m=M), keys, strict=True):
        squared = (memory.keys[row] - key).square().sum(-1).tolist()
        assert squared == sorted(squared)


@faiss
def test_ties_are_broken_by_slot_and_cut_ties_do_not_depend_on_the_order_of_writing():
    keys = clustered(SLOTS)
    keys[100:400] = keys[100]  # three hundred equal keys, more than there are candidates
    queries = torch.cat([keys[100:101], clustered(10, seed=3)])
    memory, index = written(keys)
    found = index.search(queries, memory.keys, m=M)
    assert found[0].tolist() == list(range(100, 105))
    # The same keys, written in another order over others, give the same slots.
    other, follower = written(clustered(SLOTS, seed=9))
    follower.load_state_dict({n: t.clone() for n, t in index.state_dict().items()})
    follower.follow(other)
    for slot in torch.randperm(SLOTS, generator=torch.Generator().manual_seed(0)).tolist():
        other.keys[slot] = keys[slot]
        other.journal.wrote([slot], other.keys)
        if slot % 97 == 0:
            follower.follow(other)
    lists = follower._cells
    follower.follow(other)
    assert follower._cells is lists  # it followed, and did not begin again
    assert torch.equal(follower.search(queries, other.keys, m=M), found)


@faiss
def test_it_is_a_function_of_the_keys_and_a_restored_one_finds_the_same():
    keys = clustered(30, seed=1)
    (memory, one), (_, twin) = written(clustered(SLOTS)), written(clustered(SLOTS))
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[name]), name
    assert one.codebooks.shape == (256 * DIM,)
    memory.write(clustered(400, seed=2), {"w": torch.zeros(400, 1)})
    one.follow(memory)
    other = CompressedIndex(least=256, probes=8, candidates=60)
    other.load_state_dict({n: t.clone() for n, t in one.state_dict().items()})
    other.follow(memory)
    assert torch.equal(one.search(keys, memory.keys, m=M), other.search(keys, memory.keys, m=M))


@faiss
def test_overwritten_slots_are_found_by_their_new_keys_only():
    memory, index = written(clustered(SLOTS), probes=10**6, candidates=2 * SLOTS)
    for seed in range(2, 5):
        new = clustered(40, seed=seed)
        slots = memory.write(new, {"w": torch.zeros(40, 1)})
        index.follow(memory)
        assert index.search(new, memory.keys, m=1)[:, 0].tolist() == slots
        assert torch.equal(index.search(new, memory.keys, m=M), exact(memory, new))


@faiss
def test_it_is_learned_anew_at_four_times_as_many_keys_and_not_below_its_least():
    memory, index = written(clustered(200), capacity=SLOTS)
    assert index.centroids.numel() == index.codebooks.numel() == 0
    assert torch.equal(
        index.search(clustered(3, 5), memory.keys[:200], m=M), exact(memory, clustered(3, 5))
    )
    for count, learned_at in ((100, 300), (800, 300), (100, 1200)):
        memory.write(clustered(count, seed=count), {"w": torch.zeros(count, 1)})
        index.learn(memory)
        index.follow(memory)
        assert int(index.learned_at) == learned_at
    assert share_found(index, memory, clustered(20, seed=1)) >= 0.99


@faiss
def test_retrieval_recalls_through_it():
    index = CompressedIndex(least=256, probes=8, candidates=60)
    memory, _ = written(clustered(SLOTS), index=index)
    keys = clustered(4, seed=1)
    ours, theirs = Retrieval(M, index=index), Retrieval(M)
    assert torch.equal(ours(memory, keys).slots, theirs(memory, keys).slots)
    memory.write(keys, {"w": torch.ones(4, 1)})
    assert ours(memory, keys).values["w"][:, 0].tolist() == [[1.0]] * 4


@faiss
@pytest.mark.parametrize("dim", [1, 7, 48])
def test_keys_of_any_dimension_are_cut_into_equal_parts(dim):
    memory = EpisodicMemory(400, dim, controller=FIFO())
    memory.write(torch.randn(400, dim), {"w": torch.zeros(400, 1)})
    index = CompressedIndex(least=256, probes=100, candidates=800)
    index.learn(memory)
    index.follow(memory)
    keys = torch.randn(3, dim)
    assert torch.equal(index.search(keys, memory.keys, m=M), exact(memory, keys))


def test_exact_search_in_parts_is_exact_search(monkeypatch):
    monkeypatch.setattr(cells, "AT_ONCE", 7)
    g = torch.Generator().manual_seed(0)
    slots, keys = (torch.randint(0, 3, (n, 3), generator=g).float() for n in (100, 9))
    for m in (1, 20, 200):
        expected = ExactIndex().search(keys, slots, m=m)
        assert torch.equal(cells.exact(keys, slots, m=m), expected)


@faiss
def test_options_that_cannot_work_are_refused():
    for wrong in ({"candidates": 0}, {"least": 255}, {"probes": 0}):
        with pytest.raises(ConfigError, match="should be"):
            CompressedIndex(**wrong)
    assert INDICES["ivfpq"] is CompressedIndex


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match=r"memory.index = ivfpq needs") as told:
        CompressedIndex()
    assert "torchemo[ann]" in told.value.hint
