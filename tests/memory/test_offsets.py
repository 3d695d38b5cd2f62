"""OffsetMemory: where tasks start, how its slots are seeded, claimed, stepped and saved."""

import math

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import TypeCheckError

from tests.memory.offset_cases import (
    DIM,
    DTYPE,
    SHAPES,
    digest,
    outer_losses,
    randn,
    seeded,
    tree,
    unit,
)
from torchemo.core.errors import ConfigError, MemoryWriteError, ShapeError
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch
from torchemo.memory.keys.embedders import PairEmbedder
from torchemo.memory.keys.transformer import MeanKey
from torchemo.memory.offsets import OffsetMemory, key_centres
from torchemo.memory.recall import Retrieval
from torchemo.memory.selective import SkipUnfamiliar, SkipUnhelpful
from torchemo.memory.slots import SlotAdam
from torchemo.memory.store import EpisodicMemory


def offsets(store, *, retrieval=None, **options):
    retrieval = retrieval or Retrieval(None, weights="softmax", temperature=0.5).double()
    return OffsetMemory(store, retrieval, **{"warmup": 1} | options)


def empty(slots=3):
    return EpisodicMemory(slots, DIM, value_dtype=DTYPE, key_dtype=DTYPE)


def start_at(theta, offset):
    """Return where tasks begin."""
    return {n: t + offset[n] if n in offset else t for n, t in theta.items()}


# -- keys and slot keys learn ------------------------------------------------------------------------


def test_per_task_gradients_reach_keys_and_slot_keys():
    store = seeded(3)
    store.values = tree(3, seed=5)
    memory = offsets(store)
    keys = unit(2, DIM, seed=1).requires_grad_()
    recall = memory.recall(keys)
    theta = {name: value.expand(2, *value.shape[1:]) for name, value in tree(1, seed=1).items()}
    start = start_at(theta, memory.offset(recall))
    rows = dict(
        zip(
            SHAPES,
            torch.autograd.grad(outer_losses(start).sum(), list(start.values()), retain_graph=True),
            strict=True,
        )
    )
    in_weights = torch.autograd.grad(outer_losses(start).sum(), recall.weights, retain_graph=True)[
        0
    ]
    for b in range(2):
        for j in range(3):
            slot = recall.slots[b, j]
            product = sum((rows[n][b] * store.values[n][slot]).sum() for n in SHAPES)
            assert in_weights[b, j].item() == pytest.approx(product.item(), abs=1e-13)
    outer_losses(start).mean().backward()
    bump = 1e-6
    for tensor, gradient in ((keys.detach(), keys.grad), (store.keys, recall.slot_keys.grad)):
        for i in range(tensor.shape[0]):
            ends = []
            for sign in (1, -1):
                tensor[i, 0] += sign * bump
                with torch.no_grad():
                    again = start_at(theta, memory.offset(memory.recall(keys)))
                    ends.append(outer_losses(again).mean().item())
                tensor[i, 0] -= sign * bump
            assert gradient[i, 0].item() == pytest.approx(
                (ends[0] - ends[1]) / (2 * bump), abs=1e-8
            )


# -- seeding -----------------------------------------------------------------------------------------


def clustered(per_cluster=20):
    """Unit keys around three directions, shuffled."""
    directions = torch.eye(DIM, dtype=DTYPE)[:3]
    keys = directions.repeat_interleave(per_cluster, 0) + 0.05 * randn(3 * per_cluster, DIM)
    order = torch.randperm(len(keys), generator=generator_for(0, "order"))
    return F.normalize(keys, dim=1)[order], directions


def test_centres_are_the_means_of_the_clusters_on_the_sphere():
    keys, directions = clustered()
    centres = key_centres(keys, 3, seed=0)
    nearest = torch.cdist(centres, directions).argmin(1)
    assert sorted(nearest.tolist()) == [0, 1, 2]
    member = torch.cdist(keys, directions).argmin(1)
    for centre, cluster in zip(centres, nearest, strict=True):
        mean = F.normalize(keys[member == cluster].mean(0), dim=0)
        assert torch.allclose(centre, mean, rtol=0, atol=1e-12)


