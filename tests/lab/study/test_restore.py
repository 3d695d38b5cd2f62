"""A study continues from its record: nothing recorded is trained again, everything else is."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.lab.study.conftest import CELLS, CONTRASTS, TINY, tiny_study
from tests.lab.study.test_command import ROOT
from torchemo.core.errors import DataError
from torchemo.lab.study import job as job_module
from torchemo.lab.study import run as run_module
from torchemo.lab.study.catalogue import entry_of
from torchemo.lab.study.datasets import packed_place
from torchemo.lab.study.entry import Cell, Contrast
from torchemo.lab.study.plan import plan
from torchemo.lab.study.records import read_result, record
from torchemo.lab.study.restore import _domain, _filled, _plain, restore
from torchemo.lab.study.result import TaskScores, save_scores
from torchemo.lab.study.run import StudyRun
from torchemo.lab.study.scales import scale_of
from torchemo.lab.study.streams.visits import Streams, Visits

pytestmark = pytest.mark.study

THIRD = Cell("anil", "ANIL", "anil", "base")
WIDER = (*CELLS, THIRD)
MORE = (*CONTRASTS, Contrast("other", "anil", "maml"))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A study with controls and two seeds, run once for all."""
    run = StudyRun(
        tiny_study(controls=True, seeds=(0, 1)), tmp_path_factory.mktemp("original"), workers=1
    )
    return run, run.run()


@pytest.fixture
def recorded(original, tmp_path):
    """The study, its result, and a record of it that may be changed."""
    run, result = original
    return run, result, record(run.folder, tmp_path / "kept")[0]


@pytest.fixture
def elsewhere(tmp_path):
    """Return ``elsewhere(**options)``: the study in a folder that is empty at first."""

    def build(**options):
        given = {"controls": True, "seeds": (0, 1), **options}
        return StudyRun(tiny_study(**given), tmp_path / "elsewhere", workers=1)

    return build


def bring_back(run, path):
    return restore(run, read_result(path), path.with_suffix(".npz"))


