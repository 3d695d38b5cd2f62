"""What a training knows besides its tensors: when its slots are given up."""

import pytest

from torchemo.training.progress import Progress


@pytest.mark.parametrize(
    ("judged", "hopeless"),
    [
        ((), False),
        ((True,), False),
        ((True, True), True),
        ((True, False, True), False),
        ((False, True, True), True),
        ((True, True, False), False),
    ],
)
def test_slots_are_given_up_when_none_helps_at_two_validations_in_a_row(judged, hopeless):
    progress = Progress()
    for none_passed in judged:
        progress = progress.judged(none_passed=none_passed)
    assert progress.hopeless is hopeless
