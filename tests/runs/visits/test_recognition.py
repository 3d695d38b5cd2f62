"""Classes recognised by their images alone: learned from a run's own data, kept beside it, said in shares."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.runs.test_adapt import CONFIG, trained
from tests.runs.visits.conftest import form, images, visit
from torchemo.config.registry import Part
from torchemo.core.errors import CheckpointError, ConfigError
from torchemo.data.episodes import EpisodeSpec
from torchemo.data.index import ClassIndex
from torchemo.data.source import PictureTasks
from torchemo.memory.lifelong.ratio import SameClass
from torchemo.memory.lifelong.shares import COMPARED, NEW, TRUST, ByRatio
from torchemo.runs.experiment import build_trainer
from torchemo.runs.load import Opened
from torchemo.runs.visits import recognition
from torchemo.runs.visits.index import Settings
from torchemo.runs.visits.recognition import Gain, Recognition, calibrate
from torchemo.runs.visits.returning import fit_again, fresh_index, recogniser_of, weights_digest
from torchemo.runs.visits.store import reading, writing

PAIR = ("blue", "red")
HEAD_ALONE = replace(
    CONFIG,
    learner=Part("anil", {"steps": 3, "shared_row": True, "inner_lr": 0.5}),
    model=Part("mlp", {"hidden": [16]}),
)
IMAGES = Settings(recognise="images")


@pytest.fixture(scope="module")
def same(run):
    """What tells colours apart, in the features of the run."""
    seen = [images(seed, "red", "blue", "green", shots=20) for seed in range(50, 52)]
    x = torch.cat([torch.cat(list(one.values())) for one in seen])
    y = torch.arange(3).repeat_interleave(20).repeat(2)
    theta = {n: t[None] for n, t in run.system.params.items()}
    with torch.no_grad():
        features = run.system.learner.model.at(0, stored=True).features(theta, x[None])[0]
    return SameClass.learned(features, y)


def of(same, run, *, low=0.01):
    return Recognition(same, "features", 0.4, 1.0, Gain(0.02, low, 0.03), weights_digest(run))


def test_images_are_recognised_without_names(run, store, same):
    recogniser = ByRatio(same, "features", trust=0.4)
    first = visit(run, store, 0, *PAIR, settings=IMAGES, recogniser=recogniser)
    assert first.adapted.seen.words == "Not seen before, as far as images tell."
    # The same images under other names in another order: blue is second in the alphabet now.
    shown = images(1, *PAIR)
    renamed = {"1": shown["red"], "2": shown["blue"]}
    with writing(store) as opened:
        found = fit_again(run, renamed, form(run), opened, recogniser=recogniser)
        found.keep(opened)
    seen = found.adapted.seen
    assert [one.known for one in seen.classes] == ["red", "blue"]
    assert all(0.5 < one.share <= 1 for one in seen.classes)
    assert "1 was probably seen once as red" in seen.words
    assert (
        "1 past visit counts by these probabilities. The last of these visits was on" in seen.words
    )
    assert json.dumps(seen.to_dict())
    assert [line[:2] for line in reading(store).classes] == [("blue", 2), ("red", 2)]


def test_what_comes_back_changes_the_answer_in_the_store_as_in_ram(run, store, same):
    recogniser = ByRatio(same, "features", trust=0.4)
    for seed in range(2):
        visit(run, store, seed, *PAIR, settings=IMAGES, recogniser=recogniser)
    again = fit_again(run, images(7, *PAIR), form(run), reading(store), recogniser=recogniser)
    query = images(900, "red", shots=3)["red"]
    with_it, without = (
        again.adapted.probabilities(query),
        again.adapted.without.probabilities(query),
    )
    assert not torch.allclose(with_it, without)


def test_a_class_that_is_new_by_its_images_gets_a_free_name(run, store, same):
    doubting = ByRatio(same, "features", trust=0.4, new=1e30)
    for seed in range(2):
        visit(run, store, seed, *PAIR, settings=IMAGES, recogniser=doubting)
    assert [line.name for line in reading(store).classes] == ["blue", "blue (2)", "red", "red (2)"]


def test_it_is_kept_beside_the_run_as_it_was(run, same, tmp_path):
    kept = of(same, run)
    path = recognition.save(tmp_path, kept)
    found = recognition.load(tmp_path, weights=kept.weights)
    about = ("space", "trust", "new", "gain", "weights")
    assert [getattr(found, name) for name in about] == [getattr(kept, name) for name in about]
    assert torch.equal(found.same.directions, same.directions)
    assert torch.equal(found.same.centre, same.centre)
    assert torch.equal(found.same.spread, same.spread)
    assert recognition.load(tmp_path, weights="0" * 64) is None
    assert recognition.load(tmp_path / "none", weights=kept.weights) is None
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="is damaged") as damaged:
        recognition.load(tmp_path, weights=kept.weights)
    assert "torchemo memory calibrate" in damaged.value.hint


def test_directions_that_do_not_fit_are_refused(run, same, tmp_path):
    for wrong in (
        replace(same, centre=same.centre[:-1]),
        replace(same, spread=-same.spread),
        replace(same, directions=same.directions * torch.nan),
    ):
        kept = of(wrong, run)
        recognition.save(tmp_path, kept)
        with pytest.raises(CheckpointError, match="is damaged"):
            recognition.load(tmp_path, weights=kept.weights)


def test_a_run_that_never_learned_it_is_told_how(run, same, tmp_path):
    with pytest.raises(ConfigError, match="has not learned to recognise classes") as never:
        fresh_index(run, tmp_path, IMAGES)
    assert f"torchemo memory calibrate {tmp_path}" in never.value.hint
    recognition.save(tmp_path, of(same, run))
    assert fresh_index(run, tmp_path, IMAGES).settings == IMAGES
    assert isinstance(recogniser_of(run, tmp_path, IMAGES), ByRatio)
    assert recogniser_of(run, tmp_path, Settings()) is None
    other = trained(CONFIG)
    other.system.params["head.bias"] = other.system.params["head.bias"] + 1e-3
    with pytest.raises(ConfigError, match="for other weights"):
        recogniser_of(other, tmp_path, IMAGES)


def test_recall_that_did_not_help_is_refused(run, same, tmp_path):
    recognition.save(tmp_path, of(same, run, low=-0.001))
    with pytest.raises(ConfigError, match="cannot tell classes apart") as refused:
        fresh_index(run, tmp_path, IMAGES)
    assert "+2.0 points [-0.1, +3.0]" in refused.value.message


def test_visits_without_what_is_compared_are_refused(run, store, same, tmp_path):
    """Those of a store by names, or of an earlier version, which compared by cosine."""
    visit(run, store, 0, *PAIR)
    recogniser = ByRatio(same, "features")
    mine = tmp_path / "mine"
    visit(run, mine, 1, *PAIR, settings=IMAGES, recogniser=recogniser)
    with writing(mine) as opened, pytest.raises(ConfigError, match="kept for names") as refused:
        opened.merge([reading(store)])
    assert "torchemo memory merge NEW" in refused.value.hint
    with writing(store) as opened:  # the other way round nothing is missing
        assert opened.merge([reading(mine)])[0] == 1


def test_noise_is_added_to_what_is_compared(run, store, same):
    recogniser = ByRatio(same, "features")
    noisy = Settings(recognise="images", clip=1.0, noise=0.1)
    kept = visit(run, store, 0, *PAIR, settings=noisy, recogniser=recogniser).new.sight.means
    opened = reading(store)
    found = opened.compared(opened.index.visits[0])
    assert set(found) == {COMPARED}
    stored = found[COMPARED]
    assert 0.02 < float((stored - kept[COMPARED]).std()) < 0.5
    assert float(kept[COMPARED].norm(dim=1).max()) <= 1 + 1e-5


def tasks(apart):
    """Return tasks of points around the middle of their class; one middle serves all if not apart."""
    g = torch.Generator().manual_seed(3)
    middles = torch.randn(12, 8, generator=g) if apart else torch.ones(12, 8)
    x = middles.repeat_interleave(20, 0) + 0.6 * torch.randn(240, 8, generator=g)
    splits = ["train"] * 6 + ["val"] * 4 + ["test"] * 2
    names = [f"c{i}" for i in range(12)]
    index = ClassIndex(x.numpy(), np.repeat(np.arange(12), 20), names, splits, ["d"] * 12)
    return PictureTasks(index, EpisodeSpec(2, 1, 3))


@pytest.mark.parametrize("apart", [True, False])
def test_recall_is_trusted_where_validation_classes_gain(apart, monkeypatch):
    monkeypatch.setattr(recognition, "VISITS", 8)
    source = tasks(apart)
    system = build_trainer(HEAD_ALONE, source.shape).system
    found = calibrate(Opened(HEAD_ALONE, source, system), "0" * 64, users=5)
    assert found.helps == apart
    assert found.space == "inputs"
    assert found.trust in TRUST
    assert found.new in NEW