def test_the_best_of_ten_restarts_spreads_the_slots_better_than_one():
    keys = unit(40, DIM)

    def spread(seed, restarts):
        centres = key_centres(keys, 8, seed=seed, restarts=restarts)
        return float(torch.cdist(keys, centres).min(1).values.square().sum())

    one = [spread(seed, 1) for seed in range(6)]
    ten = [spread(seed, 10) for seed in range(6)]
    assert sum(ten) < 0.97 * sum(one)


def test_centres_depend_on_keys_and_seed_alone():
    keys, _ = clustered()
    assert torch.equal(key_centres(keys, 5, seed=3), key_centres(keys, 5, seed=3))
    assert not torch.equal(key_centres(keys, 5, seed=3), key_centres(keys, 5, seed=4))


@pytest.mark.parametrize(
    ("keys", "slots", "distinct"),
    [
        (torch.eye(DIM)[[0, 0, 0, 1]], 3, 2),
        (torch.eye(DIM)[:2], 5, 2),
        (torch.eye(DIM)[[2]], 4, 1),
    ],
    ids=["repeats", "few", "one"],
)
def test_fewer_distinct_keys_than_slots_are_reused_and_none_is_lost(keys, slots, distinct):
    centres = key_centres(keys, slots, seed=0)
    assert centres.shape == (slots, DIM)
    assert len({tuple(c.tolist()) for c in centres}) == distinct
    assert torch.equal(centres.norm(dim=1), torch.ones(slots))


def test_after_the_warm_up_the_slots_are_seeded_over_past_keys():
    memory = offsets(EpisodicMemory(3, DIM, value_dtype=DTYPE, key_dtype=DTYPE), warmup=5, seed=7)
    keys, _ = clustered(10)
    for batch in range(5):
        recall = memory.recall(keys[6 * batch : 6 * batch + 6])
        assert recall.m == 0
        assert torch.equal(memory.store.warm_keys, keys[: 6 * batch])
        memory.remember(recall, tree(6, seed=batch))
    assert len(memory.store) == 3
    assert torch.equal(memory.store.keys, key_centres(keys, 3, seed=7))
    assert all(not value.any() for value in memory.store.values.values())
    assert memory.store.warm_keys.shape == (0, DIM)


def test_the_warm_up_keeps_the_last_four_hundred_keys():
    memory = offsets(EpisodicMemory(2, DIM, key_dtype=DTYPE), warmup=9)
    keys = unit(500, DIM)
    memory.remember(memory.recall(keys[:250]), tree(250))
    memory.remember(memory.recall(keys[250:]), tree(250))
    assert torch.equal(memory.store.warm_keys, keys[100:])


# -- the start of a task -----------------------------------------------------------------------------


def test_a_memory_of_zeros_starts_tasks_where_the_base_learner_does():
    memory = offsets(seeded(3))
    theta = tree(2, seed=1)
    recall = memory.recall(unit(2, DIM))
    assert recall.m == 3
    start = start_at(theta, memory.offset(recall))
    for name in SHAPES:
        assert torch.equal(start[name], theta[name])
    assert memory.combine(theta, recall) is theta
    assert memory.opening(recall) is None


def test_the_start_is_theta_plus_the_weighted_offsets():
    store = seeded(3)
    store.values = tree(3, seed=4)
    memory = offsets(store)
    theta, recall = tree(2, seed=1), memory.recall(unit(2, DIM))
    start = start_at(theta, memory.offset(recall))
    for b in range(2):
        squared = [float((recall.keys[b] - store.keys[j]).square().sum()) for j in range(3)]
        terms = [math.exp(-d / 0.5) for d in squared]
        for name in SHAPES:
            offset = sum(t / sum(terms) * store.values[name][j] for j, t in enumerate(terms))
            # tau passes through float32 when the module is built.
            assert torch.allclose(start[name][b], theta[name][b] + offset, rtol=0, atol=1e-7)


