"""Consolidation: gradient descent on the memory's content, against autograd and torch's Adam."""

import hashlib
import math

import pytest
import torch
import torch.nn.functional as F

from torchemo.core.errors import ConfigError, MemoryWriteError
from torchemo.core.rng import generator_for
from torchemo.memory.aggregators import Sum
from torchemo.memory.consolidation import SlotAdam, key_centres, slot_gradients
from torchemo.memory.emo import EMO
from torchemo.memory.policy import Policy
from torchemo.memory.recall import Retrieval
from torchemo.memory.store import EpisodicMemory

DTYPE = torch.float64
SHAPES = {"w": (3, 2), "b": (3,), "s": ()}
DIM = 4


def randn(*shape, seed=0):
    return torch.randn(shape, generator=generator_for(seed, "consolidation"), dtype=DTYPE)


def unit(*shape, seed=0):
    return F.normalize(randn(*shape, seed=seed), dim=-1)


def tree(tasks, *, seed=0):
    return {
        name: randn(tasks, *shape, seed=seed + i) for i, (name, shape) in enumerate(SHAPES.items())
    }


def digest(module):
    state = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        state.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        state.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def seeded(slots=3, *, capacity=None, keys=None):
    memory = EpisodicMemory(capacity or slots, DIM, value_dtype=DTYPE, key_dtype=DTYPE)
    memory.seed(
        unit(slots, DIM, seed=9) if keys is None else keys,
        {name: torch.Size(shape) for name, shape in SHAPES.items()},
    )
    return memory


def consolidating(memory, *, retrieval=None, **options):
    options = {"content": "meta", "write": "consolidate", "warmup": 1} | options
    retrieval = retrieval or Retrieval(None, weights="softmax", temperature=0.5).double()
    return EMO(memory, retrieval, Sum(), policy=Policy(**options))


def outer_losses(theta):
    """A loss per task that is not linear in anything."""
    targets = {"w": 0.3, "b": -0.2, "s": 0.5}
    return sum(
        (torch.sin(theta[n]) - t).square().reshape(len(theta[n]), -1).sum(1)
        for n, t in targets.items()
    )


# -- the gradient of a slot ---------------------------------------------------------------------------


def test_the_gradient_of_a_slot_is_the_weighted_mean_of_the_rows_of_its_tasks():
    theta = tree(1, seed=1)
    contents = {name: v.requires_grad_() for name, v in tree(4, seed=2).items()}
    slots = torch.tensor([[2, 0], [1, 2], [2, 1]])
    weights = torch.rand(3, 2, generator=generator_for(0, "a"), dtype=DTYPE)
    starts = {
        name: torch.stack(
            [
                theta[name][0] + sum(weights[b, j] * contents[name][slots[b, j]] for j in range(2))
                for b in range(3)
            ]
        )
        for name in SHAPES
    }
    losses = outer_losses(starts)
    rows = dict(
        zip(
            SHAPES,
            torch.autograd.grad(losses.sum(), list(starts.values()), retain_graph=True),
            strict=True,
        )
    )
    expected = torch.autograd.grad(losses.mean(), list(contents.values()))
    found = slot_gradients(rows, slots, weights, filled=4)
    for gradient, name in zip(expected, SHAPES, strict=True):
        assert torch.allclose(found[name], gradient, rtol=0, atol=1e-14)
    # Slot 3 was recalled by nobody.
    assert not found["w"][3].any()


