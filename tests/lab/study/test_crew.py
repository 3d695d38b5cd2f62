"""Jobs on engines that lose, delay and repeat them."""

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.lab.study.conftest import tiny_study
from torchemo.core.errors import ResourceError
from torchemo.lab.study.engines import crew as crew_module
from torchemo.lab.study.engines import engine as engine_module
from torchemo.lab.study.engines.crew import STOP, Crew, Here
from torchemo.lab.study.engines.engine import Errand, Executing, StopFiles, run_job, sent_by_us
from torchemo.lab.study.job import Ended, Job
from torchemo.lab.study.run import StudyRun, Watch
from torchemo.runs.folder import lock
from torchemo.runs.storage import heartbeat


class Answer:
    """A job on the fake engine: done after some looks, with a result or an error."""

    def __init__(self, found, looks=0):
        self.found, self.looks, self.cancelled = found, looks, False

    def done(self):
        self.looks -= 1
        return self.looks < 0

    def result(self):
        if isinstance(self.found, BaseException):
            raise self.found
        return self.found

    def cancel(self):
        self.cancelled = True


class Fake:
    """Answers by a script: run -> what happens to its first, second, ... errand."""

    every = 0.0

    def __init__(self, script=None):
        self.script, self.sent, self.answers = script or {}, [], []

    def submit(self, errand):
        told = self.script.get(errand.job.run, [])
        turn = sum(one.job.run == errand.job.run for one in self.sent)
        self.sent.append(errand)
        found = told[turn] if turn < len(told) else Ended(errand.job.run, "done")
        if callable(found):
            found = found(errand)
        self.answers.append(found if isinstance(found, Answer) else Answer(found))
        return self.answers[-1]


def job(tmp_path, name="a"):
    return Job(name, tmp_path / "runs" / name, "", steps=9)


def do(tmp_path, engine, names="abc", most=2, **how):
    """Do jobs of these names; return how they ended and what was said."""
    said = []
    ended = Crew(engine, most=most, folder=tmp_path).do(
        [job(tmp_path, name) for name in names], on_note=said.append, **how
    )
    return {end.run: end for end in ended}, said


def log_step(errand, step, *, torn=False):
    """What a worker would have logged; a torn line is being written."""
    errand.job.root.mkdir(parents=True, exist_ok=True)
    with (errand.job.root / "events.jsonl").open("a") as file:
        line = json.dumps({"event": "step", "step": step})
        file.write(line[:9] if torn else f"\n{line}\n")


def test_a_lost_worker_costs_its_own_job_alone_which_is_done_again(tmp_path):
    engine = Fake({"b": [ConnectionError("worker 3 has gone\n")]})
    ended, said = do(tmp_path, engine)
    assert {run: end.how for run, end in ended.items()} == dict.fromkeys("abc", "done")
    assert said == [
        "run b was lost: ConnectionError: worker 3 has gone; another worker continues it"
    ]
    assert sorted(errand.job.run for errand in engine.sent) == ["a", "b", "b", "c"]


def test_a_job_that_ends_all_its_workers_is_given_up(tmp_path):
    ended, said = do(tmp_path, Fake({"b": [RuntimeError("out of memory")] * 9}))
    assert ended["b"].how == "failed"
    assert ended["b"].why == "RuntimeError: out of memory, 3 times without a step in between"
    assert len(said) == 2
    assert ended["a"].how == ended["c"].how == "done"


def test_a_job_that_gets_on_between_its_losses_is_never_given_up(tmp_path):
    def lost_after(step):
        def answer(errand):
            log_step(errand, step)
            return Answer(TimeoutError(), looks=1)

        return answer

    engine = Fake({"a": [lost_after(step) for step in range(1, 8)]})
    ended, said = do(tmp_path, engine, "a")
    assert ended["a"].how == "done"
    assert len(said) == 7