def test_a_memory_that_is_not_seeded_yet_offsets_nothing():
    memory = offsets(empty(), warmup=9)
    assert memory.offset(memory.recall(unit(2, DIM))) == {}


def test_a_null_slot_leaves_far_tasks_to_the_base_learner():
    store = seeded(2, keys=torch.eye(DIM, dtype=DTYPE)[:2])
    store.values = tree(2, seed=4)
    retrieval = Retrieval(None, weights="softmax", temperature=0.05, null_distance=0.5).double()
    memory = offsets(store, retrieval=retrieval)
    keys = torch.stack([torch.eye(DIM, dtype=DTYPE)[0], -torch.eye(DIM, dtype=DTYPE)[0]])
    theta = tree(2, seed=1)
    start = start_at(theta, memory.offset(memory.recall(keys)))
    moved = start["w"] - theta["w"]
    assert moved[0].abs().max() > 0.5 * store.values["w"][0].abs().max()
    assert moved[1].abs().max() < 1e-10


# -- remembering -------------------------------------------------------------------------------------


def test_remembering_steps_along_gradients_with_the_weights_of_the_recall():
    store, twin = seeded(3), seeded(3)
    memory = offsets(store, slots=SlotAdam(lr=0.1))
    recall, rows = memory.recall(unit(2, DIM)), tree(2, seed=2)
    memory.remember(recall, rows, slot_key_gradient=randn(3, DIM, seed=8))
    twin.touch(recall.slots)
    twin.step_slots(
        rows,
        recall.slots,
        weights=recall.weights.detach(),
        optimizer=SlotAdam(lr=0.1),
        key_gradient=randn(3, DIM, seed=8),
    )
    twin.end_batch()
    assert digest(store) == digest(twin)
    assert bool(store.values["w"].any())


def test_descending_on_the_memory_lowers_the_outer_loss():
    memory = offsets(seeded(3), slots=SlotAdam(lr=0.02))
    keys, theta = unit(4, DIM), {n: torch.zeros(4, *s, dtype=DTYPE) for n, s in SHAPES.items()}
    losses = []
    for _ in range(30):
        recall = memory.recall(keys)
        begin = start_at(theta, memory.offset(recall))
        start = {n: t.detach().requires_grad_() for n, t in begin.items()}
        loss = outer_losses(start)
        losses.append(loss.mean().item())
        rows = torch.autograd.grad(loss.sum(), list(start.values()))
        memory.remember(recall, dict(zip(start, rows, strict=True)))
    assert losses[-1] < 0.2 * losses[0]


def test_the_numbering_of_slots_makes_no_difference():
    order = torch.tensor([2, 0, 1])
    keys, contents = unit(3, DIM, seed=9), tree(3, seed=4)
    starts, after = [], []
    for kept in (torch.arange(3), order):
        store = seeded(3, keys=keys[kept])
        store.values = {name: value[kept].clone() for name, value in contents.items()}
        memory = offsets(store, slots=SlotAdam(lr=0.1, key_lr=0.1))
        recall = memory.recall(unit(2, DIM))
        gradient = randn(3, DIM, seed=8)[kept]
        starts.append(start_at(tree(2, seed=1), memory.offset(recall)))
        memory.remember(recall, tree(2, seed=2), slot_key_gradient=gradient)
        after.append(store)
    for name in SHAPES:
        assert torch.allclose(starts[0][name], starts[1][name], rtol=0, atol=1e-15)
        assert torch.allclose(
            after[0].values[name][order], after[1].values[name], rtol=0, atol=1e-14
        )
    assert torch.allclose(after[0].keys[order], after[1].keys, rtol=0, atol=1e-14)


