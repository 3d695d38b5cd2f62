"""What every method costs beside MAML: time of a training step, parameters, bytes of memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from torchemo.config.presets import names, parts_of, preset
from torchemo.config.run import RunConfig
from torchemo.config.toml import from_dict, override, to_dict
from torchemo.core.types import Episode
from torchemo.data.source import open_source
from torchemo.lab.bench.clock import Variant, interleave, rows, spread
from torchemo.runs.experiment import PARTS, build_trainer
from torchemo.runs.footprint import footprint
from torchemo.training.trainer import Trainer

WARM = 4
"""Steps before those that count: groups are formed, slots seeded, caches filled."""

_EARLY = {
    "memory": {"warmup": 2},
    "learner": {"first_stage": 2, "cluster_tasks": 8},
}
"""What else a run does only once comes at its start, for parts with these options."""


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Take whole training steps of presets in turn: all draw the same tasks, learn and remember.

    ``request``: ``presets``; ``options`` of all of them; ``repeats``; ``published`` takes learners in the
    sizes of their papers, where these differ.
    """
    configs = {name: _config(name, request) for name in request["presets"]}
    source = open_source(next(iter(configs.values())).data)
    trainers = {name: build_trainer(config, source.shape) for name, config in configs.items()}
    # Drawn beforehand and the same for all, so that costs differ by the method alone.
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
        size = footprint(trainers[name].system, source.shape)
        row |= {
            "parameters": size.parameters,
            "memory_parameters": size.memory_parameters,
            "memory_bytes": size.memory_bytes,
        }
    return {"rows": found}


def _config(name: str, request: Mapping[str, Any]) -> RunConfig:
    found, (learner, _) = preset(name), parts_of(name)
    if request["published"] and f"{learner}-published" in names():
        found = replace(found, learner=preset(f"{learner}-published").learner)
    plain = to_dict(_early(found))
    for option in request["options"]:
        override(plain, option)
    return from_dict(plain, RunConfig, where=f"preset {name}")


def _early(config: RunConfig) -> RunConfig:
    parts: dict[str, Any] = {}
    for section, options in _EARLY.items():
        part = getattr(config, section)
        known = {option.name for option in fields(PARTS[section].options_of(part.name))}
        parts[section] = part.set(**{n: v for n, v in options.items() if n in known})
    return replace(config, **parts)


def _steps(trainer: Trainer, drawn: Sequence[Episode]) -> Callable[[], None]:
    def step() -> None:
        trainer.step(drawn[trainer.iteration])

    return step
