"""Tasks for one step after the other; where a device computes, the next ones are drawn meanwhile."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar, final

import torch

T = TypeVar("T")


@final
class Feed(Generic[T]):
    """Draw the tasks of each step, one step ahead where that costs the work nothing.

    Tasks are a function of the step, so drawing them ahead changes none. On the CPU the same cores would
    do both, and nothing is drawn ahead.

    Args:
        draw: Returns the tasks of a step.
        device: Where the work is done.

    Example:
        >>> from torchemo.core.types import Batch, Episode
        >>> x = torch.zeros(1, 2, 1)
        >>> feed = Feed(lambda step: Episode(Batch(x + step, x), Batch(x, x)), torch.device("cpu"))
        >>> float(feed(3).support.x[0, 0])
        3.0
    """

    def __init__(self, draw: Callable[[int], T], device: torch.device) -> None:
        self._draw = draw
        self._pool = None if device.type == "cpu" else ThreadPoolExecutor(1, "feed")
        self._ahead: tuple[int, Future[T]] | None = None

    def __call__(self, step: int) -> T:
        """Return the tasks of a step, and begin with those of the next."""
        if self._pool is None:
            return self._draw(step)
        ahead, self._ahead = self._ahead, None
        tasks = ahead[1].result() if ahead is not None and ahead[0] == step else self._draw(step)
        self._ahead = (step + 1, self._pool.submit(self._draw, step + 1))
        return tasks