def test_the_rows_of_a_recall_reach_keys_and_slot_keys():
    memory = seeded(3)
    memory.values = tree(3, seed=5)
    emo = consolidating(memory)
    keys = unit(2, DIM, seed=1).requires_grad_()
    recall = emo.recall(keys)
    theta = {name: value.expand(2, *value.shape[1:]) for name, value in tree(1, seed=1).items()}
    start = emo.offset(theta, recall)
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
            product = sum((rows[n][b] * memory.values[n][slot]).sum() for n in SHAPES)
            assert in_weights[b, j].item() == pytest.approx(product.item(), abs=1e-13)
    outer_losses(start).mean().backward()
    bump = 1e-6
    for tensor, gradient in ((keys.detach(), keys.grad), (memory.keys, recall.slot_keys.grad)):
        for i in range(tensor.shape[0]):
            ends = []
            for sign in (1, -1):
                tensor[i, 0] += sign * bump
                with torch.no_grad():
                    ends.append(outer_losses(emo.offset(theta, emo.recall(keys))).mean().item())
                tensor[i, 0] -= sign * bump
            assert gradient[i, 0].item() == pytest.approx(
                (ends[0] - ends[1]) / (2 * bump), abs=1e-8
            )


# -- the step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decay", "published"), [(0.0, torch.optim.Adam), (0.1, torch.optim.AdamW)]
)
def test_dense_slots_follow_torchs_adam(decay, published):
    memory = seeded(3)
    memory.values = tree(3, seed=3)
    rule = SlotAdam(lr=0.02, key_lr=0.0, betas=(0.8, 0.95), eps=1e-6, decay=decay)
    twin = {name: value.clone().requires_grad_() for name, value in memory.values.items()}
    optimizer = published(twin.values(), lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay)
    for step in range(7):
        rows = tree(2, seed=10 + step)
        slots = torch.tensor([[0, 1], [2, 0]])
        weights = torch.rand(2, 2, generator=generator_for(step, "a"), dtype=DTYPE)
        for name, gradient in slot_gradients(rows, slots, weights, filled=3).items():
            twin[name].grad = gradient
        optimizer.step()
        memory.consolidate(rows, slots, weights=weights, optimizer=rule)
        for name in SHAPES:
            assert torch.allclose(memory.values[name], twin[name], rtol=0, atol=1e-12)


def test_the_first_steps_are_as_exact_in_float32_as_torchs():
    value, gradient = torch.zeros(2, 3), randn(2, 3).float()
    first, second = torch.zeros(2, 3), torch.zeros(2, 3)
    SlotAdam().step_(
        value,
        gradient,
        first=first,
        second=second,
        steps=torch.ones(2, dtype=torch.int64),
        moved=torch.ones(2, dtype=torch.bool),
        lr=1.0,
        decay=0.0,
    )
    # The first step of Adam is lr times the sign of the gradient, up to eps and rounding.
    assert torch.allclose(value, -gradient.sign(), rtol=0, atol=5e-7)


def test_lazy_slots_count_their_own_steps_and_idle_ones_do_not_move():
    memory = seeded(3)
    memory.values = tree(3, seed=3)
    rule = SlotAdam(lr=0.02, key_lr=0.05, update="lazy", decay=0.1)
    alone = {name: value[1:2].clone().requires_grad_() for name, value in memory.values.items()}
    optimizer = torch.optim.AdamW(alone.values(), lr=0.02, weight_decay=0.1)
    for step, recalled in enumerate([1, 0, 1, 0, 0, 1]):
        before = {n: t.clone() for n, t in memory.state_dict().items()}
        rows = tree(1, seed=20 + step)
        memory.consolidate(
            rows,
            torch.tensor([[recalled, 2]]),
            weights=torch.tensor([[0.7, 0.0]], dtype=DTYPE),
            optimizer=rule,
            key_gradient=randn(3, DIM, seed=step),
        )
        after = memory.state_dict()
        idle = [slot for slot in range(3) if slot != recalled]
        for name in before:
            if name.startswith(("values", "moments", "keys")) and name in before:
                assert torch.equal(after[name][idle], before[name][idle])
                assert not torch.equal(after[name][recalled], before[name][recalled])
        if recalled == 1:
            for name, parameter in alone.items():
                parameter.grad = 0.7 * rows[name]
            optimizer.step()
    assert memory.moments["steps"].tolist() == [3, 3, 0]
    for name, parameter in alone.items():
        assert torch.allclose(memory.values[name][1:2], parameter, rtol=0, atol=1e-12)


