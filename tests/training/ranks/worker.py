"""What a rank does in the tests: train each case a little and tell the digest of its whole state."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from tests.training.brief import with_two_inner_steps
from torchemo.config.presets import preset
from torchemo.config.registry import Part
from torchemo.config.run import DataConfig, RunConfig, TrainConfig
from torchemo.core.digest import digest_of
from torchemo.core.errors import Diverged, ResourceError
from torchemo.runs import experiment, train
from torchemo.runs.environment import environment
from torchemo.runs.experiment import build_trainer, open_tasks
from torchemo.runs.train import train_run
from torchemo.training.device import HERE, joined
from torchemo.training.evaluate import batches

CASES = {
    "maml-emo-paper": {},
    "maml-offsets-joint": {},
    "anil-emo": {},
    "protonet": {},
    "arml-emo regression": {"batched": "no"},
    "maml-emo-paper regression": {"batched": "no"},
    "maml-offsets-joint regression": {"batched": "no"},
}
TAMED = ("maml-emo-paper", "maml-offsets-joint")
TASKS, STEPS = 5, 4
"""Tasks that two or three ranks cannot share evenly; steps in which slots are filled, seeded and recalled."""


def trained(name, place):
    """Return the digest of everything after a few steps, and that of some scores."""
    kind, _, regression = name.partition(" ")
    config = preset(kind, regression=bool(regression), n_shot=5 if regression else 1)
    config = replace(
        config,
        train=replace(config.train, steps=50, tasks=TASKS, **CASES[name]),
        data=replace(config.data, image_size=16, n_query=2),
    )
    if not regression:
        config = replace(config, model=Part("conv4", {"filters": 4}))
    if "warmup" in config.memory.options:
        config = replace(config, memory=config.memory.set(warmup=2))
    if kind in TAMED and regression:  # the paper's inner rate diverges on curves
        config = replace(config, learner=config.learner.set(inner_lr=0.001))
    config = with_two_inner_steps(config)
    source = open_tasks(config)
    trainer = build_trainer(config, source.shape, place=place)
    for step in range(STEPS):
        trainer.step(source.sample("train", seed=0, start=step * TASKS, count=TASKS))
    state = trainer.state_dict()
    named = {f"{group}/{n}": t for group, part in state.items() for n, t in part.items()}
    tasks = batches(
        lambda start, count: source.sample("val", seed=0, start=start, count=count), tasks=7, size=3
    )
    scores = trainer.system.evaluate(tasks)
    return digest_of(named), digest_of({"loss": scores.loss, "episode": scores.episode})


def troubles(team):
    """Return what every rank raises where one of them has an error, or another value."""
    last = team.size - 1

    def diverge(own):
        if team.rank == last:
            raise Diverged("task 3 has a non-finite loss.", hint="Lower the rate.")
        return [torch.zeros(2)] * len(own)

    def break_down():
        raise ValueError("no disk")

    found = {}
    attempts = {
        "share": lambda: team.share(diverge, range(team.size)),
        "first": lambda: team.first(break_down),
        "agree": lambda: team.agree("data", "abc" if team.rank < last else "def"),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except (Diverged, ResourceError, RuntimeError, ValueError) as error:
            found[name] = [type(error).__name__, str(error), getattr(error, "shared", False)]
    found["first value"] = team.first(lambda: team.rank + 10)
    found["any"] = [team.any(team.rank == last), team.any(False)]
    mixed = team.share(lambda own: [{"a": torch.full((i,), i), "b": None} for i in own], range(4))
    found["mixed"] = [one["a"].tolist() for one in mixed]
    return found


SMALL = RunConfig(
    model=Part("conv4", {"filters": 4}),
    data=DataConfig(image_size=16, n_way=2, n_query=2),
    train=TrainConfig(steps=2, tasks=4, validation_tasks=4),
)


def refusals(out, place):
    """Return what every rank says where the last has another option, other images or another version."""
    odd = place.team.rank == place.team.size - 1
    other = replace(SMALL, train=replace(SMALL.train, seed=7)) if odd else SMALL
    with patch.object(experiment, "environment", lambda place: faked(place, odd=odd)):
        found = {"versions": refused(out / "versions", SMALL, place)}
    # Where each rank is, the same name stands for images of its own.
    mine = out / f"rank{place.team.rank}"
    mine.mkdir()
    write_images(mine / "images.npz", seed=int(odd))
    os.chdir(mine)
    images = replace(SMALL, data=replace(SMALL.data, source=("images.npz",)))
    found["data"] = refused(out / "data", images, place)
    found["options"] = refused(out / "options", other, place)
    found["drift"] = drifted(out / "drift", place, odd=odd)
    return found


def drifted(root, place, *, odd):
    """Return what every rank says where the last has other numbers than the first after two steps."""
    digest = train.digest_of
    with patch.object(train, "digest_of", lambda named: "other" if odd else digest(named)):
        message, _ = refused(root, SMALL, place)
    return [message, bool(list(root.glob("checkpoints/step-*")))]


def refused(root, config, place):
    try:
        train_run(root, config, place=place)
    except ResourceError as error:
        return [error.message, root.exists()]
    return None


def faked(place, *, odd):
    real = environment(place)
    return {**real, "packages": {**real["packages"], "torchemo": "9.9"}} if odd else real


def write_images(path, *, seed):
    images = np.random.default_rng(seed).integers(0, 256, (60, 16, 16, 3), np.uint8)
    np.savez(path, images=images, label=np.arange(60) // 5)


def main(out):
    torch.set_num_threads(1)
    with joined(HERE) as place:
        found = {name: trained(name, place) for name in CASES}
        found["troubles"] = troubles(place.team)
        found["refusals"] = refusals(Path(out).resolve(), place)
        Path(out).joinpath(f"rank{place.team.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
