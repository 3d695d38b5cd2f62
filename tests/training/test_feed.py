"""Tasks that are drawn ahead are those of their step."""

import threading

import pytest
import torch

from torchemo.core.errors import DataError
from torchemo.core.types import Batch, Episode
from torchemo.training.feed import Feed


def tasks(step):
    x = torch.full((1, 2, 1), float(step))
    return Episode(Batch(x, x), Batch(x, x))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_step_gets_its_own_tasks_in_any_order(device):
    feed = Feed(tasks, torch.device(device))
    assert [float(feed(step).query.x[0, 0]) for step in (0, 1, 2, 7, 7, 3, 4)] == [
        0,
        1,
        2,
        7,
        7,
        3,
        4,
    ]


def test_the_next_tasks_are_drawn_while_a_device_works():
    drawn = {step: threading.Event() for step in range(5)}

    def draw(step):
        drawn[step].set()
        return tasks(step)

    feed = Feed(draw, torch.device("meta"))
    feed(0)
    assert drawn[1].wait(10)
    assert not drawn[2].is_set()
    on_cpu = Feed(draw, torch.device("cpu"))
    on_cpu(2)
    assert not drawn[3].is_set()


def test_an_error_comes_at_the_step_it_belongs_to():
    def draw(step):
        if step == 2:
            raise DataError("image 7 is gone.")
        return tasks(step)

    feed = Feed(draw, torch.device("meta"))
    feed(0)
    feed(1)
    with pytest.raises(DataError, match="image 7"):
        feed(2)
    assert float(feed(3).query.x[0, 0]) == 3