def test_dense_slots_drift_on_old_moments_and_lazy_ones_do_not():
    moved = {}
    for update in ("dense", "lazy"):
        memory = seeded(2)
        for weights in ([[1.0, 0.0]], [[0.0, 1.0]]):
            before = memory.values["b"].clone()
            memory.consolidate(
                tree(1, seed=7),
                torch.tensor([[0, 1]]),
                weights=torch.tensor(weights, dtype=DTYPE),
                optimizer=SlotAdam(update=update),
            )
        moved[update] = bool((memory.values["b"][0] != before[0]).any())
    assert moved == {"dense": True, "lazy": False}


def test_decay_pulls_values_towards_zero_by_lr_times_decay():
    memory = seeded(2)
    memory.values = tree(2, seed=3)
    before = {name: value.clone() for name, value in memory.values.items()}
    nothing = {name: torch.zeros_like(row) for name, row in tree(1).items()}
    memory.consolidate(
        nothing,
        torch.tensor([[0, 1]]),
        weights=torch.full((1, 2), 0.5, dtype=DTYPE),
        optimizer=SlotAdam(lr=0.1, decay=0.5),
    )
    for name in SHAPES:
        assert torch.allclose(memory.values[name], before[name] * 0.95, rtol=0, atol=1e-15)


def test_slot_keys_stay_on_the_unit_sphere():
    memory = seeded(3)
    before = memory.keys.clone()
    for step in range(4):
        memory.consolidate(
            tree(1, seed=step),
            torch.tensor([[0, 1, 2]]),
            weights=torch.full((1, 3), 1 / 3, dtype=DTYPE),
            optimizer=SlotAdam(key_lr=0.1),
            key_gradient=randn(3, DIM, seed=30 + step),
        )
    assert torch.allclose(memory.keys.norm(dim=1), torch.ones(3, dtype=DTYPE), rtol=0, atol=1e-14)
    assert bool((memory.keys != before).any(1).all())


def test_slot_keys_without_a_rate_stay_where_they_were_seeded():
    memory = seeded(3)
    before = memory.keys.clone()
    memory.consolidate(
        tree(1),
        torch.tensor([[0, 1]]),
        weights=torch.full((1, 2), 0.5, dtype=DTYPE),
        optimizer=SlotAdam(key_lr=0.0),
        key_gradient=randn(3, DIM),
    )
    assert torch.equal(memory.keys, before)


def test_overwriting_a_slot_forgets_its_moments():
    memory = seeded(2)
    memory.consolidate(
        tree(1),
        torch.tensor([[0, 1]]),
        weights=torch.full((1, 2), 0.5, dtype=DTYPE),
        optimizer=SlotAdam(),
    )
    slot = memory.write(unit(1, DIM), {n: torch.zeros(1, *s) for n, s in SHAPES.items()})[0]
    for name, moment in memory.moments.items():
        assert not moment[slot].any(), name
        assert bool(moment[1 - slot].any()) or name.endswith("keys"), name


@pytest.mark.parametrize(
    "options", [{"update": "eager"}, {"lr": -1.0}, {"key_lr": -1.0}, {"decay": -1.0}]
)
def test_slot_options_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError):
        SlotAdam(**options)


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
    emo = consolidating(
        EpisodicMemory(3, DIM, value_dtype=DTYPE, key_dtype=DTYPE), warmup=5, seed=7
    )
    keys, _ = clustered(10)
    for batch in range(5):
        recall = emo.recall(keys[6 * batch : 6 * batch + 6])
        assert recall.m == 0
        assert torch.equal(emo.memory.warm_keys, keys[: 6 * batch])
        emo.remember(recall, tree(6, seed=batch))
    assert len(emo.memory) == 3
    assert torch.equal(emo.memory.keys, key_centres(keys, 3, seed=7))
    assert all(not value.any() for value in emo.memory.values.values())
    assert emo.memory.warm_keys.shape == (0, DIM)


