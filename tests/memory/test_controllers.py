"""Who is forgotten: worked examples, laws, and the clock against one inspection at a time."""

from itertools import product

import pytest
import torch

from tests.reference.controllers import ListClock
from torchemo.core.errors import ConfigError
from torchemo.memory import controllers
from torchemo.memory.controllers import CONTROLLERS, FIFO, LRU, Clock, Controller
from torchemo.memory.ledger import Ledger
from torchemo.memory.store import EpisodicMemory

ALL = [FIFO(), LRU(), Clock(insert_ref=True), Clock(insert_ref=False)]
NAMES = ["fifo", "lru", "clock-1", "clock-0"]
every_controller = pytest.mark.parametrize("controller", ALL, ids=NAMES)


class Slots:
    """Slots without keys and values: enough to see what a controller does."""

    def __init__(self, controller, capacity):
        self.controller = controller
        self.ledger = Ledger.empty(capacity)
        self.filled = 0

    def write(self):
        if self.filled < self.ledger.written.numel():
            slot, self.filled = self.filled, self.filled + 1
        else:
            slot = self.controller.victim(self.ledger)
        self.controller.wrote(self.ledger, slot)
        return slot

    def read(self, *slots):
        self.controller.touch(self.ledger, torch.tensor(slots))


def filled(controller, capacity):
    slots = Slots(controller, capacity)
    assert [slots.write() for _ in range(capacity)] == list(range(capacity))
    return slots


@pytest.mark.parametrize(
    ("controller", "d", "e"),
    [
        (FIFO(), 0, 1),
        (LRU(), 1, 2),
        (Clock(insert_ref=True), 0, 2),
        (Clock(insert_ref=False), 1, 2),
    ],
    ids=NAMES,
)
def test_the_worked_example_of_three_slots(controller, d, e):
    slots = filled(controller, 3)  # A, B, C
    slots.read(0)
    assert slots.write() == d  # D
    slots.read(1)
    assert slots.write() == e  # E


def test_the_hand_and_the_bits_of_the_worked_example():
    slots = filled(Clock(insert_ref=True), 3)
    slots.read(0)
    slots.write()
    assert int(slots.ledger.hand) == 1
    assert slots.ledger.referenced.tolist() == [True, False, False]
    slots.read(1)
    slots.write()
    assert int(slots.ledger.hand) == 0
    assert slots.ledger.referenced.tolist() == [True, False, True]


def test_the_bits_of_the_worked_example_without_a_bit_for_new_items():
    slots = filled(Clock(insert_ref=False), 3)
    slots.read(0)
    assert slots.ledger.referenced.tolist() == [True, False, False]
    slots.write()
    assert (slots.ledger.referenced.tolist(), int(slots.ledger.hand)) == ([False] * 3, 2)
    slots.read(1)
    slots.write()
    assert (slots.ledger.referenced.tolist(), int(slots.ledger.hand)) == ([False, True, False], 0)


@every_controller
def test_without_reads_all_forget_in_the_order_of_writing(controller):
    slots = filled(controller, 4)
    assert [slots.write() for _ in range(10)] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


@every_controller
def test_one_slot_is_the_last_task(controller):
    slots = filled(controller, 1)
    for _ in range(5):
        slots.read(0)
        assert slots.write() == 0


def test_fifo_does_not_look_at_reads():
    slots = filled(FIFO(), 3)
    slots.read(0, 1)
    slots.read(0)
    assert [slots.write() for _ in range(4)] == [0, 1, 2, 0]


def test_lru_evicts_the_slot_recalled_longest_ago():
    slots = filled(LRU(), 4)
    slots.read(0)
    slots.read(2)
    slots.read(1)
    assert [slots.write() for _ in range(5)] == [3, 0, 2, 1, 3]


def test_lru_keeps_the_nearest_of_one_read_longest():
    slots = filled(LRU(), 4)
    slots.read(2, 0, 3, 1)
    assert [slots.write() for _ in range(4)] == [1, 3, 0, 2]


