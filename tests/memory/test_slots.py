"""How slots learn: gradient descent on the memory's content, against autograd and torch's Adam."""

import pytest
import torch

from tests.memory.offset_cases import DIM, DTYPE, SHAPES, outer_losses, randn, seeded, tree, unit
from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.memory.slots import SlotAdam, slot_gradients

# -- the gradient of a slot ---------------------------------------------------------------------------


def test_the_gradient_of_a_slot_is_the_weighted_mean_of_its_tasks_gradients():
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
        memory.step_slots(rows, slots, weights=weights, optimizer=rule)
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
        memory.step_slots(
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
            memory.step_slots(
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
    memory.step_slots(
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
        memory.step_slots(
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
    memory.step_slots(
        tree(1),
        torch.tensor([[0, 1]]),
        weights=torch.full((1, 2), 0.5, dtype=DTYPE),
        optimizer=SlotAdam(key_lr=0.0),
        key_gradient=randn(3, DIM),
    )
    assert torch.equal(memory.keys, before)


def test_overwriting_a_slot_forgets_its_moments():
    memory = seeded(2)
    memory.step_slots(
        tree(1),
        torch.tensor([[0, 1]]),
        weights=torch.full((1, 2), 0.5, dtype=DTYPE),
        optimizer=SlotAdam(),
    )
    slot = memory.write(unit(1, DIM), {n: torch.zeros(1, *s) for n, s in SHAPES.items()})[0]
    for name, moment in memory.moments.items():
        assert not moment[slot].any(), name
        assert bool(moment[1 - slot].any()) or name.endswith("keys"), name


def test_a_rate_factor_multiplies_both_rates_and_nothing_else():
    rule = SlotAdam(lr=0.02, key_lr=0.05, decay=0.1, update="lazy")
    assert rule.at(0.5) == SlotAdam(lr=0.01, key_lr=0.025, decay=0.1, update="lazy")


@pytest.mark.parametrize(
    "options", [{"update": "eager"}, {"lr": -1.0}, {"key_lr": -1.0}, {"decay": -1.0}]
)
def test_slot_options_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError):
        SlotAdam(**options)
