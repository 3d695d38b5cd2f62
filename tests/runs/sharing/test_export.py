"""Adapted classifiers as files: they answer as torch does, in batches of any size."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from tests.runs.test_adapt import (
    BLUE,
    CONFIG,
    RED,
    SHAPE,
    SIZE,
    folders,
    noise,
    save,
    trained,
    with_memory,
)
from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.core.types import TaskShape
from torchemo.models.norm import Bn
from torchemo.runs.adapt import adapt, fit, form_of, seen
from torchemo.runs.sharing import export as exporting
from torchemo.runs.sharing.export import described, export, format_of
from torchemo.runs.sharing.network import AdaptedNetwork

__all__ = ["folders"]
ROOT = Path(__file__).parents[3]
LEARNERS = (
    "maml",
    "anil",
    "reptile",
    "meta-sgd",
    "musml",
    "protonet",
    "matchingnet",
    "metaoptnet-ridge",
)


def pictures(count, size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 3, size, size), dtype=np.uint8)


def fitted(config, shape=SHAPE, *, counts=(3, 2)):
    """A run fitted to images of noise, with as many of each class as said."""
    run = trained(config, shape)
    form = form_of(run)
    classes = {
        f"class {c}": seen(run, pictures(n, form.height, seed=c)) for c, n in enumerate(counts)
    }
    return fit(run, classes, form), form


def onnx_answers(file, images, *, batch):
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    parts = [images[i : i + batch] for i in range(0, len(images), batch)]
    return np.concatenate([session.run(None, {"images": part})[0] for part in parts]), session


def agree_on_100(config, tmp_path, shape=SHAPE):
    adapted, form = fitted(config, shape)
    found = export(adapted, tmp_path / "deep" / "a.onnx", name="fruit")
    images = pictures(100, form.height, seed=9)
    expected = adapted.probabilities(seen(adapted.trained, images)).numpy()
    for batch in (100, 7):
        got, _ = onnx_answers(found.file, images, batch=batch)
        assert np.abs(got - expected).max() < 1e-4
    assert found.difference < 1e-4
    assert expected.std(0).min() > 1e-6  # the answers are not all alike
    return found, form.height


def says_what_it_takes(found, size):
    """A file says what it takes and which classes it knows, and nothing of this machine."""
    _, session = onnx_answers(found.file, pictures(1, size), batch=1)
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == ["class 0", "class 1"]
    assert (about["run"], json.loads(about["support_images"])) == ("fruit", [3, 2])
    (given,), (answered,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape[1:]) == ("images", "tensor(uint8)", [3, size, size])
    assert isinstance(given.shape[0], str)
    assert (answered.name, answered.shape[1]) == ("probabilities", 2)
    assert str(ROOT).encode() not in found.file.read_bytes()
    assert found.size == found.file.stat().st_size


def test_conv4_with_memory_answers_in_onnx_as_in_torch_on_100_images(tmp_path):
    says_what_it_takes(*agree_on_100(with_memory(), tmp_path))


@pytest.mark.slow
def test_resnet12_answers_in_onnx_as_in_torch_on_100_images(tmp_path):
    # A gentle step: probabilities of an untrained network would all be 0 or 1.
    learner = Part("maml", {"steps": 1, "inner_lr": 1e-4})
    model = Part("resnet12", {"channels": "narrow"})
    agree_on_100(replace(CONFIG, learner=learner, model=model), tmp_path)


@pytest.mark.slow
def test_a_pretrained_network_answers_in_onnx_as_in_torch_on_100_images(tmp_path):
    config = replace(CONFIG, model=Part("efficientnet-lite0", {"size": 64, "hidden": (8,)}))
    says_what_it_takes(*agree_on_100(config, tmp_path, TaskShape("classification", (1280,), 2)))


def test_a_program_of_torch_answers_and_tells_the_same(tmp_path):
    adapted, _ = fitted(CONFIG)
    found = export(adapted, tmp_path / "a.pt2")
    extra = {"torchemo.json": ""}
    program = torch.export.load(found.file, extra_files=extra).module()
    images = pictures(5, SIZE)
    expected = adapted.probabilities(seen(adapted.trained, images))
    torch.testing.assert_close(program(torch.from_numpy(images)), expected, atol=1e-5, rtol=0)
    assert json.loads(extra["torchemo.json"]) == found.about == described(adapted)
    assert str(ROOT).encode() not in found.file.read_bytes()


@pytest.mark.parametrize("bn", [bn for bn in get_args(Bn) if bn != "per_query_with_support"])
def test_every_normalisation_answers_as_adapt_does(bn):
    adapted, _ = fitted(replace(CONFIG, model=Part("conv4", {"filters": 8, "bn": bn})))
    answers_alike(adapted)


@pytest.mark.parametrize("name", LEARNERS)
def test_every_kind_of_learner_answers_as_adapt_does(name):
    adapted, _ = fitted(replace(CONFIG, learner=Part(name)))
    answers_alike(adapted)


def test_dark_and_light_are_swapped_inside(folders):
    support, query = folders
    adapted = adapt(trained(), support, invert=True)
    image = save(noise(RED, 3), query / "one.png")
    raw = np.asarray(noise(RED, 3)).transpose(2, 0, 1)[None].copy()
    (expected,) = adapted.predict(image).predictions
    got = AdaptedNetwork(adapted)(torch.from_numpy(raw))[0]
    assert got.tolist() == pytest.approx(list(expected.probabilities), abs=1e-6)


def answers_alike(adapted):
    images = pictures(4, SIZE)
    got = AdaptedNetwork(adapted)(torch.from_numpy(images))
    expected = adapted.probabilities(seen(adapted.trained, images))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def test_a_network_that_needs_the_support_set_beside_a_query_is_refused(tmp_path):
    config = replace(CONFIG, model=Part("conv4", {"filters": 4, "bn": "per_query_with_support"}))
    with pytest.raises(ConfigError, match="beside the support set"):
        export(fitted(config)[0], tmp_path / "a.pt2")
    assert not (tmp_path / "a.pt2").exists()


def test_a_file_that_answers_otherwise_is_not_written(tmp_path, monkeypatch):
    adapted, _ = fitted(CONFIG)
    kept = tmp_path / "a.pt2"
    kept.write_bytes(b"earlier")
    write = exporting._as_program

    def wrong(*given):
        data, answer = write(*given)
        return data, lambda x: answer(x) + 2e-4

    monkeypatch.setattr(exporting, "_as_program", wrong)
    with pytest.raises(ConfigError, match="Nothing was written"):
        export(adapted, kept)
    assert kept.read_bytes() == b"earlier"


def test_what_cannot_be_traced_is_refused_in_words(tmp_path, monkeypatch):
    def fails(*given, **others):
        raise RuntimeError("data-dependent\nlong story")

    monkeypatch.setattr(torch.export, "export", fails)
    with pytest.raises(ConfigError, match="written as torch: data-dependent"):
        export(fitted(CONFIG)[0], tmp_path / "a.pt2")


def test_formats_go_by_the_ending():
    assert [format_of(Path(name)) for name in ("a.onnx", "b.pt2")] == ["onnx", "torch"]
    with pytest.raises(ConfigError, match=r"\.onnx or \.pt2"):
        format_of(Path("c.txt"))


def test_the_guide_answers_as_it_says(folders, tmp_path, monkeypatch, capsys):
    """The program in docs/export.md, run as it stands."""
    support, _ = folders
    export(adapt(trained(), support), tmp_path / "classifier.onnx")
    save(noise(BLUE, 77), tmp_path / "pear.jpg")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/export.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    exec(next(text for text in programs if "onnxruntime" in text), {})
    (predicted,) = adapt(trained(), support).predict(tmp_path / "pear.jpg").predictions
    shown = capsys.readouterr().out.split()
    assert shown[0] == predicted.predicted
    assert float(shown[1]) == pytest.approx(predicted.probability, abs=2e-3)
