"""Results: differences against a plain computation, rounding, records, what is refused."""

import json

import numpy as np
import pytest
from scipy import stats

from torchemo.core.errors import DataError
from torchemo.lab.study.entry import Cell, Contrast
from torchemo.lab.study.pages.tables import recalled_table
from torchemo.lab.study.records import LARGEST, read_result, read_results, record
from torchemo.lab.study.result import (
    CellRuns,
    TaskScores,
    describe_cell,
    describe_contrast,
    describe_diverged,
    read_scores,
    save_scores,
    write_json,
)


def scores(values, metric="accuracy"):
    values = np.asarray(values, dtype=float)
    domain = np.arange(values.shape[1]) % 2
    return TaskScores(metric, ("x", "y"), domain, values)


def test_a_contrast_is_the_paired_difference_with_students_interval():
    rng = np.random.default_rng(0)
    a, b = rng.random((1, 20, 3)), rng.random((1, 20, 3))
    found = describe_contrast(Contrast("c", "a", "b", "better"), scores(a), scores(b))
    d = (a - b)[0, :, -1]
    low, high = stats.t.interval(0.95, 19, d.mean(), stats.sem(d))
    assert found["over_tasks"]["value"] == pytest.approx(d.mean())
    assert (found["over_tasks"]["low"], found["over_tasks"]["high"]) == pytest.approx((low, high))
    assert found["per_domain"]["y"]["value"] == pytest.approx(d[1::2].mean())
    assert found["relative"] == pytest.approx(a[..., -1].mean() / b[..., -1].mean() - 1)
    assert "over_seeds" not in found


def test_a_contrast_can_look_at_other_inner_steps_on_either_side():
    a = np.stack([np.zeros((2, 6)), np.full((2, 6), 0.7), np.ones((2, 6))], -1)
    b = np.stack([np.full((2, 6), 0.1), np.full((2, 6), 0.2), np.full((2, 6), 0.4)], -1)
    contrast = Contrast("c", "a", "b", step=1, against_step=0)
    found = describe_contrast(contrast, scores(a), scores(b))
    assert found["over_tasks"]["value"] == pytest.approx(0.6)
    assert found["seeds"] == 2
    assert found["over_seeds"]["both"]["value"] == pytest.approx(0.6)


def test_lower_errors_are_better_and_lower_accuracies_worse():
    a, b = np.full((2, 8, 1), 0.1), np.full((2, 8, 1), 0.5)
    a[:, :, 0] += np.linspace(0, 0.01, 8)
    contrast = Contrast("c", "a", "b", "better")
    assert describe_contrast(contrast, scores(a, "mse"), scores(b, "mse"))["verdict"] == "holds"
    assert describe_contrast(contrast, scores(a), scores(b))["verdict"] == "does not hold"


@pytest.mark.parametrize("how", ["domain", "data", "metric"])
def test_scores_of_other_tasks_are_not_set_against_each_other(how):
    first = scores(np.ones((2, 4, 1)))._replace(data="abc")
    second = {
        "domain": first._replace(domain=1 - first.domain),
        "data": first._replace(data="abd"),
        "metric": first._replace(metric="mse"),
    }[how]
    contrast = Contrast("one vs other", "a", "b")
    with pytest.raises(DataError, match="one vs other: the scores are not of the same test tasks"):
        describe_contrast(contrast, first, second)
    assert describe_contrast(contrast, first, first._replace(data=None))["seeds"] == 2  # restored


def test_what_is_claimed_of_a_cell_that_diverged_does_not_hold():
    assert describe_diverged(Contrast("c", "a", "b", "better"), ["a"])["verdict"] == "does not hold"
    assert describe_diverged(Contrast("c", "a", "b"), ["a"])["verdict"] == "shown"


def test_scores_are_kept_to_four_digits_whatever_their_size(tmp_path):
    values = np.array([[[1234567.0], [0.00123456], [0.0], [0.5866667]]])
    save_scores(tmp_path / "scores.npz", {"a|mixed": scores(values)})
    with np.load(tmp_path / "scores.npz") as kept:
        assert kept["a|mixed"].ravel() == pytest.approx([1235000, 0.001235, 0, 0.5867])
        assert kept["domain|mixed"].tolist() == [0, 1, 0, 1]


def a_result(**changes):
    return {
        "format": 2,
        "entry": "T1",
        "scale": "cpu",
        "tasks": "regression",
        "cells": [],
        "contrasts": [],
        "seeds": [0],
        "command": "x",
        **changes,
    }


def test_a_record_is_small_and_large_scores_keep_the_last_step_alone(tmp_path):
    folder = tmp_path / "T1-cpu-regression"
    write_json(folder / "result.json", a_result())
    noise = np.random.default_rng(0).random((3, 40_000, 4))
    save_scores(folder / "scores.npz", {"a|mixed": scores(noise)})
    assert (folder / "scores.npz").stat().st_size > LARGEST
    kept = record(folder, tmp_path / "studies")
    assert [path.name for path in kept] == ["T1-cpu-regression.json", "T1-cpu-regression.npz"]
    assert all(path.stat().st_size <= LARGEST for path in kept)
    with np.load(kept[1]) as arrays:
        assert arrays["a|mixed"].shape == (3, 40_000, 1)
        assert arrays["a|mixed"][0, :, 0] == pytest.approx(noise[0, :, -1], rel=1e-3)


