"""The demo: MAML against MAML with a memory of offsets, 5-way 1-shot on synthetic images, paired.

A third run is the single-slot control: all tasks share one slot. It learns as many further numbers at the
same rate and retrieves nothing. The gain of the memory over this control is due to retrieval.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from torchemo.config.presets import preset
from torchemo.config.registry import Part
from torchemo.config.run import RunConfig
from torchemo.core.errors import ConfigError
from torchemo.runs.compare import compare
from torchemo.runs.load import load_best
from torchemo.runs.score import Protocol, score_run
from torchemo.runs.train import train_run

RUNS = {
    "maml": "MAML",
    "maml-offsets": "MAML + offsets",
    "single-slot": "MAML + single slot",
}
"""Folders of the runs, and their titles."""


RATE = 0.006
"""Outer rate, and that of the slots. At a lower one MAML is not at its best, and anything helps."""


@final
@dataclass(frozen=True)
class DemoConfig:
    """Options of the demo."""

    steps: int = 150
    """Outer steps of each run."""
    test_tasks: int = 200
    """Test tasks, the same for all runs."""
    seed: int = 0
    """Seed of the initialisation and of the training tasks."""

    def __post_init__(self) -> None:
        for name in ("steps", "test_tasks"):
            if getattr(self, name) < 1:
                words = name.replace("_", " ")
                raise ConfigError(f"{words} should be 1 or more, got {getattr(self, name)}.")


def demo_run(name: str, config: DemoConfig) -> RunConfig:
    """Return the configuration of one of the runs: small images, a small network."""
    # Jointly: so short a run has no time to train the memory after the learner.
    base = preset("maml" if name == "maml" else "maml-offsets-joint")
    memory = base.memory
    if name != "maml":
        key = {**memory.options["key"], "recognition_older": 16}
        memory = memory.set(warmup=25, slot_lr=RATE, key=key)
    if name == "single-slot":
        memory = memory.set(capacity=1)
    return replace(
        base,
        learner=base.learner.set(inner_lr=0.1, steps=3),
        model=Part("conv4", {"filters": 16}),
        memory=memory,
        data=replace(base.data, image_size=28, n_query=5),
        outer=replace(base.outer, lr=RATE, schedule="cosine"),
        train=replace(
            base.train,
            steps=config.steps,
            validate_every=max(config.steps // 4, 1),
            validation_tasks=40,
            seed=config.seed,
        ),
    )


@final
@dataclass(frozen=True)
class DemoResult:
    """Paired comparisons on the same unseen classes.

    Attributes:
        memory: MAML with offsets minus MAML.
        single_slot: MAML with a single slot minus MAML.
        retrieval: MAML with offsets minus MAML with a single slot.
    """

    memory: dict[str, Any]
    single_slot: dict[str, Any]
    retrieval: dict[str, Any]


def run_demo(
    root: Path,
    config: DemoConfig,
    *,
    on_event: Callable[[str, str, int, Mapping[str, Any]], None],
    workers: int = 1,
) -> DemoResult:
    """Train all runs, score them on the same unseen classes, and compare them in pairs."""
    scores = {}
    for name, title in RUNS.items():
        folder = root / name

        def tell(event: str, step: int, fields: Mapping[str, Any], name: str = name) -> None:
            on_event(name, event, step, fields)

        train_run(folder, demo_run(name, config), on_event=tell, workers=workers)
        best = load_best(folder, workers=workers)
        score = score_run(folder, best, Protocol(tasks=config.test_tasks))
        # A single slot is an offset memory, too: its own title would not tell the two apart.
        scores[name] = [{**score, "method": title}]
    return DemoResult(
        memory=compare(scores["maml"], scores["maml-offsets"]),
        single_slot=compare(scores["maml"], scores["single-slot"]),
        retrieval=compare(scores["single-slot"], scores["maml-offsets"]),
    )
