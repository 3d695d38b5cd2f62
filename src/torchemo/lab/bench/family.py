"""What every method costs beside MAML: time of a training step, parameters, bytes of memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchemo.config.presets import at_once, names, preset
from torchemo.config.run import RunConfig
from torchemo.config.toml import from_dict, override, to_dict
from torchemo.core.types import Episode
from torchemo.data.source import open_source
from torchemo.lab.bench.clock import Variant, interleave, rows, spread
from torchemo.runs.experiment import build_trainer
from torchemo.runs.footprint import footprint
from torchemo.training.trainer import Trainer

WARM = 4
"""Steps before those that count: groups are formed, slots seeded, caches filled."""

_EARLY = (
    "emo.memory.warmup=2",
    "learner.first_stage=2",
    "learner.cluster_tasks=8",
)
"""What else a run does only once comes at its start."""


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Take whole training steps of presets in turn: all draw the same tasks, learn, and remember at once.

    ``request``: ``presets``; ``options`` of all of them; ``repeats``; ``published`` takes learners in the
    sizes of their papers, where these differ.
    """
    configs = {name: _config(name, request) for name in request["presets"]}
    source = open_source(next(iter(configs.values())).data)
    trainers = {name: build_trainer(config, source.shape) for name, config in configs.items()}
    drawn = [
        source.sample("train", seed=0, start=4 * number, count=4)
        for number in range(WARM + request["repeats"])
    ]
    variants = {name: Variant(_steps(made, drawn)) for name, made in trainers.items()}
    times = interleave(variants, repeats=request["repeats"], warmup=WARM)
    found = rows(times, base="maml")
    for name, row in found.items():
        pairs = zip(times[name], times["maml"], strict=True)
        row["cost"] = spread([own.cpu / base.cpu for own, base in pairs])
        size = footprint(configs[name].emo, trainers[name], source.shape)
        row |= {
            "parameters": size.parameters,
            "emo_parameters": size.emo_parameters,
            "memory_bytes": size.memory_bytes,
        }
    return {"rows": found}


def _config(name: str, request: Mapping[str, Any]) -> RunConfig:
    found = at_once(preset(name))
    learner = name.removesuffix("-emo")
    if request["published"] and f"{learner}-published" in names():
        found = replace(found, learner=preset(f"{learner}-published").learner)
    plain = to_dict(found)
    for option in (*_EARLY, *request["options"]):
        override(plain, option)
    return from_dict(plain, RunConfig, where=f"preset {name}")


def _steps(trainer: Trainer, drawn: Sequence[Episode]) -> Callable[[], None]:
    def step() -> None:
        trainer.step(drawn[trainer.iteration])

    return step
