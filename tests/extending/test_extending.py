"""Parts of another distribution: one file and one entry point each, from the command line and from Python."""

import json
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.slow  # a process for every command

PLUGIN = Path(__file__).parent / "plugin"
SMALL = (
    *("--steps", "2", "--size", "16", "--way", "2", "--options", "train.tasks=2"),
    *("train.validation_tasks=2", "data.n_query=2", "model.filters=2"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of installed packages that holds the pretend distribution."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(PLUGIN, folder / "torchemo_plugin")
    info = folder / "torchemo_plugin-1.0.dist-info"
    info.mkdir()
    shutil.move(folder / "torchemo_plugin" / "entry_points.txt", info / "entry_points.txt")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchemo-plugin\nVersion: 1.0\n")
    return folder


@pytest.fixture
def torchemo(warm, site, tmp_path):
    """Run a command beside the distribution; returns what it printed."""

    def run(*words, code=0):
        done = warm.run(*words, cwd=tmp_path, env={"PYTHONPATH": str(site)})
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture
def python(torchemo):
    """Run Python beside the distribution; returns what it printed."""
    return lambda code: torchemo("-c", code)


def test_a_controller_and_an_aggregator(torchemo, tmp_path):
    options = ("memory.controller.name=newest", "memory.aggregator.name=nearest-only")
    more = (*options, "memory.aggregator.share=0.25", "memory.capacity=3", "memory.k=2")
    torchemo("train", "--preset", "maml-emo", "--out", "a", *SMALL, *more)
    config = tomllib.loads((tmp_path / "a" / "config.toml").read_text())
    assert config["memory"]["controller"] == {"name": "newest"}
    assert config["memory"]["aggregator"] == {"name": "nearest-only", "share": 0.25}
    shown = json.loads(torchemo("memory", "show", "a", "--json"))
    # Four tasks, three slots: the newest one was overwritten, and the two oldest are as they were.
    assert [slot["generation"] for slot in shown["slots"]] == [1, 1, 2]
    assert "MAML + EMO" in torchemo("eval", "a", "--tasks", "2")


def test_a_controller_and_an_aggregator_in_python(python):
    assert python(
        "import torch, torchemo\n"
        "emo = torchemo.for_module(torch.nn.Linear(1, 1), k=1, capacity=1, key_dim=1,\n"
        "    controller='newest', aggregator='nearest-only')\n"
        "g = {'weight': torch.ones(1, 1, 1), 'bias': torch.ones(1, 1)}\n"
        "emo.remember(emo.recall(torch.zeros(1, 1)), g)\n"
        "print(emo.combine(g, emo.recall(torch.zeros(1, 1)))['bias'].tolist())\n"
    ).split() == ["[[1.5]]"]


@pytest.mark.parametrize(
    ("name", "title"), [("half-rate", "Half-rate MAML"), ("median", "Median network")]
)
def test_a_learner(torchemo, name, title):
    assert name in torchemo("presets")
    torchemo("train", "--preset", name, "--out", name, *SMALL)
    torchemo("train", "--preset", "maml", "--out", "maml", *SMALL)
    for run in (name, "maml"):
        assert (title if run == name else "MAML") in torchemo("eval", run, "--tasks", "4")
    assert title in torchemo("compare", "maml", name)
    torchemo("report", name)


def test_a_learner_with_memory(torchemo):
    few = ("memory.capacity=3", "memory.k=2")
    torchemo("train", "--preset", "half-rate-emo", "--out", "a", *SMALL, *few)
    assert "Half-rate MAML + EMO" in torchemo("eval", "a", "--tasks", "2")
    said = torchemo("train", "--preset", "median-emo", "--out", "b", *SMALL, *few, code=2)
    assert "takes no gradient steps" in said


def test_a_learner_in_python(python):
    printed = python(
        "import torchemo\n"
        "run = torchemo.train('half-rate', data='regression:sinusoid', out='a', steps=2, shot=5,\n"
        "    options={'learner.factor': 0.25})\n"
        "print(run); print(run.config.learner.options['factor'])\n"
    )
    assert printed.splitlines() == [
        "Run(Half-rate MAML on regression:sinusoid, step 2 of 2)",
        "0.25",
    ]


def test_an_option_of_a_foreign_part_is_checked(torchemo):
    options = (*SMALL, "learner.factr=0.1")
    said = torchemo("train", "--preset", "half-rate", "--out", "a", *options, code=2)
    assert "learner.factor" in said


def test_a_data_layout(torchemo, tmp_path):
    folder, rng = tmp_path / "mine", np.random.default_rng(0)
    folder.mkdir()
    rows = [f"class{c} {c}-{i}.png" for c in range(12) for i in range(4)]
    for row in rows:
        picture = Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8))
        picture.save(folder / row.split()[1])
    (folder / "index.txt").write_text("\n".join(rows))
    assert "listed by index.txt" in torchemo(
        "data", "check", "mine", "--n-way", "2", "--n-query", "2"
    )
    torchemo("train", "--preset", "maml", "--data", "mine", "--out", "a", *SMALL)


def test_a_command(torchemo):
    assert torchemo("hello", "--whom", "you").strip() == "hello, you"
    assert "hello" in torchemo("--help")
    assert "Did you mean 'hello'?" in torchemo("helo", code=2)