def test_a_novel_task_claims_a_slot_that_starts_at_zero():
    axes = torch.eye(DIM, dtype=DTYPE)
    store = seeded(1, capacity=3, keys=axes[:1])
    memory = offsets(store, novelty=1.0, slots=SlotAdam(lr=0.1))
    near = F.normalize(axes[0] + 0.2 * axes[2], dim=0)
    memory.remember(memory.recall(torch.stack([near, axes[1]])), tree(2, seed=1))
    assert len(store) == 2
    assert torch.equal(store.keys[1], axes[1])
    assert not store.values["w"][1].any()
    assert store.moments["steps"].tolist() == [1, 0, 0]
    # The near task alone moved slot 0: Adam's first step is lr times the sign of its gradient.
    assert torch.allclose(store.values["w"][0], -0.1 * tree(2, seed=1)["w"][0].sign(), atol=1e-6)


def test_the_first_tasks_of_an_empty_memory_are_novel():
    store = EpisodicMemory(4, DIM, value_dtype=DTYPE, key_dtype=DTYPE)
    memory = offsets(store, novelty=0.5, warmup=100)
    memory.remember(memory.recall(torch.eye(DIM, dtype=DTYPE)[:2]), tree(2))
    assert torch.equal(store.keys[: len(store)], torch.eye(DIM, dtype=DTYPE)[:2])


def test_a_novel_task_takes_the_victim_of_the_controller_when_the_memory_is_full():
    axes = torch.eye(DIM, dtype=DTYPE)
    store = seeded(2, keys=axes[:2])
    memory = offsets(store, retrieval=Retrieval(1, weights="softmax").double(), novelty=1.0)
    memory.remember(memory.recall(axes[[0]]), tree(1))
    memory.remember(memory.recall(F.normalize(axes[[2]] + 0.1 * axes[[0]], dim=1)), tree(1))
    # Slot 0 was recalled last, by the novel task too, so slot 1 is the least recent.
    assert torch.equal(store.keys[0], axes[0])
    assert store.ledger.generation.tolist() == [1, 2]


def test_a_rate_factor_slows_all_steps_of_the_slots():
    stores = []
    for lr, factor in ((0.1, 0.5), (0.05, 1.0)):
        memory = offsets(seeded(3), slots=SlotAdam(lr=lr, key_lr=lr))
        gradient = randn(3, DIM, seed=8)
        memory.remember(
            memory.recall(unit(2, DIM)), tree(2), rate_factor=factor, slot_key_gradient=gradient
        )
        stores.append(memory.store)
    assert digest(stores[0]) == digest(stores[1])


def test_slots_that_were_overwritten_since_they_were_read_do_not_step():
    memory = offsets(seeded(2))
    recall = memory.recall(unit(1, DIM))
    slot = memory.store.write(unit(1, DIM, seed=3), {n: v[:1] for n, v in tree(1).items()})[0]
    before = {n: v[slot].clone() for n, v in memory.store.values.items()}
    memory.remember(recall, tree(1, seed=5))
    assert all(torch.equal(memory.store.values[n][slot], old) for n, old in before.items())
    assert memory.store.values["w"][1 - slot].any()
    assert memory.store.ledger.recalls[slot] == 0


def test_values_are_the_outer_gradients_of_remembered_tensors():
    memory = offsets(empty(), tensors="norm", norm=("b",))
    rows = {n: g.requires_grad_() for n, g in tree(2).items()}
    value = memory.value((tree(2, seed=1),), query=tree(2, seed=2), rows=rows)
    assert list(value) == ["b"]
    assert torch.equal(value["b"], rows["b"])
    assert not value["b"].requires_grad
    with pytest.raises(ConfigError, match="per-task outer gradients"):
        memory.value((tree(2),))


