"""Training end to end: seconds per thousand outer steps of a run as a user starts it, path by path."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchemo.config.presets import preset
from torchemo.config.run import RunConfig
from torchemo.lab.bench.clock import Variant, interleave, rows
from torchemo.models import Conv4
from torchemo.runs.experiment import open_experiment
from torchemo.training.trainer import Trainer


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Time ``steps`` outer steps of a preset with tasks drawn on the way, fused against reference."""
    base = preset(request["preset"])
    config = replace(base, data=replace(base.data, image_size=request["size"]))
    variants = {
        f"torchemo, {path}": Variant(_run(config, path, request["workers"], request["steps"]))
        for path in ("fused", "reference")
    }
    times = interleave(variants, repeats=request["repeats"])
    found = rows(times, base="torchemo, reference")
    thousand = 1000 / request["steps"]
    for row in found.values():
        row["seconds_per_1000_steps"] = {n: thousand * s for n, s in row["wall"].items()}
    return {"rows": found}


def _run(config: RunConfig, path: str, workers: int, steps: int) -> Any:
    experiment = open_experiment(config, workers=workers)
    trainer, tasks = experiment.trainer, config.train.tasks
    use_path(trainer, path)

    def run() -> None:
        for _ in range(steps):
            start = trainer.iteration * tasks
            trainer.step(experiment.source.sample("train", seed=0, start=start, count=tasks))

    return run


def use_path(trainer: Trainer, path: Any) -> None:
    """Let a trainer's Conv-4 compute its blocks on ``path``."""
    learner: Any = trainer.learner
    model = learner.loop.model
    if isinstance(model, Conv4):
        loop = replace(learner.loop, model=replace(model, path=path))
        trainer.learner = replace(learner, loop=loop)
