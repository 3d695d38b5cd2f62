"""Training end to end: seconds per thousand outer steps of a run as a user starts it.

Path by path on the CPU, or at another place against the CPU.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchemo.config.presets import preset
from torchemo.config.run import RunConfig
from torchemo.core.types import TaskShape
from torchemo.data.source import sent_to
from torchemo.lab.bench.clock import Variant, interleave, rows
from torchemo.learners.build import build_learner
from torchemo.learners.learner import Learner
from torchemo.models import Conv4, build_model
from torchemo.runs.experiment import open_experiment
from torchemo.training.device import HERE, Place, open_place


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Time ``steps`` outer steps of a preset with tasks drawn on the way, fused against reference."""
    config, place = _config(request), Place(workers=request["workers"])
    variants = {
        f"torchemo, {path}": Variant(_run(config, place, request["steps"], path))
        for path in ("fused", "reference")
    }
    return _timed(variants, request, base="torchemo, reference")


def measure_place(request: Mapping[str, Any]) -> dict[str, Any]:
    """Time ``steps`` outer steps of a preset at a place against the CPU with one thread."""
    place = open_place(device=request["device"], precision=request["precision"])
    config, steps = _config(request), request["steps"]
    variants = {at.words: Variant(_run(config, at, steps)) for at in (HERE, place)}
    return _timed(variants, request, base=HERE.words)


def _config(request: Mapping[str, Any]) -> RunConfig:
    base = preset(request["preset"])
    return replace(base, data=replace(base.data, image_size=request["size"]))


def _timed(
    variants: Mapping[str, Variant], request: Mapping[str, Any], *, base: str
) -> dict[str, Any]:
    times = interleave(variants, repeats=request["repeats"])
    found = rows(times, base=base)
    thousand = 1000 / request["steps"]
    for row in found.values():
        row["seconds_per_1000_steps"] = {n: thousand * s for n, s in row["wall"].items()}
    return {"rows": found}


def _run(config: RunConfig, place: Place, steps: int, path: str | None = None) -> Any:
    experiment = open_experiment(config, place=place)
    trainer, tasks = experiment.trainer, config.train.tasks
    source = sent_to(experiment.source, place.device)
    if path is not None:
        trainer.learner = learner_on(path, config, source.shape)

    def run() -> None:
        for _ in range(steps):  # a step ends with numbers that the host has waited for
            start = trainer.iteration * tasks
            trainer.step(source.sample("train", seed=0, start=start, count=tasks))

    return run


def learner_on(path: Any, config: RunConfig, shape: TaskShape) -> Learner:
    """Make the learner of a run whose Conv-4 computes its blocks on ``path``; it holds no parameters."""
    model = build_model(config.model, shape)
    if isinstance(model, Conv4):
        model = replace(model, path=path)
    return build_learner(config.learner, model, shape)