def test_a_worker_that_falls_silent_is_noticed_by_its_heartbeat(tmp_path, monkeypatch):
    def silent(errand):
        errand.beat.parent.mkdir(parents=True, exist_ok=True)
        note = {"pid": 7, "host": "node-3", "since": "noon", "token": "t"}
        errand.beat.write_text(json.dumps(note))
        os.utime(errand.beat, (0, 0))
        return Answer(None, looks=10**9)

    engine = Fake({"a": [silent]})
    ended, said = do(tmp_path, engine, "ab")
    assert ended["a"].how == ended["b"].how == "done"
    assert engine.answers[0].cancelled
    assert "process 7 on node-3 since noon has given no heartbeat for" in said[0]


def test_a_job_that_waits_in_a_queue_is_not_taken_for_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "STALE", 0.0)
    engine = Fake({"a": [Answer(Ended("a", "done"), looks=200)]})
    ended, said = do(tmp_path, engine, "ab")
    assert ended["a"].how == "done"
    assert not said


def test_a_worker_that_is_told_to_stop_by_somebody_else_is_succeeded(tmp_path):
    ended, said = do(tmp_path, Fake({"a": [Ended("a", "stopped")]}), "a")
    assert ended["a"].how == "done"
    assert "its worker was told to stop" in said[0]


def test_a_run_that_another_process_writes_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(crew_module, "AGAIN", 0.01)
    engine = Fake({"a": [Ended("a", "busy", "a is being written by process 7.")] * 5})
    ended, said = do(tmp_path, engine, "ab")
    assert ended["a"].how == "done"
    assert said == ["run a waits: a is being written by process 7."] * 5


def test_no_more_jobs_than_asked_for_are_on_the_engine(tmp_path):
    running = []

    def count(errand):
        answer = Answer(Ended(errand.job.run, "done"), looks=3)
        engine.answers.append(answer)
        running.append(sum(one.looks >= 0 for one in engine.answers))
        engine.answers.pop()
        return answer

    engine = Fake({name: [count] for name in "abcdefg"})
    assert len(do(tmp_path, engine, "abcdefg", most=3)[0]) == 7
    assert max(running) == 3


def test_a_wish_to_stop_reaches_workers_as_a_file_and_calls_off_what_has_not_begun(tmp_path):
    def begun(errand):
        errand.beat.parent.mkdir(parents=True, exist_ok=True)
        errand.beat.write_text("{}")

        class Working(Answer):
            def done(self):
                return StopFiles(errand.stops).asked()

        return Working(Ended(errand.job.run, "stopped"))

    engine = Fake({"a": [begun], "b": [Answer(None, looks=10**9)]})
    ended, said = do(tmp_path, engine, "abc", should_stop=lambda: bool(engine.sent))
    assert {run: end.how for run, end in ended.items()} == {"a": "stopped"}
    assert engine.answers[1].cancelled
    assert [errand.job.run for errand in engine.sent] == ["a", "b"]
    assert not said


def test_steps_are_read_from_the_logs_of_runs(tmp_path):
    def works(errand):
        class Working(Answer):
            def done(self):
                self.looks += 1
                log_step(errand, min(self.looks, 3), torn=self.looks == 2)
                return self.looks > 4

        return Working(Ended("a", "done"))

    steps = []
    do(tmp_path, Fake({"a": [works]}), "a", on_step=lambda run, step: steps.append((run, step)))
    assert steps == [("a", 1), ("a", 3)]


def test_an_engine_that_takes_no_jobs_ends_the_command_with_a_sentence(tmp_path):
    class Broken(Fake):
        def submit(self, errand):
            raise RuntimeError("sbatch: error: invalid partition specified: gpuu")

    with pytest.raises(ResourceError, match=r"takes no jobs: RuntimeError: .*invalid partition"):
        do(tmp_path, Broken())


def test_a_worker_without_torchemo_fails_its_job_at_once(tmp_path):
    engine = Fake({"a": [ModuleNotFoundError("No module named 'torchemo'")]})
    ended, _ = do(tmp_path, engine, "a")
    assert ended["a"].how == "failed"
    assert ended["a"].why == "its worker has ModuleNotFoundError: No module named 'torchemo'"


def test_a_worker_with_another_version_refuses(tmp_path):
    errand = Errand(job(tmp_path), (), tmp_path / "beat", {**sent_by_us(), "torchemo": "9.9"})
    ended = run_job(errand)
    assert ended.how == "failed"
    assert "its worker has torchemo " in ended.why
    assert "instead of 9.9; install the same there" in ended.why
    assert not list(tmp_path.iterdir())


