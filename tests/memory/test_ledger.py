"""The book-keeping of slots: stamps, and the order of slots that is derived from them."""

from dataclasses import fields

import pytest
import torch

from torchemo.memory.ledger import Ledger


def test_an_empty_ledger_has_a_number_per_slot_or_one_for_all():
    ledger = Ledger.empty(3)
    whole = {"now", "filled", "iteration", "hand"}
    for field in fields(ledger):
        stamp = getattr(ledger, field.name)
        assert stamp.shape == (() if field.name in whole else (3,))
        assert stamp.dtype == (torch.bool if field.name == "referenced" else torch.int64)
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
