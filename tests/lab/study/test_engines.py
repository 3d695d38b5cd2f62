"""Engines: what they refuse, and the same study on each of them."""

import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.lab.study.conftest import CELLS, TINY, tiny_study
from tests.lab.study.test_crew import scores
from torchemo.core.errors import ConfigError, ResourceError
from torchemo.lab.study.engines import ENGINES, open_engine
from torchemo.lab.study.engines import engine as engine_module
from torchemo.lab.study.engines.crew import Crew
from torchemo.lab.study.engines.engine import needed
from torchemo.lab.study.engines.slurm import SlurmOptions, SubmititLocal
from torchemo.lab.study.run import StudyRun, Watch
from torchemo.runs.events import read
from torchemo.runs.storage.heartbeat import read_note


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--on", "slrum"), 2, "Did you mean 'slurm'?"),
        (("--on", "dask"), 2, "needs the address of a scheduler, got ''"),
        (("--on", "dask://tower"), 2, "dask://scheduler:8786"),
        (("--on", "dask://127.0.0.1:1", "--on-options", "timeout=0.2"), 6, "no scheduler of dask"),
        (("--on", "slurm"), 6, "there is no Slurm on this machine"),
        (("--on", "slurm://node"), 2, "takes no address, got 'node'"),
        (("--on", "slurm", "--on-options", "partiton=gpu"), 2, "Did you mean 'partition'?"),
        (("--on", "slurm", "--on-options", "mem_gb=much"), 2, "'mem_gb' should be float"),
        (("--on", "slurm", "--on-options", "timeout_min=0"), 2, "timeout_min should be 1 or more"),
        (("--on", "slurm", "--on-options", 'sbatch=["x"]'), 2, "'x' should be NAME=VALUE"),
        (("--on", "slurm", "--on-options", "partition"), 2, "should be KEY=VALUE"),
        (("--on-options", "threads=2"), 2, "engine 'local' has no options, got"),
        (("--most", "0"), 2, "--most should be 1 or more, got 0"),
        (("--most", "2", "--jobs", "2"), 2, "--most and --jobs are the same"),
        (("--device", "cuda:7"), 2, "there is no device 'cuda:7' on this machine"),
    ],
)
def test_a_mistake_about_engines_is_told_before_anything_is_run(
    torchemo, tmp_path, words, code, said
):
    pytest.importorskip("submitit", reason="extra slurm")
    pytest.importorskip("distributed", reason="extra dask")
    found = torchemo(
        *("study", "run", "T1", "--scale", "smoke", "--tasks", "regression"),
        *("--out", tmp_path / "out", *words),
    )
    assert found.code == code
    assert said in found.err
    assert not list(tmp_path.iterdir())


def test_a_study_that_was_asked_to_stop_by_a_file_does_not_begin(torchemo, tmp_path):
    (tmp_path / "stop").touch()
    words = ("--scale", "smoke", "--tasks", "regression", "--out", tmp_path)
    found = torchemo("study", "run", "T1", *words)
    assert found.code == 2
    assert "Delete it" in found.err


@pytest.mark.parametrize(("module", "extra"), [("submitit", "slurm"), ("distributed", "dask")])
def test_an_engine_that_is_not_installed_names_the_extra(module, extra, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"{module} is not installed") as caught:
        open_engine({"slurm": "slurm", "dask": "dask://host:8786"}[extra], (), tmp_path)
    assert caught.value.hint == f"pip install 'torchemo[{extra}]'"
    with pytest.raises(ConfigError, match="no_such_engine is not installed"):
        needed("no_such_engine.core", extra="x")


def test_every_engine_has_a_builder_and_options():
    for name in ENGINES:
        assert callable(ENGINES[name].build)
        assert ENGINES.options_of(name)
        assert ENGINES[name].every > 0


def test_options_reach_slurm_in_the_words_of_submitit():
    asked = SlurmOptions(partition="gpu", gpus_per_node=1, sbatch=("reservation=emo",))
    assert asked.parameters() == {
        **{"timeout_min": 240, "mem_gb": None, "cpus_per_task": 1, "gpus_per_node": 1},
        **{"slurm_partition": "gpu", "slurm_signal_delay_s": 90},
        "slurm_additional_parameters": {"reservation": "emo"},
    }


