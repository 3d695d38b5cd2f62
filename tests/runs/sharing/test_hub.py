"""Runs for other people: saved without images and places, read back to the same answers."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

import torchemo
from torchemo.core.errors import ConfigError
from torchemo.runs.folder import RunFolder
from torchemo.runs.load import load_trained, read_config
from torchemo.runs.sharing.card import card, results_of
from torchemo.runs.sharing.hub import SharedRun
from torchemo.runs.sharing.strip import without_places, write_stripped

SMALL = {
    "train.tasks": 2,
    "train.validation_tasks": 2,
    "data.n_query": 2,
    "data.n_way": 2,
    "model.filters": 2,
    "memory.capacity": 4,
    "memory.key.layers": 1,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a memory whose keys recognise support sets, which its checkpoints therefore keep."""
    out = tmp_path_factory.mktemp("runs") / "a"
    options = {**SMALL, "memory.key.training": "self_recognition", "data.classes_per_family": 25}
    made = torchemo.train("maml-emo", data="procedural", out=out, steps=2, size=16, options=options)
    made.evaluate(tasks=3)
    made.evaluate(tasks=3, way=3)
    return made


@pytest.fixture(scope="module")
def shared(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("shared") / "b"
    SharedRun(run).save_pretrained(out)
    return out


def test_what_is_read_back_answers_as_the_run_does(run, shared, tmp_path):
    again = SharedRun.from_pretrained(shutil.copytree(shared, tmp_path / "b")).run
    assert again.trained.system.title == run.trained.system.title
    one = run.evaluate(tasks=3)
    assert again.evaluate(tasks=3)["per_task"] == one["per_task"]
    assert torchemo.load(shared).trained.system.iteration == run.trained.system.iteration


def test_support_images_and_the_optimizer_stay_at_home(run, shared):
    kept = {path.name for path in (run.root / "checkpoints").rglob("*.safetensors")}
    assert {"recognition.safetensors", "optimizer.safetensors"} <= kept
    files = sorted(p.relative_to(shared).parts for p in shared.rglob("*") if p.is_file())
    names = {parts[-1] for parts in files}
    assert names == {
        "README.md",
        "config.json",
        "config.toml",
        "manifest.json",
        "memory.safetensors",
        "params.safetensors",
        "progress.safetensors",
    }
    # No tensor has the shape of images.
    for file in shared.rglob("*.safetensors"):
        assert not any(t.shape[-3:] == (3, 16, 16) for t in load_file(file).values())


def test_no_place_of_this_machine_is_told(run, tmp_path):
    root = shutil.copytree(run.root, tmp_path / "secret" / "a")
    SharedRun(root).save_pretrained(tmp_path / "out")
    for file in (tmp_path / "out").rglob("*"):
        if file.is_file():
            assert str(tmp_path).encode() not in file.read_bytes(), file
    config = read_config(run.root)
    data = {"source": ("/somewhere/birds.zip", "regression:x"), "splits": "/somewhere/splits.json"}
    config = torchemo.config.run.RunConfig(
        model=config.model.set(weights="/somewhere/w.pth"),
        data=torchemo.config.run.DataConfig(**data),
    )
    named = without_places(config)
    assert named.data.source == ("birds.zip", "regression:x")
    assert (named.data.splits, named.model.options["weights"]) == ("splits.json", "w.pth")


def test_the_card_says_what_was_trained_on_and_how_well_it_did(run, shared):
    text = (shared / "README.md").read_text()
    assert text.startswith("---\n")
    assert "library_name: torchemo" in text
    assert "pipeline_tag: image-classification" in text
    assert "procedural" in text
    counts = re.findall(r"\| (train|val|test) \| (\d+) \|", text)
    assert sorted(split for split, _ in counts) == ["test", "train", "val"]
    assert sum(int(n) for _, n in counts) == 100
    plain = run.evaluate(tasks=3)["summary"]["last"]
    assert f"{plain['value']:.4f} [{plain['low']:.4f}, {plain['high']:.4f}]" in text
    assert "3way" in text
    assert "does not cover these weights" in text
    about = json.loads((shared / "config.json").read_text())
    assert (about["method"], about["tasks"]["way"], len(about["results"])) == ("MAML + EMO", 2, 2)


def test_a_run_that_was_not_evaluated_says_so(run, tmp_path):
    root = shutil.copytree(run.root, tmp_path / "a")
    for file in root.glob("eval-*"):
        file.unlink()
    RunFolder(root).events.write_text("")
    text = card(root, load_trained(root), results_of(root))
    assert "not evaluated" in text
    assert "| train |" not in text


def test_a_folder_that_holds_a_run_is_not_written_over(run, shared):
    before = {
        p: p.read_bytes() for p in shared.rglob("*") if p.is_file() and p.name != "config.json"
    }
    with pytest.raises(ConfigError, match="holds a run already"):
        SharedRun(run).save_pretrained(shared)
    assert all(p.read_bytes() == data for p, data in before.items())


def test_a_memory_that_keeps_support_images_is_not_shared(run, tmp_path, monkeypatch):
    from torchemo.runs.sharing import strip

    whole = strip.best_checkpoint(run.root)
    whole.groups["memory"]["notes.support_x"] = torch.zeros(1)
    monkeypatch.setattr(strip, "best_checkpoint", lambda *a, **k: whole)
    with pytest.raises(torchemo.TorchemoError, match="support images"):
        write_stripped(run.root, tmp_path / "b")
    assert not (tmp_path / "b").exists()