def test_lru_evicts_the_farthest_of_the_latest_read_when_every_slot_is_read():
    slots = filled(LRU(), 3)
    for order in ([0, 1, 2], [2, 0, 1], [1, 0, 2], [0, 2, 1]):
        slots.read(*order)
        assert slots.write() == order[-1]


@pytest.mark.parametrize("insert_ref", [True, False])
def test_clock_is_fifo_when_every_slot_is_read_before_every_write(insert_ref):
    slots = filled(Clock(insert_ref=insert_ref), 3)
    victims = []
    for order in ([2, 1, 0], [0, 2, 1], [1, 0, 2], [0, 1, 2], [2, 0, 1]):
        slots.read(*order)
        victims.append(slots.write())
    assert victims == [0, 1, 2, 0, 1]


def test_clock_is_fifo_when_every_slot_is_read_before_a_batch_of_writes():
    slots = filled(Clock(insert_ref=True), 3)
    victims = []
    for _ in range(4):
        slots.read(0, 1, 2)
        slots.read(2, 1, 0)
        victims += [slots.write(), slots.write()]
    assert victims == [0, 1, 2, 0, 1, 2, 0, 1]


def test_clock_without_a_bit_for_new_items_can_overwrite_the_same_batch():
    slots = Slots(Clock(insert_ref=False), 3)
    slots.write()
    slots.write()
    slots.read(0, 1)
    slots.read(1, 0)
    # Slot 2 is the only one that nobody has read when the batch's second write looks for a place.
    assert [slots.write(), slots.write()] == [2, 2]
    later = []
    for _ in range(2):
        slots.read(0, 1, 2)
        later += [slots.write(), slots.write()]
    assert later == [0, 1, 2, 0]


def test_the_clock_equals_one_inspection_at_a_time_in_every_state_of_up_to_five_slots():
    for capacity in range(1, 6):
        for bits, hand in product(product([False, True], repeat=capacity), range(capacity)):
            ledger = Ledger.empty(capacity)
            ledger.referenced[:] = torch.tensor(bits)
            ledger.hand.fill_(hand)
            naive = ListClock(capacity, insert_ref=True)
            naive.bits, naive.hand = list(bits), hand
            assert Clock().victim(ledger) == naive.sweep()
            assert ledger.referenced.tolist() == naive.bits
            assert int(ledger.hand) == naive.hand


def test_lru_with_update_last_one_overwrites_the_most_recent_slot():
    slots = filled(LRU(update_last=1.0), 3)
    assert [slots.write(), slots.write()] == [2, 2]
    slots.read(1, 0)
    assert [slots.write(), slots.write()] == [1, 1]


def test_lru_with_update_last_overwrites_the_most_recent_slot_that_often():
    controller = LRU(update_last=0.25)
    slots = filled(controller, 3)
    last = 0
    for _ in range(2000):
        recent = int(slots.ledger.accessed.argmax())
        last += slots.write() == recent
    # A binomial of 2000 draws has a standard deviation of 19.4 here; four of them.
    assert abs(last - 500) < 78


def test_update_last_is_drawn_from_the_seed_and_the_event_counter_alone():
    def run(seed):
        slots = filled(LRU(update_last=0.5, seed=seed), 3)
        return [slots.write() for _ in range(30)]

    assert run(0) == run(0)
    assert run(0) != run(1)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_update_last_is_a_probability(p):
    with pytest.raises(ConfigError, match="update_last"):
        LRU(update_last=p)


@every_controller
def test_every_touched_slot_and_every_write_is_one_event(controller):
    slots = filled(controller, 3)
    assert int(slots.ledger.now) == 3
    slots.read(2, 0)
    assert int(slots.ledger.now) == 5
    assert slots.ledger.accessed.tolist() == [4, 2, 5]
    assert slots.ledger.written.tolist() == [1, 2, 3]
    assert slots.ledger.recalls.tolist() == [1, 0, 1]


