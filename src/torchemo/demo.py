"""The demo: MAML against MAML with memory, 5-way 1-shot on synthetic pictures, paired."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from torchemo.comparison import compare
from torchemo.config import ModelConfig, RunConfig
from torchemo.errors import ConfigError
from torchemo.presets import preset
from torchemo.runner import train_run
from torchemo.scoring import Protocol, score_run
from torchemo.trained import load_best

RUNS = {"maml": "maml", "maml-emo": "maml-emo"}
"""Folder and preset of the two runs."""


@final
@dataclass(frozen=True)
class DemoConfig:
    """Options of the demo."""

    iterations: int = 150
    """Outer steps of each of the two runs."""
    test_tasks: int = 200
    """Test tasks, the same for both runs."""
    seed: int = 0
    """Seed of the initialisation and of the training tasks."""

    def __post_init__(self) -> None:
        for name in ("iterations", "test_tasks"):
            if getattr(self, name) < 1:
                words = name.replace("_", " ")
                raise ConfigError(f"{words} should be 1 or more, got {getattr(self, name)}.")


def demo_run(name: str, config: DemoConfig) -> RunConfig:
    """Return the configuration of one of the two runs: small pictures, a small network."""
    base = preset(RUNS[name])
    return replace(
        base,
        learner=replace(base.learner, inner_lr=0.1, steps=3),
        model=ModelConfig(filters=16),
        data=replace(base.data, image_size=28, n_query=5),
        emo=replace(
            base.emo,
            memory=replace(base.emo.memory, warmup=25),
            key=replace(base.emo.key, recognition_older=16),
        ),
        train=replace(
            base.train,
            iterations=config.iterations,
            validate_every=max(config.iterations // 4, 1),
            validation_tasks=40,
            seed=config.seed,
        ),
    )


def run_demo(
    root: Path,
    config: DemoConfig,
    *,
    on_event: Callable[[str, str, int, Mapping[str, Any]], None],
    workers: int = 1,
) -> dict[str, Any]:
    """Train both, score both on the same unseen classes, and compare them in pairs.

    Args:
        root: Folder for the two runs.
        config: Options.
        on_event: Told the run's name and everything it logs.
        workers: Threads that share the tasks of a step.
    """
    results = {}
    for name in RUNS:
        folder = root / name

        def tell(event: str, step: int, fields: Mapping[str, Any], name: str = name) -> None:
            on_event(name, event, step, fields)

        train_run(folder, demo_run(name, config), on_event=tell, workers=workers)
        best = load_best(folder, workers=workers)
        results[name] = score_run(folder, best, Protocol(tasks=config.test_tasks))
    return compare([results["maml"]], [results["maml-emo"]])
