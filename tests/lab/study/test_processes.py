"""Studies in processes: a worker that is killed, a study that is asked to stop."""

import json
import os
import signal
import subprocess
import time

import pytest

from tests.apps.cli.conftest import COMMAND
from tests.lab.study.conftest import CELLS, tiny_study
from torchemo.lab.study.job import is_done
from torchemo.lab.study.pool import Crew
from torchemo.lab.study.run import StudyRun
from torchemo.runs.events import read

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


def test_a_worker_that_is_killed_fails_its_job_alone_and_the_job_goes_on_later(tmp_path):
    victim, other = jobs_of(tmp_path / "a", 400)[0], jobs_of(tmp_path / "b", 3)[1]
    killed = []
    with Crew(2) as crew:

        def kill(run, step):
            if run == victim.run and not killed and list(victim.root.glob("checkpoints/step-*")):
                worker = crew._staff[0]  # it was given the first job
                killed.append(worker.process.pid)
                os.kill(worker.process.pid, signal.SIGKILL)

        ended = {end.run: end for end in crew.do([victim, other], on_step=kill)}
    assert ended[victim.run].how == "failed"
    assert ended[victim.run].why == "its process died"
    assert ended[other.run].how == "done"
    assert not is_done(victim)
    with Crew(1) as crew:
        assert crew.do([victim])[0].how == "done"
    steps = [e["step"] for e in read(victim.root / "events.jsonl") if e["event"] == "step"]
    assert steps == list(range(1, 401))


@pytest.mark.parametrize(("number", "jobs"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_study_that_is_signalled_saves_says_so_and_goes_on(tmp_path, number, jobs):
    words = (
        *("study", "run", "F4", "--scale", "smoke", "--tasks", "regression", "--seeds", "0"),
        *("--cells", "maml", "--out", str(tmp_path), "--json"),
        *("--jobs", str(jobs)),
        *("--options", "train.steps=300", "train.validate_every=50"),
    )
    begun = subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 400
    while not list(tmp_path.glob("runs/*/checkpoints/step-*")):
        assert time.monotonic() < deadline, begun.communicate()
        assert begun.poll() is None, begun.communicate()
        time.sleep(0.05)
    begun.send_signal(number)
    _, said = begun.communicate(timeout=400)
    assert begun.returncode == 128 + number, said
    assert "resume with the same command" in said
    assert not list(tmp_path.glob("F4-*"))
    again = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    (cell,) = json.loads(again.stdout)[0]["cells"]
    assert cell["tests"]["mixed"]["tasks"] == 12