def test_the_control_steps_along_random_directions_of_the_same_norms():
    stores = []
    for control in ("none", "random_values"):
        memory = offsets(seeded(1), control=control, slots=SlotAdam(lr=0.1))
        memory.remember(memory.recall(unit(1, DIM)), tree(1))
        stores.append(memory.store)
    plain, drawn = (store.moments["first.values.w"][0] for store in stores)
    assert float(drawn.norm()) == pytest.approx(float(plain.norm()))
    assert not torch.allclose(drawn, plain)


def test_recall_dropout_without_episode_numbers_does_not_get_stuck():
    memory = offsets(empty(2), recall_dropout=0.5)
    keys = torch.eye(DIM, dtype=DTYPE)
    memory.remember(memory.recall(keys[:2]), tree(2))
    active = []
    for _ in range(60):
        recall = memory.recall(keys[:1])
        active.append(bool(recall.active[0]))
        memory.remember(recall, tree(1))
    assert 15 < sum(active) < 45


def test_tasks_without_recall_start_at_theta_and_move_no_slot():
    store = seeded(3)
    store.values = tree(3, seed=4)
    memory = offsets(store, recall_dropout=1.0, slots=SlotAdam(update="lazy"))
    before = {n: v.clone() for n, v in store.values.items()}
    recall = memory.recall(unit(2, DIM))
    assert not any(offset.any() for offset in memory.offset(recall).values())
    memory.remember(recall, tree(2))
    assert all(torch.equal(store.values[n], old) for n, old in before.items())
    assert not store.ledger.recalls.any()


# -- refusals, evaluation, saving ----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.full((2, DIM), math.nan), torch.zeros(3, DIM)])
def test_a_refused_key_gradient_changes_nothing(bad):
    memory = offsets(empty(2))
    keys = torch.eye(DIM, dtype=DTYPE)[:2]
    memory.remember(memory.recall(keys), tree(2))
    recall = memory.recall(keys)
    assert recall.slot_keys is not None
    before = digest(memory)
    with pytest.raises((MemoryWriteError, ShapeError)):
        memory.remember(recall, tree(2), slot_key_gradient=bad.to(DTYPE))
    assert digest(memory) == before


def test_a_refused_batch_changes_nothing_not_even_what_it_recalled():
    memory = offsets(seeded(2))
    recall, rows = memory.recall(unit(2, DIM)), tree(2)
    rows["b"][1] = math.nan
    before = digest(memory)
    with pytest.raises(MemoryWriteError):
        memory.remember(recall, rows)
    assert digest(memory) == before


def test_slot_keys_without_a_rate_collect_no_gradient():
    memory = offsets(seeded(2), slots=SlotAdam(key_lr=0.0))
    assert memory.recall(unit(1, DIM)).slot_keys is None


def test_a_memory_without_slots_remembers_nothing():
    memory = offsets(empty(0))
    before = digest(memory)
    memory.remember(memory.recall(unit(2, DIM)), tree(2))
    assert digest(memory) == before


def test_slots_continue_bit_for_bit_after_saving_and_loading():
    def batch(memory, number):
        recall = memory.recall(unit(2, DIM, seed=number))
        gradient = None if recall.slot_keys is None else randn(3, DIM, seed=40 + number)
        memory.remember(recall, tree(2, seed=number), slot_key_gradient=gradient)

    def build():
        store = EpisodicMemory(3, DIM, value_dtype=DTYPE, key_dtype=DTYPE)
        return offsets(store, warmup=2)

    # Saved in the middle of the warm-up, right after it, and with moments.
    for cut in (1, 2, 5):
        straight, stopped, resumed = build(), build(), build()
        for number in range(8):
            batch(straight, number)
        for number in range(cut):
            batch(stopped, number)
        resumed.load_state_dict({n: t.clone() for n, t in stopped.state_dict().items()})
        assert digest(resumed) == digest(stopped)
        for number in range(cut, 8):
            batch(resumed, number)
        assert digest(resumed) == digest(straight)


