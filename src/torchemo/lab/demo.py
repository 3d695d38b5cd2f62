"""The demo: MAML against MAML with memory, 5-way 1-shot on synthetic pictures, paired.

A third run has one slot for all tasks: it learns as many further numbers at the same rate and retrieves
nothing. What memory is worth beyond it is memory proper.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from torchemo.config.presets import at_once, preset
from torchemo.config.run import ModelConfig, RunConfig
from torchemo.core.errors import ConfigError
from torchemo.runs.compare import compare
from torchemo.runs.load import load_best
from torchemo.runs.score import Protocol, score_run
from torchemo.runs.train import train_run

RUNS = {"maml": "MAML", "maml-emo": "MAML + EMO", "one-slot": "one slot for all"}
"""Folders of the runs, and how they are shown."""


RATE = 0.006
"""Outer rate, and that of the slots. At a lower one MAML is not at its best, and anything helps."""


@final
@dataclass(frozen=True)
class DemoConfig:
    """Options of the demo."""

    iterations: int = 150
    """Outer steps of each run."""
    test_tasks: int = 200
    """Test tasks, the same for all runs."""
    seed: int = 0
    """Seed of the initialisation and of the training tasks."""

    def __post_init__(self) -> None:
        for name in ("iterations", "test_tasks"):
            if getattr(self, name) < 1:
                words = name.replace("_", " ")
                raise ConfigError(f"{words} should be 1 or more, got {getattr(self, name)}.")


def demo_run(name: str, config: DemoConfig) -> RunConfig:
    """Return the configuration of one of the runs: small pictures, a small network."""
    # At once: in so short a run there is no time for one after the other.
    base = at_once(preset("maml" if name == "maml" else "maml-emo"))
    slots = 1 if name == "one-slot" else base.emo.memory.capacity
    return replace(
        base,
        learner=replace(base.learner, inner_lr=0.1, steps=3),
        model=ModelConfig(filters=16),
        data=replace(base.data, image_size=28, n_query=5),
        outer=replace(base.outer, lr=RATE, schedule="cosine"),
        emo=replace(
            base.emo,
            memory=replace(base.emo.memory, warmup=25, capacity=slots, slot_lr=RATE),
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


@final
@dataclass(frozen=True)
class DemoResult:
    """Paired comparisons on the same unseen classes.

    Attributes:
        memory: MAML + EMO minus MAML.
        one_slot: One slot for all tasks minus MAML.
        retrieval: MAML + EMO minus one slot for all tasks.
    """

    memory: dict[str, Any]
    one_slot: dict[str, Any]
    retrieval: dict[str, Any]


def run_demo(
    root: Path,
    config: DemoConfig,
    *,
    on_event: Callable[[str, str, int, Mapping[str, Any]], None],
    workers: int = 1,
) -> DemoResult:
    """Train all, score all on the same unseen classes, and compare them in pairs.

    Args:
        root: Folder for the runs.
        config: Options.
        on_event: Told the run's name and everything it logs.
        workers: Threads that share the tasks of a step.
    """
    scores = {}
    for name, title in RUNS.items():
        folder = root / name

        def tell(event: str, step: int, fields: Mapping[str, Any], name: str = name) -> None:
            on_event(name, event, step, fields)

        train_run(folder, demo_run(name, config), on_event=tell, workers=workers)
        best = load_best(folder, workers=workers)
        score = score_run(folder, best, Protocol(tasks=config.test_tasks))
        scores[name] = [{**score, "method": title}]
    return DemoResult(
        memory=compare(scores["maml"], scores["maml-emo"]),
        one_slot=compare(scores["maml"], scores["one-slot"]),
        retrieval=compare(scores["one-slot"], scores["maml-emo"]),
    )
