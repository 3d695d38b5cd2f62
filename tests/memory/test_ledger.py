"""The book-keeping of slots: stamps, and the order of slots that is derived from them."""

from dataclasses import fields

import pytest
import torch

from torchemo.core.rng import generator_for
from torchemo.memory import ledger as ledgers
from torchemo.memory.ledger import Ledger, book_faults


def test_an_empty_ledger_has_a_number_per_slot_or_one_for_all():
    ledger = Ledger.empty(3)
    whole = {"now", "filled", "iteration", "hand"}
    for made, number in ((ledger, torch.int32), (ledger.absolute(), torch.int64)):
        for field in fields(made):
            stamp = getattr(made, field.name)
            one = field.name in whole
            assert stamp.shape == (() if one else (3,))
            flag = field.name == "referenced"
            assert stamp.dtype == (torch.bool if flag else torch.int64 if one else number)
            assert not stamp.any()


@pytest.mark.parametrize("stamp", ["written", "accessed"])
def test_the_oldest_slot_is_that_of_the_smallest_stamp_whoever_gave_the_stamps(stamp):
    """The order of the slots is kept up by the ledger; stamps it did not give are noticed."""
    g = torch.Generator().manual_seed(0)
    ledger = Ledger.empty(7)
    for event in range(200):
        if event % 50 == 49:  # somebody else: a restored state, or a change in place
            fresh = torch.randperm(7, generator=g) + int(ledger.now)
            setattr(ledger, stamp, fresh) if event % 100 == 49 else getattr(ledger, stamp).copy_(
                fresh
            )
            ledger.now += 7
        elif event % 3:
            ledger.stamp_access(torch.randperm(7, generator=g)[: event % 5])
        else:
            ledger.stamp_write(int(torch.randint(7, (), generator=g)))
        assert ledger.oldest(stamp) == int(getattr(ledger, stamp).argmin())
        assert ledger.newest(stamp) == int(getattr(ledger, stamp).argmax())


@pytest.mark.parametrize("stamp", ["written", "accessed"])
def test_stamps_of_others_are_noticed_also_if_the_next_stamp_is_the_ledgers_own(stamp):
    ledger = Ledger.empty(4)
    for slot in range(4):
        ledger.stamp_write(slot)
    assert (ledger.oldest(stamp), ledger.newest(stamp)) == (0, 3)
    getattr(ledger, stamp).copy_(torch.tensor([13, 12, 10, 11]))
    ledger.now.fill_(13)
    ledger.stamp_write(1)
    assert (ledger.oldest(stamp), ledger.newest(stamp)) == (2, 1)


def naive_ends(stamps):
    order = sorted(range(len(stamps)), key=lambda slot: int(stamps[slot]))
    return order[0], order[-1]


@pytest.mark.parametrize("in_turn", [True, False])
def test_the_oldest_and_the_newest_slot_are_those_of_the_stamps(in_turn):
    ledger, generator = Ledger.empty(7), generator_for(0, "writes")
    for slot in range(7):
        ledger.stamp_write(slot)
    for turn in range(60):
        assert ledger.oldest("written") == naive_ends(ledger.written)[0]
        assert ledger.newest("written") == naive_ends(ledger.written)[1]
        other = int(torch.randint(7, (), generator=generator))
        # Out of turn now and then; and by somebody else, as a restored state is.
        ledger.stamp_write(ledger.oldest("written") if in_turn or turn % 3 else other)
        if turn % 20 == 10:
            ledger.written.copy_(ledger.written.clone())
    assert (ledger._orders["written"]._oldest is not None) == in_turn


def test_a_large_memory_that_is_written_in_turn_needs_no_list_of_its_slots():
    ledger = Ledger.empty(200_000)
    ledger.written.copy_(torch.arange(1, 200_001))
    for turn in range(5):
        assert ledger.oldest("written") == turn
        ledger.stamp_write(turn)
    assert not ledger._orders["written"]._slots


