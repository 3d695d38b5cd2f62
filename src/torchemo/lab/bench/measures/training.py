"""Training end to end: seconds per thousand outer steps of a run as a user starts it, path by path."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchemo.config.presets import preset
from torchemo.config.run import RunConfig
from torchemo.core.types import TaskShape
from torchemo.lab.bench.clock import Variant, interleave, rows
from torchemo.learners.build import build_learner
from torchemo.learners.learner import Learner
from torchemo.models import Conv4, build_model
from torchemo.runs.experiment import open_experiment
from torchemo.training.device import Place


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
    experiment = open_experiment(config, place=Place(workers=workers))
    trainer, tasks = experiment.trainer, config.train.tasks
    trainer.learner = learner_on(path, config, experiment.source.shape)

    def run() -> None:
        for _ in range(steps):
            start = trainer.iteration * tasks
            trainer.step(experiment.source.sample("train", seed=0, start=start, count=tasks))

    return run


def learner_on(path: Any, config: RunConfig, shape: TaskShape) -> Learner:
    """Make the learner of a run whose Conv-4 computes its blocks on ``path``; it holds no parameters."""
    model = build_model(config.model, shape)
    if isinstance(model, Conv4):
        model = replace(model, path=path)
    return build_learner(config.learner, model, shape)
