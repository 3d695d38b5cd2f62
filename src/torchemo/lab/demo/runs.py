"""The two runs of the demo: MAML, and MAML with a memory of offsets, on curves of four families."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from torchemo.config.presets import preset
from torchemo.config.run import RunConfig, StreamSpec
from torchemo.core.errors import ConfigError
from torchemo.core.types import Episode
from torchemo.data.source import open_source
from torchemo.runs.load import load_best
from torchemo.runs.train import train_run
from torchemo.training.device import HERE, Place
from torchemo.training.system import System

RUNS = {"maml": "MAML", "maml-offsets": "MAML + offsets"}
"""Presets and folders of the runs, and their titles."""

SHOTS = 5
"""New points at every visit."""
QUERIES = 100
"""Points of a curve at which answers are compared with it, the same at all visits."""
INNER_RATE, OUTER_RATE = 0.003, 0.006
"""Chosen on validation curves with training seeds that the demo and its record do not use."""


@final
@dataclass(frozen=True)
class DemoConfig:
    """Options of the demo."""

    steps: int = 1000
    """Outer steps of each run."""
    test_tasks: int = 200
    """Unseen curves."""
    visits: int = 5
    """How often each of them comes."""
    seed: int = 0
    """Seed of the initialisation, of the training curves and of the unseen ones."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("test_tasks", 2), ("visits", 2)):
            if getattr(self, name) < least:
                words = name.replace("_", " ")
                raise ConfigError(f"{words} should be {least} or more, got {getattr(self, name)}.")


def demo_run(name: str, config: DemoConfig) -> RunConfig:
    """Return the configuration of one of the runs."""
    base = preset(name, regression=True, n_shot=SHOTS)
    return replace(
        base,
        learner=base.learner.set(inner_lr=INNER_RATE),
        outer=replace(base.outer, lr=OUTER_RATE, schedule="cosine"),
        train=replace(
            base.train,
            steps=config.steps,
            validate_every=max(config.steps // 4, 1),
            validation_tasks=100,
            seed=config.seed,
        ),
    )


def train_one(
    root: Path,
    name: str,
    config: DemoConfig,
    *,
    place: Place = HERE,
    done: Callable[[int], None] = lambda step: None,
) -> System:
    """Train one of the runs, and return what its best checkpoint holds."""

    def tell(event: str, step: int, fields: Mapping[str, Any]) -> None:
        if event == "step":
            done(step)

    train_run(root / name, demo_run(name, config), place=place, on_event=tell)
    return load_best(root / name, place=place).system


def train_both(
    root: Path, config: DemoConfig, *, place: Place, progress: Callable[[int, int], None]
) -> dict[str, System]:
    """Train both runs, and return what their best checkpoints hold."""
    steps, systems = config.steps, {}
    for i, name in enumerate(RUNS):

        def done(step: int, before: int = i * steps) -> None:
            progress(before + step, len(RUNS) * steps)

        systems[name] = train_one(root, name, config, place=place, done=done)
    return systems


def draw_visits(config: DemoConfig) -> list[Episode]:
    """Return the visits: each holds all unseen curves, in the same order, with new points."""
    data, n = demo_run("maml", config).data, config.test_tasks
    stream = StreamSpec(pool=n, law="rounds")
    source = open_source(replace(data, n_query=QUERIES, stream=stream))
    return [
        source.sample("test", seed=config.seed, start=v * n, count=n) for v in range(config.visits)
    ]
