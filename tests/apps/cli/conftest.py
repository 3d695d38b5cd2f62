"""Commands run in this process, small image sets of plain colours, and tiny runs made once."""

import json
import sys
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from torchemo.apps.cli import main

COMMAND = (sys.executable, "-c", "from torchemo.apps.cli import main; main()")
"""The command as a process of its own."""

COLOURS = {
    "train": {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220)},
    "val": {"yellow": (220, 210, 30), "cyan": (30, 210, 210), "grey": (120, 120, 120)},
    "test": {"black": (10, 10, 10), "white": (245, 245, 245), "brown": (130, 80, 40)},
}
POINTS = (
    *("--data", "regression:hsml4", "--options", "train.steps=6", "train.tasks=2"),
    *("train.validate_every=2", "train.validation_tasks=2", "data.n_shot=4", "data.n_query=4"),
    *("model.hidden=[4]", "learner.steps=1"),
)
SMALL_KEYS = ("memory.key.dim=8", "memory.key.heads=2", "memory.key.ff=8", "memory.key.layers=1")
MEMORY = ("memory.capacity=5", "memory.k=3", *SMALL_KEYS)
PICTURES = (
    *("train.steps=4", "train.tasks=2", "train.validate_every=2", "train.validation_tasks=2"),
    *("data.image_size=16", "data.n_way=2", "data.n_query=2", "model.filters=2", "learner.steps=1"),
)


class Result(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        """Everything on stdout as one strict JSON document."""
        return strict_json(self.out)


def strict_json(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def run_quietly(*words):
    """Run a command that must succeed."""
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    assert left.value.code == 0, words


@pytest.fixture
def torchemo(capsys):
    """Return ``torchemo(*words) -> Result``."""

    def call(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        return Result(left.value.code, *capsys.readouterr())

    return call


def colour_picture(colour, seed, *, size=16):
    """A plain image with a little noise, as an image."""
    noise = np.random.default_rng(seed).integers(-9, 10, (size, size, 3))
    return Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8))


def write_colours(root, *, images=18, splits=("train", "val", "test")):
    """Write ``root/split/colour/number.png``."""
    seed = 0
    for split in splits:
        for name, colour in COLOURS[split].items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(images):
                seed += 1
                colour_picture(colour, seed).save(folder / f"{number:02d}.png")
    return root


@pytest.fixture(scope="session")
def colours(tmp_path_factory):
    """An image set of plain colours, three classes in each split."""
    return write_colours(tmp_path_factory.mktemp("pictures") / "colours")


@pytest.fixture(scope="session")
def point_runs(tmp_path_factory):
    """``base`` and ``memory``: regression without and with memory, both evaluated on 12 tasks."""
    root = tmp_path_factory.mktemp("points")
    run_quietly("train", "--out", root / "base", "--preset", "maml", *POINTS)
    run_quietly("train", "--out", root / "memory", "--preset", "maml-emo-paper", *POINTS, *MEMORY)
    for name in ("base", "memory"):
        run_quietly("eval", root / name, "--tasks", 12)
    return root


@pytest.fixture(scope="session")
def picture_runs(tmp_path_factory, colours):
    """``memory`` (MAML with memory) and ``proto`` (Proto-MAML), 2-way on plain colours."""
    root = tmp_path_factory.mktemp("picture-runs")
    for name, preset, more in (
        ("memory", "maml-emo-paper", MEMORY),
        ("proto", "proto-maml", ()),
    ):
        run_quietly(
            *("train", "--out", root / name, "--preset", preset, "--data", colours),
            *("--options", *PICTURES, *more),
        )
    return root


@pytest.fixture
def fake_command(monkeypatch):
    """Return ``fake_command(run)``: a command ``fake`` that does what is given."""
    from torchemo.apps import cli

    def install(action):
        @dataclass
        class Fake:
            """Do as told."""

            def run(self):
                return action()

        monkeypatch.setattr("torchemo.lab.commands.doctor.Fake", Fake, raising=False)
        monkeypatch.setitem(cli.COMMANDS, "fake", "torchemo.lab.commands.doctor:Fake")

    return install


def flip_a_bit(path):
    """Damage one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
