"""Runs of a study: trained once, resumed bit for bit, never in each other's way."""

import json
from dataclasses import replace

import pytest

from tests.lab.study.conftest import CELLS, tiny_study
from torchemo.config.toml import dumps
from torchemo.core.errors import DataError, Diverged
from torchemo.lab.study import job as job_module
from torchemo.lab.study.engines.crew import Here
from torchemo.lab.study.entry import Cell, Contrast
from torchemo.lab.study.job import Job, is_done, work
from torchemo.lab.study.run import StudyRun, Watch


def files(folder, pattern):
    return {path: path.read_bytes() for path in sorted(folder.rglob(pattern)) if path.is_file()}


def scores_of(result):
    return {cell["name"]: cell["tests"]["mixed"]["mean"] for cell in result["cells"]}


def test_a_study_trains_tunes_scores_and_writes_everything_down(run_tiny):
    study, result = run_tiny(controls=True, seeds=(0, 1))
    assert {path.name for path in study.folder.iterdir()} >= {
        *("result.json", "scores.npz", "table.md", "report.html", "figure-1.svg"),
    }
    saved = json.loads((study.folder / "result.json").read_text())
    assert saved == json.loads(json.dumps(result))
    assert [c["name"] for c in saved["contrasts"]] == [
        "gain",
        *(f"maml-emo-paper vs {name}"
          for name in ("no-memory", "random-retrieval", "random-gradients")),
        *(f"maml-emo-paper/{name} vs maml" for name in ("random-retrieval", "random-gradients")),
    ]  # fmt: skip
    base, emo = saved["cells"][:2]
    assert len(base["tried"]) == 2
    assert base["rates"] == max(base["tried"], key=lambda t: t["validation"])["rates"]
    assert [run["seed"] for run in emo["runs"]] == [0, 1]
    assert emo["recall"]["chance"] == 0.25
    assert saved["cells"][3]["rates"] == emo["rates"]
    assert saved["contrasts"][0]["seeds"] == 2


def test_what_is_there_is_never_trained_or_scored_again(run_tiny, monkeypatch):
    first, before = run_tiny()
    kept = files(first.out / "runs", "*")

    def refuse(*given, **named):
        raise AssertionError("a run that exists was touched")

    for name in ("train_run", "score_tasks", "diagnose"):
        monkeypatch.setattr(job_module, name, refuse)
    _, after = run_tiny()
    assert after == before
    assert files(first.out / "runs", "*") == kept


def test_entries_that_need_the_same_run_share_it(run_tiny):
    first, _ = run_tiny(cells=CELLS[:1], contrasts=())
    runs = len(list((first.out / "runs").iterdir()))
    again = (Cell("other name", "Other", "maml", "base"),)
    run_tiny(cells=again, contrasts=())
    assert len(list((first.out / "runs").iterdir())) == runs


@pytest.mark.parametrize("first", [0, 1])
def test_cells_that_share_a_run_are_each_tested_where_they_ask(run_tiny, first):
    """A base learner is tested elsewhere too; the control without memory is the same run."""
    cells = [
        Cell("maml", "MAML", "maml", "base", tests=("first",)),
        Cell("alike", "the same", "maml", "base"),
    ]
    _, result = run_tiny(cells=(cells[first], cells[1 - first]), contrasts=())
    tested = {cell["name"]: set(cell["tests"]) for cell in result["cells"]}
    assert tested == {"maml": {"mixed", "first"}, "alike": {"mixed"}}


@pytest.mark.parametrize("asked", [1, 4, 9])
def test_a_study_that_is_stopped_resumes_to_the_same_result(run_tiny, tmp_path, asked):
    _, whole = run_tiny()
    count = 0

    def stop():
        nonlocal count
        count += 1
        return count > asked

    second = tmp_path / "second"
    watch = Watch(should_stop=stop)
    assert StudyRun(tiny_study(), second, workers=1, watch=watch).run() is None
    resumed = StudyRun(tiny_study(), second, workers=1).run()
    assert scores_of(resumed) == scores_of(whole)
    assert resumed["contrasts"] == whole["contrasts"]


