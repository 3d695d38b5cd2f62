"""Three tiny real runs: points with a memory of gradients, hostile class folders, synthetic images."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from torchemo.config.registry import Part
from torchemo.config.run import DataConfig, RunConfig, TrainConfig
from torchemo.report.run.page import write_run_report
from torchemo.runs.adapt import Answers, Prediction, RecalledSlot
from torchemo.runs.load import load_best
from torchemo.runs.score import Protocol, score_run
from torchemo.runs.train import train_run

HOSTILE_DOMAIN = "<img src=x onerror=alert(1)> & $\\frac{$ 鳥"
HOSTILE_CLASS = "<script>alert('{}')"

SMALL_KEY = {"dim": 8, "heads": 2, "ff": 8, "layers": 1}

POINTS = RunConfig(
    learner=Part("maml", {"inner_lr": 0.01, "steps": 2}),
    model=Part("mlp", {"hidden": (6,)}),
    memory=Part(
        "gradients",
        {
            "capacity": 5,
            "k": 3,
            "key": Part("transformer", {"embedder": "pairs", **SMALL_KEY}),
            "aggregator": Part("sum"),
            "recall_dropout": 0.3,
        },
    ),
    data=DataConfig(source=("regression:hsml4",), n_shot=4, n_query=4),
    train=TrainConfig(steps=9, tasks=2, validate_every=4, validation_tasks=4),
)

PICTURES = RunConfig(
    learner=Part("maml", {"steps": 2, "inner_lr": 0.5}),
    model=Part("conv4", {"filters": 2}),
    memory=Part(
        "offsets",
        {
            "capacity": 2,
            "k": None,
            "warmup": 1,
            "key": Part("transformer", {"training": "self_recognition", **SMALL_KEY}),
        },
    ),
    data=DataConfig(image_size=16, classes_per_family=25, n_way=2, n_query=2),
    train=TrainConfig(steps=4, tasks=2, validate_every=2, validation_tasks=2),
)


def without_memory(config):
    return replace(config, memory=Part("none"))


def make_run(root, config, protocol):
    train_run(root, config)
    score_run(root, load_best(root), protocol)
    return root


@pytest.fixture(scope="session")
def points(tmp_path_factory):
    """A regression run with a memory of gradients, evaluated and reported."""
    root = make_run(tmp_path_factory.mktemp("runs") / "points", POINTS, Protocol(tasks=12))
    write_run_report(root)
    return root


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The same without memory, on the same test tasks; no report."""
    root = tmp_path_factory.mktemp("runs") / "base"
    return make_run(root, without_memory(POINTS), Protocol(tasks=12))


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """A run on embedded synthetic images with a memory of offsets."""
    root = make_run(tmp_path_factory.mktemp("runs") / "pictures", PICTURES, Protocol(tasks=6))
    write_run_report(root)
    return root


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """A run on class folders whose names are HTML, and a domain whose name is HTML, TeX and Chinese."""
    place = tmp_path_factory.mktemp("data") / HOSTILE_DOMAIN
    rng = np.random.default_rng(0)
    for c in range(15):
        folder = place / HOSTILE_CLASS.format(c)
        folder.mkdir(parents=True)
        for i in range(3):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    data = replace(PICTURES.data, source=(str(place),))
    config = without_memory(replace(PICTURES, data=data))
    root = tmp_path_factory.mktemp("runs") / "<i>hostile"
    make_run(root, config, Protocol("paper", tasks=4))
    write_run_report(root)
    return root


HOSTILE_NAME = '<b onload="x">&\'red'


RECALLED = (RecalledSlot(3, 0.25, 0.6, 17, "<i>stones"), RecalledSlot(1, 0.5, 0.4, 2, None))


def save_picture(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folders(tmp_path):
    """A class of two images with a hostile name, one of fourteen, and two queries."""
    for i in range(2):
        save_picture(tmp_path / "support" / HOSTILE_NAME / f"{i}.png", i)
    for i in range(14):
        save_picture(tmp_path / "support" / "blue_jay" / f"{i:02d}.png", 10 + i)
    save_picture(tmp_path / "query" / "<img src=x>.png", 50)
    save_picture(tmp_path / "query" / "plain.png", 51)
    return tmp_path / "support", tmp_path / "query"


def answers(recalled=RECALLED):
    """What adapt found, made up."""
    names = (HOSTILE_NAME, "blue_jay")
    return Answers(
        method="MAML + EMO",
        step=1200,
        inner_steps=5,
        classes=names,
        shots=(2, 14),
        predictions=(
            Prediction("<img src=x>.png", names[0], 0.75, names[1], 0.25, (0.75, 0.25)),
            Prediction("plain.png", names[1], 0.5, names[0], 0.5, (0.5, 0.5)),
        ),
        recalled=recalled,
        familiar=None,
    )
