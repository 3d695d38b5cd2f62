"""What a memory holds: slots, neighbours, a map of its keys, and whether its state is consistent."""

import numpy as np
import pytest
import torch

from torchemo.core.errors import CheckpointError, ConfigError
from torchemo.memory.controllers import Clock
from torchemo.memory.inspection import slots as slots_module
from torchemo.memory.inspection.slots import faults, principal_map, restored_memory, survey
from torchemo.memory.store import EpisodicMemory


def unit(*rows):
    return torch.nn.functional.normalize(torch.tensor(rows, dtype=torch.float32), dim=1)


@pytest.fixture
def memory():
    """Three of four slots: written in two batches, the first recalled twice, the second once."""
    memory = EpisodicMemory(4, 2, controller=Clock())
    values = {"w": torch.tensor([[3.0, 0.0], [0.0, 1.0]]), "b": torch.tensor([[4.0], [0.0]])}
    domain = {"domain": torch.tensor([1, 0])}
    memory.write(unit([1, 0], [1, 1]), values, notes=domain)
    memory.end_batch()
    memory.touch(torch.tensor([[0, 1]]))
    memory.touch(torch.tensor([[0]]))
    last = {name: value[:1] * 2 for name, value in values.items()}
    memory.write(unit([-1, 0]), last, notes={"domain": torch.tensor([1])})
    memory.end_batch()
    return memory


def test_every_filled_slot_is_described(memory):
    view = survey(memory)
    assert (view.capacity, view.filled, view.batches) == (4, 3, 2)
    assert [slot.age for slot in view.slots] == [2, 2, 1]
    assert [slot.recalls for slot in view.slots] == [2, 1, 0]
    assert [slot.generation for slot in view.slots] == [1, 1, 1]
    assert [slot.domain for slot in view.slots] == [1, 0, 1]
    assert [slot.norm for slot in view.slots] == [5, 1, 10]
    assert view.mean_age == pytest.approx(5 / 3)
    assert view.turnover == 0


def test_the_nearest_slot_is_another_one(memory):
    slots = survey(memory).slots
    assert [slot.nearest for slot in slots] == [1, 0, 1]
    near = (2 - 2**0.5) ** 0.5  # chord of 45 degrees on the unit circle
    far = (2 + 2**0.5) ** 0.5  # and of 135
    assert [slot.distance for slot in slots] == pytest.approx([near, near, far])


def test_turnover_counts_overwrites_per_slot():
    memory = EpisodicMemory(2, 2)
    for _ in range(3):
        memory.write(unit([1, 0], [0, 1]), {"w": torch.ones(2, 1)})
        memory.end_batch()
    assert survey(memory).turnover == 2


def test_an_empty_memory_and_a_single_slot_have_views_too():
    memory = EpisodicMemory(2, 3)
    view = survey(memory)
    assert (view.filled, view.mean_age, view.slots) == (0, None, ())
    memory.write(unit([1, 0, 0]), {"w": torch.ones(1, 1)})
    (slot,) = survey(memory).slots
    assert (slot.nearest, slot.distance, slot.place, slot.domain) == (None, None, (0, 0), None)


def test_the_map_keeps_distances_of_keys_that_lie_in_a_plane():
    generator = torch.Generator().manual_seed(0)
    plane = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    frame, _ = torch.linalg.qr(torch.randn(5, 2, generator=generator, dtype=torch.float64))
    places, shown = principal_map(plane @ frame.T + 3)
    assert sum(shown) == pytest.approx(1)
    assert torch.allclose(torch.cdist(places, places), torch.cdist(plane, plane))
    assert torch.allclose(places.mean(0), torch.zeros(2, dtype=torch.float64), atol=1e-12)


def test_the_map_shows_the_directions_of_largest_spread():
    keys = torch.diag(torch.tensor([5.0, 2.0, 1.0])).double()
    keys = torch.cat([keys, -keys])
    places, shown = principal_map(keys)
    assert shown == pytest.approx((25 / 30, 4 / 30))
    assert places.abs().max(0).values.tolist() == pytest.approx([5, 2])


@pytest.mark.parametrize("sign", [1, -1])
def test_an_axis_of_the_map_points_to_its_largest_place(sign):
    keys = torch.tensor([[3.0, 0.0], [-1.0, 1.0], [-2.0, -1.0]], dtype=torch.float64)
    places, _ = principal_map(sign * keys)
    assert (places.max(0).values >= -places.min(0).values).all()
    assert float(places[0, 0]) > 2.9


def test_the_map_of_equal_or_one_dimensional_keys_is_flat():
    places, shown = principal_map(torch.ones(3, 4))
    assert torch.equal(places, torch.zeros(3, 2))
    assert shown == (1, 0)
    places, shown = principal_map(torch.tensor([[1.0], [2.0], [4.0]]))
    assert (places[:, 1] == 0).all()
    assert shown == (1, 0)


