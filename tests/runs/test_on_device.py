"""A run on a device, from its first step to its report: trained, resumed, adapted to images, shown.

Placement is what the pretend device tests; the numbers are those of the CPU.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.pretend import on_pretend
from tests.runs.small import stop_after
from torchemo.config.presets import preset
from torchemo.config.registry import Part
from torchemo.report.run.page import write_run_report
from torchemo.runs.adapt import adapt
from torchemo.runs.load import load_best, load_trained
from torchemo.runs.score import Protocol, score_tasks
from torchemo.runs.train import train_run
from torchemo.training.device import HERE, Place


def small(name):
    """A preset on small images, whose memory judges its slots on the validation tasks."""
    config = preset(name)
    memory = config.memory
    for option, value in {"warmup": 1, "capacity": 3, "k": 3}.items():
        if option in memory.options:
            memory = memory.set(**{option: value})
    steps = {"steps": 4, "validate_every": 2, "validation_tasks": 4, "tasks": 2}
    return replace(
        config,
        model=Part("conv4", {"filters": 2}),
        memory=memory,
        data=replace(config.data, image_size=16, n_query=2),
        train=replace(config.train, **steps),
    )


@pytest.fixture
def folders(tmp_path):
    """Support images of five classes, and two to be sorted."""
    g = np.random.default_rng(0)
    for number in range(5):
        (tmp_path / "shots" / str(number)).mkdir(parents=True)
        pixels = g.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "shots" / str(number) / "a.png")
    (tmp_path / "asked").mkdir()
    for number in range(2):
        pixels = g.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "asked" / f"{number}.png")
    return tmp_path / "shots", tmp_path / "asked"


@pytest.mark.parametrize("name", ["maml-offsets-joint", "maml-emo", "protonet"])
def test_a_run_is_trained_resumed_adapted_and_shown(name, tmp_path, folders):
    root, (shots, asked) = tmp_path / "run", folders
    with on_pretend() as device:
        place = Place(device)
        outcome = train_run(root, small(name), place=place, should_stop=stop_after(3))
        assert outcome.iteration == 3
        outcome = train_run(root, place=place)
        assert outcome.iteration >= 4
        there = answers(root, place, shots, asked)
    here = answers(root, HERE, shots, asked)
    torch.testing.assert_close(there[0], here[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(there[1], here[1], rtol=1e-3, atol=1e-4)
    write_run_report(root)
    assert "pretend:0" in (root / "report.html").read_text()


def answers(root, place, shots, asked):
    """Return the probabilities of two images, and the scores of four test tasks."""
    found = adapt(load_trained(root, place=place), shots).predict(asked)
    record = score_tasks(load_best(root, place=place), Protocol(tasks=4))
    assert record["place"] == place.words
    rows = torch.tensor([one.probabilities for one in found.predictions])
    return rows, torch.tensor(record["per_task"])