def flat(value, path=""):
    """All leaves of a result by their path."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for name, one in pairs for k, v in flat(one, f"{path}/{name}").items()}
    return {path: value}


def refuse(*given, **named):
    raise AssertionError("a recorded run was touched")


def test_a_restored_study_finds_what_was_recorded_and_trains_nothing(
    recorded, elsewhere, monkeypatch
):
    _, result, path = recorded
    again = elsewhere()
    assert not bring_back(again, path).left
    for name in ("train_run", "score_tasks", "diagnose"):
        monkeypatch.setattr(job_module, name, refuse)
    before, after = json.loads(json.dumps(result)), again.run()
    with np.load(path.with_suffix(".npz")) as kept, np.load(again.folder / "scores.npz") as found:
        assert set(kept.files) == set(found.files)
        assert all(np.array_equal(kept[name], found[name]) for name in kept.files)
    # Scores have four digits there, so what is computed from them differs a little.
    before, after = flat(before), flat(after)
    assert before.keys() == after.keys()
    for name, value in before.items():
        if not isinstance(value, float):
            assert after[name] == value, name
        elif "/cells/" in name:
            assert after[name] == pytest.approx(value, rel=1e-3, abs=2e-3), name


def test_new_cells_are_set_against_recorded_ones(recorded, elsewhere, monkeypatch):
    _, result, path = recorded
    bring_back(elsewhere(), path)
    trained = []
    real = job_module.train_run
    monkeypatch.setattr(
        job_module,
        "train_run",
        lambda root, *a, **b: trained.append(root.name) or real(root, *a, **b),
    )
    wider = elsewhere(cells=WIDER, contrasts=MORE).run()
    known = {run["id"] for cell in result["cells"] for run in cell["runs"]}
    assert len(trained) == 3  # two rates with the first seed, the better ones with the second
    assert not known & set(trained)
    contrasts = {c["name"]: c for c in wider["contrasts"]}
    base = next(c for c in result["cells"] if c["name"] == "maml")
    assert contrasts["other"]["means"][1] == pytest.approx(
        base["tests"]["mixed"]["mean"]["value"], rel=1e-3
    )


def test_a_recorded_learner_is_the_control_without_memory_of_a_new_cell(
    recorded, elsewhere, run_tiny, tmp_path, monkeypatch
):
    run, _ = run_tiny(cells=CELLS[:1], contrasts=())
    alone = record(run.folder, tmp_path / "alone")[0]
    bring_back(elsewhere(cells=CELLS[:1], contrasts=()), alone)
    trained = []

    def train(root, *given, **named):
        trained.append(root.name)
        return SimpleNamespace(ended="stopped")

    monkeypatch.setattr(job_module, "train_run", train)
    assert elsewhere().run() is None
    known = {one["id"] for cell in read_result(alone)["cells"] for one in cell["runs"]}
    assert trained
    assert not known & set(trained)


def test_a_cell_whose_configuration_changed_is_left_and_says_so(recorded, elsewhere):
    _, _, path = recorded
    changed = (CELLS[0], replace(CELLS[1], options=("memory.k=2",)))
    found = bring_back(elsewhere(cells=changed, controls=False), path)
    assert found.cells == ("maml",)
    assert found.left["maml-emo-paper"] == "its configuration has changed since"
    assert "no such cell" in found.left["maml-emo-paper/random-retrieval"]


OLDER = {f"{name}-cpu-regression" for name in ("F1", "F2", "T1", "T2")}
"""Recorded before runs were named by all that decides them."""
KEPT = sorted((ROOT / "studies").glob("*-cpu-*.json"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_runs_are_still_named_as_they_were_recorded(path, tmp_path, monkeypatch):
    """Options may be added; a default may not change, or what was recorded is of other runs."""

    def places(names, *, out, image_size, packed, **other):
        def place(name):
            if not packed:  # used as it lies there
                return out / f"{name.partition('#')[0]}.zip"
            return packed_place(name, out, image_size)

        return {n: n if n.startswith("regression:") else str(place(n)) for n in names}

    monkeypatch.setattr(run_module, "prepare", places)  # names of runs need no images
    kept = read_result(path)
    study = plan(entry_of(kept["entry"]), scale_of("cpu", kept["tasks"]))
    run = StudyRun(study, tmp_path)
    run.open_data()
    cells = {cell.name: cell for cell in study.available}
    for one in kept["cells"]:
        # Costs are measured with the first seed, and recorded without it.
        seeds = tuple(study.seeds[0] if r["seed"] is None else r["seed"] for r in one["runs"])
        runs = run.runs_of(cells[one["name"]], tuple(one["rates"]), seeds=seeds)
        named = [r["id"] for r in one["runs"]] == [folder.name for folder in runs.folders]
        assert named == (path.stem not in OLDER), one["name"]


@pytest.mark.parametrize(
    "change", [{"test_tasks": 7}, {"worlds": {**TINY.worlds, "mixed": ("regression:sine",)}}]
)
def test_scores_on_other_test_tasks_do_not_come_back(recorded, elsewhere, change):
    _, _, path = recorded
    run = elsewhere()
    run.study = replace(run.study, scale=replace(run.study.scale, **change))
    found = bring_back(run, path)
    assert not found.cells
    assert set(found.left.values()) <= {
        "the test tasks have changed since",
        "its configuration has changed since",
    }


def test_other_sets_under_the_name_of_a_further_test_are_noticed(recorded, elsewhere):
    _, _, path = recorded
    kept = read_result(path)
    kept["worlds"]["mixed"] = ["regression:sine"]
    found = restore(elsewhere(), kept, path.with_suffix(".npz"))
    assert set(found.left.values()) == {"the test tasks have changed since"}


def test_a_run_that_is_still_being_trained_is_left_alone(recorded, elsewhere):
    _, result, path = recorded
    run = elsewhere()
    begun = run.out / "runs" / result["cells"][0]["runs"][0]["id"]
    begun.mkdir(parents=True)
    (begun / "config.toml").write_text("")
    bring_back(run, path)
    assert [file.name for file in begun.iterdir()] == ["config.toml"]


def test_asked_for_more_than_was_recorded_a_run_is_trained_anew(recorded, elsewhere):
    _, _, path = recorded
    bring_back(elsewhere(), path)
    tested = (replace(CELLS[0], tests=("first",)), CELLS[1])
    result = elsewhere(cells=tested, controls=False).run()
    base = result["cells"][0]
    assert set(base["tests"]) == {"mixed", "first"}
    assert base["curve"]["loss"]
    assert (elsewhere().out / "runs" / base["runs"][0]["id"] / "config.toml").is_file()


def test_runs_that_are_there_are_not_written_over(recorded):
    run, _, path = recorded
    kept = {p: p.read_bytes() for p in (run.out / "runs").rglob("*") if p.is_file()}
    bring_back(run, path)
    assert {p: p.read_bytes() for p in (run.out / "runs").rglob("*") if p.is_file()} == kept


def test_a_grid_is_not_chosen_from_by_scores_that_were_not_recorded(recorded, elsewhere):
    """Records of old have the validation score of the first seed alone."""
    _, _, path = recorded
    old = read_result(path)
    for cell in old["cells"]:
        for run in cell["runs"]:
            del run["best_score"]
    restore(elsewhere(), old, path.with_suffix(".npz"))
    second = elsewhere(seeds=(1,), controls=False, cells=CELLS[:1], contrasts=())
    result = second.run()
    assert all(one["validation"] is not None for one in result["cells"][0]["tried"])


def test_rates_that_were_given_up_are_not_tried_again(recorded, elsewhere, monkeypatch):
    """Better ones on validation tasks than those chosen: a run of another seed had diverged."""
    _, result, path = recorded
    kept = read_result(path)
    for cell in kept["cells"]:
        for one in cell["tried"]:
            one["validation"] = -1.0 if one["rates"] == cell["rates"] else -0.5
    restore(elsewhere(), kept, path.with_suffix(".npz"))
    monkeypatch.setattr(job_module, "train_run", refuse)
    again = elsewhere().run()
    assert [c["rates"] for c in again["cells"]] == [c["rates"] for c in result["cells"]]


def test_means_over_other_seeds_do_not_mix(recorded, elsewhere, run_tiny, tmp_path):
    _, _, path = recorded
    bring_back(elsewhere(), path)
    one, _ = run_tiny(seeds=(0,))
    alone = record(one.folder, tmp_path / "alone")[0]
    found = bring_back(elsewhere(seeds=(0,), controls=False), alone)
    assert "maml" in found.cells
    assert "use a folder of its own" in found.left["maml-emo-paper"]


def test_a_mean_over_seeds_does_not_stand_beside_a_run_that_is_there(recorded, elsewhere):
    _, _, path = recorded
    elsewhere(seeds=(0,), controls=False).run()
    found = bring_back(elsewhere(), path)
    assert "maml" in found.cells
    assert "use a folder of its own" in found.left["maml-emo-paper"]


def test_without_scores_there_is_nothing_to_restore(recorded, elsewhere):
    _, _, path = recorded
    path.with_suffix(".npz").unlink()
    with pytest.raises(DataError, match="without the scores of tasks"):
        bring_back(elsewhere(), path)


def keep_last_step_alone(path):
    with np.load(path) as arrays:
        last = {n: a[..., -1:] if a.ndim == 3 else a for n, a in arrays.items()}
    np.savez_compressed(path, **last)


def test_scores_of_the_last_step_alone_come_back_where_nobody_looks_at_others(recorded, elsewhere):
    _, result, path = recorded
    keep_last_step_alone(path.with_suffix(".npz"))
    assert not bring_back(elsewhere(), path).left
    again = elsewhere().run()
    for one, other in zip(result["contrasts"], again["contrasts"], strict=True):
        assert other["means"] == pytest.approx(one["means"], rel=1e-3)


def test_they_do_not_where_a_contrast_is_drawn_after_fewer_steps(recorded, elsewhere):
    _, _, path = recorded
    keep_last_step_alone(path.with_suffix(".npz"))
    early = (replace(CONTRASTS[0], step=0),)
    found = bring_back(elsewhere(contrasts=early, controls=False), path)
    assert not found.cells
    assert found.left["maml"] == "of its scores the last inner step alone was kept"


def test_the_command_says_what_came_back(torchemo, recorded, tmp_path):
    smoke = ("--scale", "smoke", "--tasks", "regression")
    where = ("--out", tmp_path / "cli", "--to", tmp_path / "records")
    first = torchemo(
        *(
            "study",
            "run",
            "T1",
            *smoke,
            *where[:2],
            "--cells",
            "maml",
            "--seeds",
            "0",
            "--jobs",
            "1",
        )
    )
    assert first.code == 0, first.err
    assert torchemo("study", "record", "T1", *smoke, *where).code == 0
    fresh = ("--out", tmp_path / "fresh", "--records", tmp_path / "records")
    found = torchemo("study", "restore", "T1", *smoke, *fresh, "--json")
    assert found.json == {"T1": {"cells": ["maml"], "left": {}}}
    shown = torchemo("study", "restore", "T1", *smoke, *fresh)
    assert "T1: 1 cells came back: maml" in shown.out
    missing = torchemo("study", "restore", "T2", *smoke, *fresh)
    assert missing.code == 3
    assert "T2-smoke-regression.json" in missing.err
    assert "There are: T1-smoke-regression." in missing.err


def test_what_a_cell_does_with_tasks_that_come_back_is_the_same_in_a_record() -> None:
    """Records have lists where there are tuples, and earlier ones lack options that came later."""
    visits = Visits(Streams(), find="names", answer="mixture", weights=((1.0, 2.0),))
    recorded = json.loads(json.dumps(asdict(visits)))
    assert _filled(recorded) == _plain(visits)
    for later in ("trust", "new", "right", "calibrated"):
        del recorded[later]
    assert _filled(recorded) == _plain(visits)
    assert _filled(recorded) != _plain(replace(visits, right=0.5))
    assert _filled(None) is None


def test_cells_with_tasks_of_their_own_have_domains_of_their_own(tmp_path) -> None:
    """Cells of one study may meet other streams, with more tasks or fewer."""
    usual, other = (
        TaskScores("accuracy", ("a", "b"), np.array(domain), np.zeros((1, len(domain), 2)))
        for domain in ([0, 1, 0], [1, 1])
    )
    save_scores(tmp_path / "scores.npz", {"x|first": usual, "y|first": usual, "z|first": other})
    with np.load(tmp_path / "scores.npz") as arrays:
        about = {"domains": ["a", "b"]}
        assert _domain(arrays, "y|first", about, 3).tolist() == [0, 1, 0]
        assert _domain(arrays, "z|first", about, 2).tolist() == [1, 1]
        assert "domain|y|first" not in arrays
        with pytest.raises(DataError, match="were not recorded"):
            _domain(arrays, "y|first", about, 2)
        assert _domain(arrays, "y|first", {"domains": ["a"]}, 2).tolist() == [0, 0]