def test_the_map_agrees_with_the_eigenvectors_of_the_covariance():
    rng = np.random.default_rng(1)
    keys = rng.normal(size=(30, 6)) * [3, 0.1, 2, 0.5, 0.2, 0.4]
    places, shown = principal_map(torch.tensor(keys))
    variances, axes = np.linalg.eigh(np.cov(keys.T))
    expected = (keys - keys.mean(0)) @ axes[:, ::-1][:, :2]
    assert places.abs().numpy() == pytest.approx(np.abs(expected), abs=1e-9)
    assert shown == pytest.approx(variances[::-1][:2] / variances.sum())


def test_slots_are_restored_from_the_state_of_their_memory(memory):
    state = {f"store.{name}": tensor for name, tensor in memory.state_dict().items()}
    again = restored_memory({**state, "encoder.w": torch.ones(1)}, value_dtype=torch.float32)
    assert survey(again) == survey(memory)
    with pytest.raises(CheckpointError, match="no keys"):
        restored_memory({"encoder.w": torch.ones(1)}, value_dtype=torch.float32)
    for filled in (-1, 5):
        state["store.ledger.filled"] = torch.tensor(filled)
        with pytest.raises(CheckpointError, match=f"{filled} slots"):
            restored_memory(state, value_dtype=torch.float32)


def test_a_memory_written_by_its_own_rules_has_no_faults(memory):
    assert faults(memory, unit=True) == []
    for _ in range(3):  # and still has none when slots are overwritten
        memory.write(unit([1, 0], [0, 1]), {"w": torch.ones(2, 2), "b": torch.ones(2, 1)},
                     notes={"domain": torch.tensor([0, 1])})  # fmt: skip
        memory.end_batch()
    assert faults(memory, unit=True) == []
    assert faults(EpisodicMemory(3, 2), unit=True) == []


def _set(name, slot, value):
    def change(memory):
        getattr(memory.ledger, name)[slot] = value

    return change


def _break_value(memory):
    memory.values["w"][1, 0] = torch.inf


def _break_key(memory):
    memory.keys[2] *= 1.01


def _ghost(memory):
    memory.keys[3] = 1


def _hand(memory):
    memory.ledger.hand.fill_(4)


def _tie(memory):
    memory.ledger.accessed[0] = memory.ledger.accessed[1]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_break_value, ["slot 1: value 'w' is not finite."]),
        (_break_key, ["slot 2: key is no unit vector."]),
        (_ghost, ["slot 3: key is there although the slot is empty."]),
        (_set("generation", 0, 0), ["slot 0: is filled although it was never written."]),
        (_set("recalls", 3, 2), ["slot 3: was written although it is empty."]),
        (_set("accessed", 2, 99), ["slot 2: has a time that never was."]),
        (_set("accessed", 2, 1), ["slot 2: was used before it was written."]),
        (_set("born", slice(0, 3), 3), ["slot 0, 1, 2: was written in a batch to come."]),
        (_set("recalls", 1, -1), ["slot 1: was recalled less than never."]),
        (_hand, ["the hand of the clock is at 4, there are 4 slots."]),
        (_tie, ["two slots have the same time of last use."]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_true_is_told_by_slot(memory, change, found):
    change(memory)
    assert faults(memory, unit=True) == found


def test_keys_need_no_unit_length_where_nobody_asks_for_it(memory):
    memory.keys[:3] *= 7
    assert faults(memory, unit=False) == []
    assert faults(memory, unit=True) == ["slot 0, 1, 2: key is no unit vector."]


def test_a_list_of_too_many_slots_is_refused_and_names_what_checks_them(monkeypatch):
    monkeypatch.setattr(slots_module, "MOST", 2)
    memory = EpisodicMemory(3, 2)
    memory.write(torch.eye(2), {"w": torch.zeros(2, 1)})
    assert survey(memory).filled == 2
    memory.write(torch.ones(1, 2), {"w": torch.zeros(1, 1)})
    with pytest.raises(ConfigError, match="3 filled slots; at most 2") as told:
        survey(memory)
    assert "memory verify" in told.value.hint


def test_neighbours_found_in_blocks_are_those_found_at_once(monkeypatch):
    memory = EpisodicMemory(20, 3)
    memory.write(torch.randn(20, 3), {"w": torch.randn(20, 4)})
    whole = survey(memory)
    monkeypatch.setattr(slots_module, "_NUMBERS", 200)
    monkeypatch.setattr(slots_module, "_AT_ONCE", 7)
    assert survey(memory) == whole