def complete():
    """An offset memory with every part that has a state."""
    encoder = MeanKey(PairEmbedder(1, 1, generator=generator_for(0, "key"), dim=DIM))
    return offsets(
        EpisodicMemory(6, DIM),
        retrieval=Retrieval(None, weights="softmax", null_distance=1.0),
        encoder=encoder,
        warmup=9,
        skip_unfamiliar=SkipUnfamiliar(DIM),
        skip_unhelpful=SkipUnhelpful(6),
    )


def test_a_whole_memory_survives_saving_and_loading_bit_for_bit():
    memory, other = complete(), complete()
    keys = unit(4, DIM).float()  # in the warm-up: four keys wait
    memory.remember(memory.recall(keys), {n: v.float() for n, v in tree(4).items()})
    memory.skip_unhelpful.failed[2] = True
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(1.0)
    assert memory.store.warm_keys.shape == (4, DIM)
    assert digest(other) != digest(memory)
    other.load_state_dict({name: t.clone() for name, t in memory.state_dict().items()})
    assert digest(other) == digest(memory)
    memory.load_state_dict(complete().state_dict())
    assert memory.store.warm_keys.shape == (0, DIM)


def test_evaluation_leaves_the_slots_alone():
    store = seeded(3)
    store.values = tree(3, seed=4)
    memory = offsets(store).eval()
    before = digest(memory)
    recall = memory.recall(unit(2, DIM))
    start_at(tree(2), memory.offset(recall))
    with pytest.raises(MemoryWriteError, match="eval mode"):
        memory.remember(recall, tree(2))
    assert digest(memory) == before


# -- options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"novelty": -0.1},
        {"novelty": math.nan},
        {"warmup": -1},
        {"tensors": "some"},
        {"tensors": "norm"},
        {"control": "zeros"},
        {"recall_dropout": 1.5},
        {"recall_dropout": math.nan},
        {"retrieval": Retrieval(2, weights="softmax", max_age=3)},
        {"retrieval": Retrieval(2, weights="softmax", min_fill=4)},
        {"store": EpisodicMemory(3, DIM, value_dtype=torch.bfloat16)},
        {"encoder": MeanKey(PairEmbedder(1, 1, generator=torch.Generator(), dim=DIM + 1))},
    ],
    ids=lambda options: ", ".join(f"{n}={getattr(v, 'k', v)}" for n, v in options.items())[:40],
)
def test_options_that_cannot_work_are_refused(options):
    # Where shapes and types are checked at run time, that check may speak first.
    with pytest.raises((ConfigError, TypeCheckError)):
        offsets(**{"store": empty()} | options)


@pytest.mark.parametrize("name", ["content", "memory_steps", "head_align", "rekey_every", "scope"])
def test_what_is_said_of_gradients_is_no_option_of_offsets(name):
    with pytest.raises(TypeError, match=name):
        offsets(empty(), **{name: "first"})


def test_the_outer_loss_can_be_kept_out_of_the_key_network():
    encoder = MeanKey(PairEmbedder(1, 1, generator=generator_for(0, "key"), dim=DIM))
    support = Batch(torch.ones(2, 5, 1), torch.arange(10.0).view(2, 5, 1))
    for trained in (True, False):
        memory = offsets(EpisodicMemory(2, DIM), encoder=encoder, train_keys=trained)
        assert memory.encode(support).requires_grad == trained


def test_slots_are_seeded_at_the_end_of_the_warm_up():
    for warmup, first in ((0, 1), (1, 1), (7, 7)):
        memory = offsets(empty(), warmup=warmup)
        assert (memory.startup, memory.seeded_at) == (warmup, first)
        for batch in range(first):
            assert len(memory.store) == 0
            memory.remember(memory.recall(unit(4, DIM, seed=batch)), tree(4))
        assert len(memory.store) == 3