def test_sbatch_gets_what_was_asked_for(tmp_path, monkeypatch):
    """A pretend sbatch keeps the script that it is given."""
    pytest.importorskip("submitit", reason="extra slurm")
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, does in {"srun": "true", "sbatch": f"cp $1 {tmp_path}/job.sh; echo job 17"}.items():
        (bin_ / name).write_text(f"#!/bin/sh\n{does}\n")
        (bin_ / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    options = ("partition=gpu", "gpus_per_node=1", "timeout_min=30", 'sbatch=["reservation=emo"]')
    study = StudyRun(tiny_study(), tmp_path, workers=1)
    study.open_data()
    job = study._grid_jobs(CELLS[0])[0]
    with open_engine("slurm", options, tmp_path) as engine:
        crew = Crew(engine, most=2, folder=tmp_path)
        engine.every = 0.0
        ended = crew.do([job], should_stop=lambda: (tmp_path / "job.sh").exists())
    assert ended == []
    script = (tmp_path / "job.sh").read_text()
    for line in (
        "partition=gpu",
        "gpus-per-node=1",
        "time=30",
        "reservation=emo",
        "signal=USR2@90",
    ):
        assert f"#SBATCH --{line}\n" in script


ALONE = {"threads_per_worker": 1, "dashboard_address": ":0"}
"""A cluster beside others."""


ONE_RATE = tuple(replace(cell, grid=TINY.grid[:1]) for cell in CELLS)
"""A process for every run takes seconds to start."""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    study = StudyRun(tiny_study(cells=ONE_RATE), tmp_path_factory.mktemp("here"), workers=1)
    return scores(study, study.run())


@pytest.fixture(scope="module")
def cluster():
    """Two workers of dask; dask itself tries no job again that one of them loses."""
    distributed = pytest.importorskip("distributed", reason="extra dask")
    with distributed.LocalCluster(2, **ALONE) as made:
        made.scheduler.allowed_failures = 0
        yield made


def on_dask(cluster, folder):
    address = cluster.scheduler_address.removeprefix("tcp://")
    return open_engine(f"dask://{address}", (), folder)


def on_engine(engine, out):
    notes = []
    watch = Watch(on_note=notes.append)
    engine.every = 0.1
    study = StudyRun(tiny_study(cells=ONE_RATE), out, workers=2, engine=engine, watch=watch)
    found = scores(study, study.run())
    assert not study.failures
    return found, notes


@pytest.mark.study
def test_a_study_through_submitit_has_the_same_scores(tmp_path, here):
    pytest.importorskip("submitit", reason="extra slurm")
    with open_engine("submitit-local", (), tmp_path / "there") as engine:
        assert on_engine(engine, tmp_path / "there") == (here, [])


@pytest.mark.study
def test_a_study_through_dask_has_the_same_scores(tmp_path, cluster, here):
    with on_dask(cluster, tmp_path / "there") as engine:
        assert on_engine(engine, tmp_path / "there") == (here, [])


def long_jobs(tmp_path, steps):
    study = tiny_study(
        cells=CELLS[:1], contrasts=(), options=(f"train.steps={steps}", "train.validate_every=20")
    )
    run = StudyRun(study, tmp_path, workers=1)
    run.open_data()
    return run._grid_jobs(CELLS[0])


def steps_of(job):
    return [e["step"] for e in read(job.root / "events.jsonl") if e["event"] == "step"]


def do_and_hit(engine, jobs, folder, hit):
    """Do jobs; hit the worker of the first when it has saved something."""
    victim, struck, said = jobs[0], [], []

    def on_step(run, step):
        if run == victim.run and not struck and list(victim.root.glob("checkpoints/step-*")):
            (beat,) = (folder / "jobs").glob(f"{run}-*")
            struck.append(read_note(beat).pid)
            hit(struck[0])

    crew = Crew(engine, most=2, folder=folder)
    engine.every = 0.1
    ended = crew.do(jobs, on_step=on_step, on_note=said.append)
    assert struck
    assert {end.how for end in ended} == {"done"}
    assert len(said) == 1
    assert f"run {victim.run} was lost" in said[0]
    assert steps_of(victim) == list(range(1, len(steps_of(victim)) + 1))
    return said[0]


@pytest.mark.faults
def test_a_job_whose_time_on_the_cluster_ends_is_saved_and_sent_again(tmp_path):
    pytest.importorskip("submitit", reason="extra slurm")
    jobs = [long_jobs(tmp_path, 500)[0]]
    with open_engine("submitit-local", (), tmp_path) as engine:
        said = do_and_hit(engine, jobs, tmp_path, lambda pid: os.kill(pid, signal.SIGUSR2))
    assert "told to stop" in said
    assert isinstance(engine, SubmititLocal)


@pytest.mark.faults
def test_a_worker_of_dask_that_is_killed_costs_its_own_job_alone(tmp_path, cluster):
    jobs = [long_jobs(tmp_path / "a", 500)[0], long_jobs(tmp_path / "b", 3)[1]]
    with on_dask(cluster, tmp_path) as engine:
        said = do_and_hit(engine, jobs, tmp_path, lambda pid: os.kill(pid, signal.SIGKILL))
    assert "KilledWorker" in said


@pytest.mark.faults
def test_a_cluster_that_goes_away_ends_the_study_with_a_sentence(tmp_path):
    distributed = pytest.importorskip("distributed", reason="extra dask")
    jobs = [long_jobs(tmp_path, 5000)[0]]
    cluster = distributed.LocalCluster(1, **ALONE)
    with on_dask(cluster, tmp_path) as engine:
        engine.every = 0.1
        closed = []

        def on_step(run, step):
            if not closed:
                closed.append(step)
                cluster.close()

        with pytest.raises(ResourceError, match="the engine takes no jobs") as caught:
            Crew(engine, most=2, folder=tmp_path).do(jobs, on_step=on_step)
    assert closed
    assert "the same command resumes" in caught.value.hint


def test_the_recipe_for_ray_works_with_the_calls_that_it_makes(tmp_path, monkeypatch):
    """A pretend ray, which does at once what it is asked for; the real one is not a dependency."""
    ray = SimpleNamespace(
        **{"init": lambda address: None, "shutdown": lambda: None, "cancel": lambda work: None},
        remote=lambda **given: lambda function: SimpleNamespace(remote=function),
        wait=lambda references, timeout: (references, []),
        get=lambda reference: reference,
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(engine_module, "keep_memory", lambda: False)
    page = (Path(__file__).parents[3] / "docs" / "clusters.md").read_text()
    (recipe,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    made = {"__name__": "recipe"}
    exec(compile(recipe, "docs/clusters.md", "exec"), made)
    study = StudyRun(tiny_study(), tmp_path, workers=1)
    study.open_data()
    job = study._grid_jobs(CELLS[0])[0]
    with made["Ray"].build("head:10001", made["Options"](), tmp_path) as engine:
        engine.every = 0.0
        (ended,) = Crew(engine, most=2, folder=tmp_path).do([job])
    assert ended.how == "done"