def test_the_warm_up_keeps_the_last_four_hundred_keys():
    emo = consolidating(EpisodicMemory(2, DIM, key_dtype=DTYPE), warmup=9)
    keys = unit(500, DIM)
    emo.remember(emo.recall(keys[:250]), tree(250))
    emo.remember(emo.recall(keys[250:]), tree(250))
    assert torch.equal(emo.memory.warm_keys, keys[100:])


# -- inside EMO --------------------------------------------------------------------------------------


def test_a_memory_of_zeros_starts_tasks_where_the_base_learner_does():
    emo = consolidating(seeded(3))
    theta = tree(2, seed=1)
    recall = emo.recall(unit(2, DIM))
    assert recall.m == 3
    start = emo.offset(theta, recall)
    for name in SHAPES:
        assert torch.equal(start[name], theta[name])
    assert emo.combine(theta, recall) is theta
    assert emo.opening(recall) is None


def test_the_start_is_theta_plus_the_weighted_offsets():
    memory = seeded(3)
    memory.values = tree(3, seed=4)
    emo = consolidating(memory)
    theta, recall = tree(2, seed=1), emo.recall(unit(2, DIM))
    start = emo.offset(theta, recall)
    for b in range(2):
        squared = [float((recall.keys[b] - memory.keys[j]).square().sum()) for j in range(3)]
        terms = [math.exp(-d / 0.5) for d in squared]
        for name in SHAPES:
            offset = sum(t / sum(terms) * memory.values[name][j] for j, t in enumerate(terms))
            # tau passes through float32 when the module is built.
            assert torch.allclose(start[name][b], theta[name][b] + offset, rtol=0, atol=1e-7)


def test_remembering_consolidates_rows_with_the_weights_of_the_recall():
    memory, twin = seeded(3), seeded(3)
    emo = consolidating(memory, slots=SlotAdam(lr=0.1))
    recall, rows = emo.recall(unit(2, DIM)), tree(2, seed=2)
    recall.slot_keys.grad = randn(3, DIM, seed=8)
    emo.remember(recall, rows)
    twin.touch(recall.slots)
    twin.consolidate(
        rows,
        recall.slots,
        weights=recall.weights.detach(),
        optimizer=SlotAdam(lr=0.1),
        key_gradient=randn(3, DIM, seed=8),
    )
    twin.end_batch()
    assert digest(memory) == digest(twin)
    assert bool(memory.values["w"].any())


def test_descending_on_the_memory_lowers_the_outer_loss():
    emo = consolidating(seeded(3), slots=SlotAdam(lr=0.02))
    keys, theta = unit(4, DIM), {n: torch.zeros(4, *s, dtype=DTYPE) for n, s in SHAPES.items()}
    losses = []
    for _ in range(30):
        recall = emo.recall(keys)
        start = {n: t.detach().requires_grad_() for n, t in emo.offset(theta, recall).items()}
        loss = outer_losses(start)
        losses.append(loss.mean().item())
        rows = torch.autograd.grad(loss.sum(), list(start.values()))
        emo.remember(recall, dict(zip(start, rows, strict=True)))
    assert losses[-1] < 0.2 * losses[0]


def test_the_numbering_of_slots_makes_no_difference():
    order = torch.tensor([2, 0, 1])
    keys, offsets = unit(3, DIM, seed=9), tree(3, seed=4)
    starts, after = [], []
    for kept in (torch.arange(3), order):
        memory = seeded(3, keys=keys[kept])
        memory.values = {name: value[kept].clone() for name, value in offsets.items()}
        emo = consolidating(memory, slots=SlotAdam(lr=0.1, key_lr=0.1))
        recall = emo.recall(unit(2, DIM))
        recall.slot_keys.grad = randn(3, DIM, seed=8)[kept]
        starts.append(emo.offset(tree(2, seed=1), recall))
        emo.remember(recall, tree(2, seed=2))
        after.append(memory)
    for name in SHAPES:
        assert torch.allclose(starts[0][name], starts[1][name], rtol=0, atol=1e-15)
        assert torch.allclose(
            after[0].values[name][order], after[1].values[name], rtol=0, atol=1e-14
        )
    assert torch.allclose(after[0].keys[order], after[1].keys, rtol=0, atol=1e-14)


