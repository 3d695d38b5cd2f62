"""The memories of many users: what is not written yet."""

import torch

from torchemo.lab.study.streams.bank import Bank


def test_slots_that_are_not_written_yet_hold_zeros():
    """They are recalled with weight zero beside other users' visits, and zero times NaN is NaN."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills memory that nobody has written with NaN
    try:
        bank = Bank(users=2, length=3, way=2)
        classes = torch.tensor([[0, 1]])
        shots = torch.ones(1, 2, dtype=torch.int64)
        values = {"head.weight": torch.ones(1, 2, 4)}
        one = torch.tensor([1])
        bank.write(one, classes, classes, shots, means={}, values=values, company=(one, one))
    finally:
        torch.use_deterministic_algorithms(deterministic)
    written = torch.zeros(2, 3, 2, 4)
    written[1, 0] = 1
    assert torch.equal(bank.values["head.weight"], written)