def test_a_cell_that_diverges_is_a_result_and_not_an_error(run_tiny, monkeypatch):
    real = job_module.train_run

    def train(root, config, **named):
        if config is not None and config.train.tasks == 3:
            raise Diverged("a loss is not finite.")
        return real(root, config, **named)

    monkeypatch.setattr(job_module, "train_run", train)
    wild = Cell("wild", "Wild", "maml", "base", options=("train.tasks=3",), of="maml")
    contrast = Contrast("wild vs maml", "wild", "maml", "better")
    study, result = run_tiny(cells=(CELLS[0], wild), contrasts=(contrast,))
    assert not study.failures
    assert result["contrasts"][0]["diverged"] == ["wild"]
    assert result["contrasts"][0]["verdict"] == "does not hold"
    assert "wild diverged" in (study.folder / "table.md").read_text()


@pytest.mark.parametrize("everywhere", [False, True])
def test_rates_that_diverge_with_another_seed_are_given_up_for_the_next_best(
    run_tiny, monkeypatch, everywhere
):
    real = job_module.train_run
    rates = [float(point[0].partition("=")[2]) for point in tiny_study().scale.grid]
    first = run_tiny(cells=CELLS[:1], contrasts=(), seeds=(0,))[1]["cells"][0]
    best = float(first["rates"][0].partition("=")[2])
    (other,) = set(rates) - {best}

    def train(root, config, **named):
        wild = everywhere or (config is not None and config.learner.options["inner_lr"] == best)
        if config is not None and config.train.seed == 1 and wild:
            raise Diverged("a loss is not finite.")
        return real(root, config, **named)

    monkeypatch.setattr(job_module, "train_run", train)
    cell = run_tiny(cells=CELLS[:1], contrasts=(), seeds=(0, 1))[1]["cells"][0]
    assert float(cell["rates"][0].partition("=")[2]) == (best if everywhere else other)
    ended = ["finished", "diverged"] if everywhere else ["finished", "finished"]
    assert [run["ended"] for run in cell["runs"]] == ended
    assert cell["tried"] == first["tried"]


def test_a_cell_that_fails_does_not_stop_the_others(run_tiny, monkeypatch):
    real = job_module.train_run

    def train(root, config, **named):
        if config is not None and config.memory.name != "none":
            raise DataError("no such thing.")
        return real(root, config, **named)

    monkeypatch.setattr(job_module, "train_run", train)
    study, result = run_tiny()
    assert {end.why for end in study.failures} == {"no such thing."}
    assert result["cells"][0]["tests"]["mixed"]["tasks"] == 6
    assert result["cells"][1]["tests"] == {}
    assert "no such thing." in result["failed"].values()
    assert result["contrasts"] == []


def test_progress_counts_the_steps_of_all_runs(run_tiny):
    plans, steps = [], {}
    watch = Watch(
        on_plan=lambda total, done: plans.append((total, done)),
        on_step=lambda run, step: steps.__setitem__(run, step),
    )
    run_tiny(watch=watch)
    assert plans == [(12, 0), (6, 6)] or plans == [(12, 0), (6, 0)]
    assert set(steps.values()) == {3}


def test_a_run_whose_cost_was_measured_before_can_still_be_trained(tmp_path):
    study = tiny_study()
    config = study.config(study.cells[0], {"mixed": ("regression:hsml4",)})
    cost = Job("run", tmp_path / "run", dumps(config), steps=3, cost=True)
    for job in (cost, replace(cost, cost=False)):
        assert work(job, tell=lambda step: None, should_stop=lambda: False).how == "done"
        assert is_done(job)
    assert is_done(cost)  # what it costs is still known


def test_a_job_that_is_done_is_known_by_its_files(tmp_path):
    study = StudyRun(tiny_study(cells=CELLS[:1], contrasts=()), tmp_path, workers=1)
    study.open_data()
    runs = study.runs_of(CELLS[0], study.study.scale.grid[0])
    one = study._final_jobs(runs)[0]
    assert not is_done(one)
    assert work(one, tell=lambda step: None, should_stop=lambda: False).how == "done"
    assert is_done(one)
    (one.root / one.scorings[0].file).unlink()
    assert not is_done(one)


def test_a_crew_of_one_does_its_jobs_in_this_process():
    assert Here().do([]) == []
