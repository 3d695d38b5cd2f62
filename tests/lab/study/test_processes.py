"""Studies in processes: a worker that is killed, a study that is asked to stop."""

import json
import os
import signal
import time

import pytest

from tests.lab.study.conftest import CELLS, tiny_study
from torchemo.lab.study.engines.crew import Crew
from torchemo.lab.study.engines.local import Local
from torchemo.lab.study.run import StudyRun
from torchemo.runs.events import read
from torchemo.runs.storage.heartbeat import read_note

pytestmark = pytest.mark.faults


def jobs_of(tmp_path, steps):
    study = tiny_study(
        cells=CELLS[:1],
        contrasts=(),
        options=(f"train.steps={steps}", "train.validate_every=20"),
    )
    run = StudyRun(study, tmp_path, workers=1)
    run.open_data()
    return run._grid_jobs(CELLS[0])


def do(jobs, folder, **how):
    with Local() as engine:
        return {e.run: e for e in Crew(engine, most=2, folder=folder).do(jobs, **how)}


def worker_of(job, folder):
    """Return the process that does a job, as its heartbeat says."""
    (beat,) = (folder / "jobs").glob(f"{job.run}-*")
    return read_note(beat).pid


def test_a_worker_that_is_killed_costs_its_own_job_alone_and_another_continues_it(tmp_path):
    victim, other = jobs_of(tmp_path / "a", 250)[0], jobs_of(tmp_path / "b", 3)[1]
    killed, said = [], []

    def kill(run, step):
        if run == victim.run and not killed and list(victim.root.glob("checkpoints/step-*")):
            killed.append(worker_of(victim, tmp_path))
            os.kill(killed[0], signal.SIGKILL)

    ended = do([victim, other], tmp_path, on_step=kill, on_note=said.append)
    assert killed
    assert {end.how for end in ended.values()} == {"done"}
    assert said == [f"run {victim.run} was lost: its process died; another worker continues it"]
    steps = [e["step"] for e in read(victim.root / "events.jsonl") if e["event"] == "step"]
    assert steps == list(range(1, 251))
    assert not list((tmp_path / "jobs").iterdir())


@pytest.mark.parametrize(("number", "jobs"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_study_that_is_signalled_saves_says_so_and_goes_on(warm, tmp_path, number, jobs):
    words = (
        *("study", "run", "F4", "--scale", "smoke", "--tasks", "regression", "--seeds", "0"),
        *("--cells", "maml", "--out", str(tmp_path), "--json"),
        *("--jobs", str(jobs)),
        *("--options", "train.steps=100", "train.validate_every=20"),
    )
    begun = warm.start(*words)
    deadline = time.monotonic() + 400
    while not list(tmp_path.glob("runs/*/checkpoints/step-*")):
        assert time.monotonic() < deadline
        assert begun.poll() is None, begun.wait()
        time.sleep(0.05)
    os.kill(begun.pid, number)
    ended = begun.wait()
    assert ended.returncode == 128 + number, ended.stderr
    assert "resume with the same command" in ended.stderr
    assert not list(tmp_path.glob("F4-*"))
    again = warm.run(*words)
    assert again.returncode == 0, again.stderr
    (cell,) = json.loads(again.stdout)[0]["cells"]
    assert cell["tests"]["mixed"]["tasks"] == 12