class Unreliable:
    """Threads that lose the first errand of each run, do the second twice at once, and answer late."""

    every = 0.01

    def __init__(self):
        self.threads, self.seen = ThreadPoolExecutor(4), []

    def submit(self, errand):
        self.seen.append(errand.job.run)
        if self.seen.count(errand.job.run) == 1:
            return Answer(ConnectionError("lost"), looks=2)
        both = [self.threads.submit(run_job, errand) for _ in range(2)]
        return Late(both[len(self.seen) % 2], both)


class Late:
    def __init__(self, chosen, both):
        self.chosen, self.both, self.looks = chosen, both, 3

    def done(self):
        if all(one.done() for one in self.both):
            self.looks -= 1
        return self.looks < 0

    def result(self):
        return self.chosen.result()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(crew_module, "AGAIN", 0.01)
    monkeypatch.setattr(engine_module, "keep_memory", lambda: False)


def test_a_study_on_an_engine_that_loses_repeats_and_delays_has_the_same_scores(tmp_path, quick):
    here = StudyRun(tiny_study(), tmp_path / "here", workers=1)
    there = StudyRun(tiny_study(), tmp_path / "there", workers=2, engine=Unreliable())
    assert scores(here, here.run()) == scores(there, there.run())
    assert not there.failures
    there.engine.threads.shutdown()


def scores(study, result):
    """All that a study found, bit for bit, without the time it took."""
    cells = [{name: cell[name] for name in ("rates", "tried", "tests")} for cell in result["cells"]]
    return (study.folder / "scores.npz").read_bytes(), cells, result["contrasts"]


def test_any_executor_is_an_engine_and_progress_is_told(tmp_path, quick):
    closed, steps = [], {}
    watch = Watch(on_step=lambda run, step: steps.__setitem__(run, step))
    with ThreadPoolExecutor(1) as threads:
        executing = Executing(threads, close=lambda: closed.append(1), every=0.01)
        with executing as engine:
            study = StudyRun(tiny_study(), tmp_path, workers=2, engine=engine, watch=watch)
            assert study.run() is not None
    assert closed == [1]
    assert set(steps.values()) == {3}
    assert not list((tmp_path / "jobs").iterdir())


def test_a_file_called_stop_ends_a_study_wherever_it_runs(tmp_path):
    (tmp_path / STOP).touch()
    assert StudyRun(tiny_study(), tmp_path, workers=1).run() is None
    assert not (tmp_path / "runs").exists()


def test_in_this_process_a_run_that_is_written_elsewhere_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(crew_module, "AGAIN", 0.1)
    study = StudyRun(tiny_study(), tmp_path, workers=1)
    study.open_data()
    first, second = study._grid_jobs(study.study.available[0])[:2]
    said, order = [], []
    held, told = threading.Event(), threading.Event()

    def write():
        with lock(first.root):
            held.set()
            told.wait(60)

    writer = threading.Thread(target=write)
    writer.start()
    held.wait(60)

    def note(text):
        said.append(text)
        told.set()
        writer.join()

    ended = Here().do([first, second], on_note=note, on_end=lambda end: order.append(end.run))
    assert [end.how for end in ended] == ["done", "done"]
    assert sorted(order) == sorted([first.run, second.run])
    assert len(said) == 1
    assert "is being written by process" in said[0]


def test_stop_files_are_looked_for_now_and_then(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stops = StopFiles((tmp_path / "new" / "mine", tmp_path / "all"))
    assert not stops.asked()
    (tmp_path / "all").touch()
    assert not stops.asked()  # it looked just now
    now[0] += 2
    assert stops.asked()
    StopFiles(stops.paths).ask()
    assert (tmp_path / "new" / "mine").exists()


def test_an_errand_is_the_same_after_a_journey(tmp_path):
    import pickle

    errand = Errand(replace(job(tmp_path), diagnosed=3), (tmp_path / "s",), tmp_path / "b", {})
    assert pickle.loads(pickle.dumps(errand)) == errand