@pytest.mark.parametrize("start", [0, 10_000])
def test_times_keep_their_order_whenever_the_base_moves(start, monkeypatch):
    """32-bit times against a ledger of plain numbers, with room for 60 events instead of 2^31."""
    monkeypatch.setattr(ledgers, "SPAN", 60)
    ledger, g = Ledger.empty(9), generator_for(0, "events")
    ledger.now.fill_(start)
    now, written, accessed = start, [0] * 9, [0] * 9
    for slot in range(9):
        ledger.stamp_write(slot)
        now += 1
        written[slot] = accessed[slot] = now
    for event in range(400):
        # Slot 8 is left alone for long, so that moving the base alone makes no room.
        free = 8 if event % 150 else 9
        slots = torch.randperm(free, generator=g)[: 1 + event % 4]
        if event % 5:
            ledger.stamp_access(slots)
            for place, slot in enumerate(slots.tolist()):
                accessed[slot] = now + len(slots) - place
            now += len(slots)
        else:
            ledger.stamp_write(int(slots[0]))
            now += 1
            written[int(slots[0])] = accessed[int(slots[0])] = now
        assert int(ledger.now) == now
        whole = ledger.absolute()
        for ours, theirs in ((whole.written, written), (whole.accessed, accessed)):
            assert ours.argsort().tolist() == torch.tensor(theirs).argsort().tolist()
        assert ((whole.written == whole.accessed).tolist()) == [
            w == a for w, a in zip(written, accessed, strict=True)
        ]
        assert ledger.written.dtype == torch.int32
        assert int(ledger.accessed.max()) <= 60
        assert list(book_faults(with_filled(whole))) == []
        assert ledger.oldest("written") == naive_ends(written)[0]
        assert ledger.oldest("accessed") == naive_ends(accessed)[0]


def with_filled(ledger):
    ledger.filled.fill_(len(ledger.written))
    return ledger


def test_a_ledger_of_many_events_is_saved_and_opened_with_its_order():
    saved = Ledger.empty(3).absolute()
    saved.now.fill_(2**33)
    saved.written.copy_(torch.tensor([5, 2**33 - 1, 2**32]))
    saved.accessed.copy_(torch.tensor([2**33, 2**33 - 1, 2**32 + 1]))
    ledger = Ledger.of(saved)
    assert ledger.written.dtype == torch.int32
    assert (ledger.oldest("written"), ledger.newest("written")) == (0, 1)
    assert (ledger.oldest("accessed"), ledger.newest("accessed")) == (2, 0)
    again = Ledger.of(ledger.absolute())
    assert torch.equal(again.absolute().written, ledger.absolute().written)
    ledger.stamp_write(2)
    assert int(ledger.absolute().written[2]) == 2**33 + 1


def test_moderate_times_are_opened_as_they_were_saved():
    ledger = Ledger.empty(4)
    for slot in (0, 1, 2, 1):
        ledger.stamp_write(slot)
    ledger.stamp_access(torch.tensor([0, 2]))
    saved = ledger.absolute()
    back = Ledger.of(saved).absolute()
    for field in fields(saved):
        assert torch.equal(getattr(saved, field.name), getattr(back, field.name)), field.name


def test_filling_at_once_stamps_as_one_by_one():
    one, other = Ledger.empty(6), Ledger.empty(6)
    for ledger in (one, other):
        ledger.stamp_write(0)
        ledger.stamp_access(torch.tensor([0]))
        ledger.iteration += 3
        assert ledger.oldest("written") == 1
    for slot in range(1, 5):
        one.stamp_write(slot)
    other.stamp_fill(1, 4)
    for field in fields(one):
        assert torch.equal(getattr(one, field.name), getattr(other, field.name)), field.name
    assert one.newest("written") == other.newest("written") == 4
    assert one.newest("accessed") == other.newest("accessed") == 4