@every_controller
def test_a_write_resets_what_was_known_of_the_slot(controller):
    slots = filled(controller, 2)
    slots.read(0, 1)
    slots.ledger.iteration += 7
    slot = slots.write()
    other = 1 - slot
    assert (int(slots.ledger.recalls[slot]), int(slots.ledger.recalls[other])) == (0, 1)
    assert (int(slots.ledger.generation[slot]), int(slots.ledger.generation[other])) == (2, 1)
    assert (int(slots.ledger.born[slot]), int(slots.ledger.born[other])) == (7, 0)
    assert int(slots.ledger.written[slot]) == int(slots.ledger.accessed[slot]) == 5


def test_the_registry_names_every_controller():
    assert {"fifo": FIFO, "lru": LRU, "clock": Clock} == CONTROLLERS
    assert all(isinstance(made(), Controller) for made in CONTROLLERS.values())


@pytest.mark.parametrize("sweep", [1, 2, 3, 1024])
def test_the_hand_of_the_clock_moves_the_same_however_far_it_looks(monkeypatch, sweep):
    monkeypatch.setattr(controllers, "SWEEP", sweep)
    g = torch.Generator().manual_seed(0)
    ledger, clock, reference = Ledger.empty(5), Clock(), ListClock(5, insert_ref=True)
    for slot in range(5):
        clock.wrote(ledger, slot)
        reference.write(slot)
    for item in range(200):
        touched = torch.randperm(5, generator=g)[: item % 6]
        clock.touch(ledger, touched)
        reference.touch(touched.tolist())
        slot = clock.victim(ledger)
        clock.wrote(ledger, slot)
        assert slot == reference.write(item)
        assert ledger.referenced.tolist() == reference.bits
        assert int(ledger.hand) == reference.hand


@pytest.mark.parametrize("name", ["fifo", "clock"])
def test_fifo_and_clock_keep_no_list_of_their_slots(name):
    """Beyond 10^7 slots a list of a hundred bytes each would be tens of gigabytes."""
    controller, ledger = CONTROLLERS[name](), Ledger.empty(50)
    g = torch.Generator().manual_seed(0)
    for slot in range(50):
        ledger.filled += 1
        controller.wrote(ledger, slot)
    for _ in range(300):
        controller.touch(ledger, torch.randperm(50, generator=g)[:7])
        controller.wrote(ledger, controller.victim(ledger))
        assert not any(order._slots for order in ledger._orders.values())


def test_lru_refuses_more_slots_than_it_can_keep_in_order_and_says_what_to_do():
    controllers.check_capacity(LRU(), 10**7)
    with pytest.raises(
        ConfigError, match=r"LRU .* at most 10,000,000 slots, got 10,000,001"
    ) as told:
        EpisodicMemory(10**7 + 1, 1)
    assert "memory.controller.name to clock or fifo" in told.value.hint
    for other in (FIFO(), Clock()):
        controllers.check_capacity(other, 10**9)


@pytest.mark.parametrize("name", CONTROLLERS)
def test_tasks_written_at_once_are_booked_as_one_by_one(name):
    at_once, singly = (EpisodicMemory(7, 2, controller=CONTROLLERS[name]()) for _ in range(2))
    g = torch.Generator().manual_seed(0)
    for count in (3, 6, 2, 9):
        keys, values = torch.randn(count, 2, generator=g), torch.randn(count, 4, generator=g)
        notes = torch.arange(count)
        slots = at_once.write(keys, {"w": values}, notes={"domain": notes})
        for b in range(count):
            part = slice(b, b + 1)
            (slot,) = singly.write(keys[part], {"w": values[part]}, notes={"domain": notes[part]})
            assert slot == slots[b]
        for memory in (at_once, singly):
            memory.touch(torch.tensor([[1, 0]]))
            memory.end_batch()
    twin = singly.state_dict()
    for tensor_name, tensor in at_once.state_dict().items():
        assert torch.equal(tensor, twin[tensor_name]), tensor_name