def test_a_record_that_would_be_too_large_leaves_nothing_behind(tmp_path):
    folder = tmp_path / "T1-cpu-regression"
    write_json(folder / "result.json", a_result(ballast=list(range(200_000))))
    save_scores(folder / "scores.npz", {"a|mixed": scores([[[0.5], [0.25]]])})
    with pytest.raises(DataError, match="more than 1,000,000 bytes"):
        record(folder, tmp_path / "studies")
    assert not list((tmp_path / "studies").iterdir())
    write_json(folder / "result.json", a_result())
    (kept, _) = record(folder, tmp_path / "studies")
    write_json(folder / "result.json", a_result(ballast=list(range(200_000))))
    with pytest.raises(DataError, match="more than 1,000,000 bytes"):
        record(folder, tmp_path / "studies")
    assert read_result(kept) == a_result()  # what was recorded before is still there


def test_a_record_with_more_cells_or_seeds_is_not_lost_by_mistake(tmp_path):
    folder, to = tmp_path / "T1-cpu-regression", tmp_path / "studies"
    save_scores(folder / "scores.npz", {"a|mixed": scores([[[0.5], [0.25]]])})
    cells = [{"name": name} for name in ("maml", "anil")]
    write_json(folder / "result.json", a_result(cells=cells, seeds=[0, 1]))
    (kept, _) = record(folder, to)
    before = kept.read_bytes()
    for fewer in (a_result(cells=cells[:1], seeds=[0, 1]), a_result(cells=cells, seeds=[1, 2])):
        write_json(folder / "result.json", fewer)
        with pytest.raises(DataError, match=r"also has (anil|seed 0), which would be lost"):
            record(folder, to)
        assert kept.read_bytes() == before
    record(folder, to, replace=True)
    assert read_result(kept)["seeds"] == [1, 2]
    write_json(folder / "result.json", a_result(cells=cells, seeds=[1, 2, 3]))
    record(folder, to)
    assert read_result(kept)["seeds"] == [1, 2, 3]


def test_a_record_of_costs_has_no_scores_beside_it(tmp_path):
    folder = tmp_path / "T6-cpu-images"
    write_json(folder / "result.json", a_result(entry="T6", tasks="images"))
    save_scores(folder / "scores.npz", {})
    assert [p.name for p in record(folder, tmp_path / "kept")] == ["T6-cpu-images.json"]
    assert [p.name for p in (tmp_path / "kept").iterdir()] == ["T6-cpu-images.json"]


def test_results_are_found_by_entry_scale_and_tasks(tmp_path):
    for scale in ("smoke", "cpu"):
        write_json(tmp_path / f"T1-{scale}-regression" / "result.json", a_result(scale=scale))
    assert len(read_results(tmp_path, "T1")) == 2
    assert [r["scale"] for r in read_results(tmp_path, "T1", scale="cpu")] == ["cpu"]
    assert read_results(tmp_path, "T1", tasks="images") == []


@pytest.mark.parametrize("text", ["", "[1]", "3", json.dumps({"entry": "T1"}), "{"])
def test_what_is_not_a_result_is_refused_by_name(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(DataError, match=r"result\.json is not the result of a study"):
        read_result(tmp_path / "result.json")


def test_own_tasks_are_read_after_every_step_and_further_ones_after_the_last(tmp_path):
    runs = {"a": {"own": [[1, 2], [3, 4]], "far": [[5, 6], [7, 8]]}}
    runs["b"] = {"own": [[1, 3], [3, 5]], "far": [[9], [10]]}
    for name, worlds in runs.items():
        (tmp_path / name).mkdir()
        for world, rows in worlds.items():
            about = {"metric": "accuracy", "domains": ["x"], "domain": [0, 0], "per_task": rows}
            (tmp_path / name / world).write_text(json.dumps(about))
    cell = Cell("c", "C", "maml", "base", world="own", tests=("far",))
    folders = tuple(tmp_path / name for name in runs)
    found = CellRuns(cell, (0, 1), folders, {"own": "own", "far": "far"}, (), ())
    assert read_scores(found, "own").scores.tolist() == [[[1, 2], [3, 4]], [[1, 3], [3, 5]]]
    assert read_scores(found, "far").scores.tolist() == [[[6], [8]], [[9], [10]]]


def test_what_was_recalled_is_a_mean_over_seeds_and_a_column_per_test(tmp_path):
    shares = {"own": (0.9, 0.8), "far": (0.25, 0.5)}
    for i in (0, 1):
        (tmp_path / str(i)).mkdir()
        for world, both in shares.items():
            about = {"metric": "accuracy", "domains": ["x"], "domain": [0, 0], "recalled": both[i]}
            (tmp_path / str(i) / world).write_text(json.dumps({**about, "per_task": [[1], [0]]}))
    cell = Cell("c", "C", "maml-offsets", "memory", world="own", tests=("far",))
    folders = (tmp_path / "0", tmp_path / "1")
    runs = CellRuns(cell, (0, 1), folders, {"own": "own", "far": "far"}, (), ())
    described = describe_cell(runs, {world: read_scores(runs, world) for world in shares})
    base = {"title": "B", "tests": {"own": {"recalled": None}, "old": {}}}
    found = recalled_table([base, described])
    assert found.columns == ("method", "own", "far")
    assert found.rows == [("C", "0.850", "0.375")]
    assert not recalled_table([base]).rows
