"""Episodes per second: how fast tasks are drawn, so that one knows it is not what training waits for."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torchemo.config.run import DataConfig
from torchemo.data.source import open_source
from torchemo.lab.bench.clock import spread, timed


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Draw batches of four tasks from embedded sources at several sizes and shots."""
    return {"rows": [_row(request, *case) for case in request["cases"]]}


def _row(request: Mapping[str, Any], source: str, size: int, n_shot: int) -> dict[str, Any]:
    config = DataConfig(source=(source,), image_size=size, n_shot=n_shot)
    opened = timed(lambda: open_source(config))
    tasks, batches = open_source(config), request["batches"]

    def draw(first: int) -> None:
        for batch in range(first, first + batches):
            tasks.sample("train", seed=0, start=4 * batch, count=4)

    draw(0)  # warms up
    rates = [
        4 * batches / timed(partial(draw, i * batches)).wall
        for i in range(1, request["repeats"] + 1)
    ]
    return {
        "source": source,
        "size": size,
        "n_shot": n_shot,
        "open_seconds": opened.wall,
        "episodes_per_second": spread(rates),
    }