def test_a_null_slot_leaves_far_tasks_to_the_base_learner():
    memory = seeded(2, keys=torch.eye(DIM, dtype=DTYPE)[:2])
    memory.values = tree(2, seed=4)
    retrieval = Retrieval(None, weights="softmax", temperature=0.05, null_distance=0.5).double()
    emo = consolidating(memory, retrieval=retrieval)
    keys = torch.stack([torch.eye(DIM, dtype=DTYPE)[0], -torch.eye(DIM, dtype=DTYPE)[0]])
    theta = tree(2, seed=1)
    start = emo.offset(theta, emo.recall(keys))
    moved = start["w"] - theta["w"]
    assert moved[0].abs().max() > 0.5 * memory.values["w"][0].abs().max()
    assert moved[1].abs().max() < 1e-10


def test_a_novel_task_claims_a_slot_that_starts_at_zero():
    axes = torch.eye(DIM, dtype=DTYPE)
    memory = seeded(1, capacity=3, keys=axes[:1])
    emo = consolidating(memory, novelty=1.0, slots=SlotAdam(lr=0.1))
    near = F.normalize(axes[0] + 0.2 * axes[2], dim=0)
    emo.remember(emo.recall(torch.stack([near, axes[1]])), tree(2, seed=1))
    assert len(memory) == 2
    assert torch.equal(memory.keys[1], axes[1])
    assert not memory.values["w"][1].any()
    assert memory.moments["steps"].tolist() == [1, 0, 0]
    # The near task alone was consolidated: Adam's first step is lr times the sign of its row.
    assert torch.allclose(memory.values["w"][0], -0.1 * tree(2, seed=1)["w"][0].sign(), atol=1e-6)


def test_the_first_tasks_of_an_empty_memory_are_novel():
    memory = EpisodicMemory(4, DIM, value_dtype=DTYPE, key_dtype=DTYPE)
    emo = consolidating(memory, novelty=0.5, warmup=100)
    emo.remember(emo.recall(torch.eye(DIM, dtype=DTYPE)[:2]), tree(2))
    assert torch.equal(memory.keys[: len(memory)], torch.eye(DIM, dtype=DTYPE)[:2])


def test_a_novel_task_takes_the_victim_of_the_controller_when_the_memory_is_full():
    axes = torch.eye(DIM, dtype=DTYPE)
    memory = seeded(2, keys=axes[:2])
    emo = consolidating(memory, retrieval=Retrieval(1, weights="softmax").double(), novelty=1.0)
    emo.remember(emo.recall(axes[[0]]), tree(1))
    emo.remember(emo.recall(F.normalize(axes[[2]] + 0.1 * axes[[0]], dim=1)), tree(1))
    # Slot 0 was recalled last, by the novel task too, so slot 1 is the least recent.
    assert torch.equal(memory.keys[0], axes[0])
    assert memory.ledger.generation.tolist() == [1, 2]


def test_consolidation_goes_on_bit_for_bit_after_saving_and_loading():
    def batch(emo, number):
        recall = emo.recall(unit(2, DIM, seed=number))
        if recall.slot_keys is not None:
            recall.slot_keys.grad = randn(3, DIM, seed=40 + number)
        emo.remember(recall, tree(2, seed=number))

    def build():
        memory = EpisodicMemory(3, DIM, value_dtype=DTYPE, key_dtype=DTYPE)
        return consolidating(memory, warmup=2)

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


def test_evaluation_leaves_consolidated_slots_alone():
    memory = seeded(3)
    memory.values = tree(3, seed=4)
    emo = consolidating(memory).eval()
    before = digest(emo)
    recall = emo.recall(unit(2, DIM))
    emo.offset(tree(2), recall)
    with pytest.raises(MemoryWriteError, match="eval mode"):
        emo.remember(recall, tree(2))
    assert digest(emo) == before
