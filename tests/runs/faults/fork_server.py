"""Processes to be killed: torch is imported once, and every victim is a fork that starts in milliseconds.

Run as a program: ``fork_server.py SCENARIO FOLDER COUNT SEED``; prints what was observed as JSON.
"""

import gc
import json
import os
import random
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch

from torchemo.core.errors import ResourceError, TorchemoError
from torchemo.runs.events import EventLog, JsonLines, read, truncate_after
from torchemo.runs.folder import lock
from torchemo.runs.signals import GracefulStop
from torchemo.runs.storage.checkpoint import folder_of, load, publish, published, step_of, verify
from torchemo.runs.storage.history import latest, prune, rewind, sweep


def state(step):
    return {"state": {"w": torch.full((64,), float(step))}, "memory": {"n": torch.tensor(step)}}


def check_state(path):
    """Say what is wrong with a published folder, if anything."""
    try:
        found = load(path)
    except TorchemoError as error:
        return error.message
    right = state(step_of(path))
    same = all(
        torch.equal(found.groups[group][name], tensor)
        for group, tensors in right.items()
        for name, tensor in tensors.items()
    )
    return None if same else f"{path.name} holds another state"


def victim(run, say, stop=None, steps=None):
    """Train: resume, then save, log and prune at every step until somebody ends it."""
    with lock(run):
        sweep(run)
        found = latest(run)
        step = 0 if found.path is None else load(found.path).info["step"]
        rewind(run, step)
        truncate_after(run / "events.jsonl", step)
        with EventLog(JsonLines(run / "events.jsonl")) as log:
            say({"ready": step})
            while not (stop and stop.requested) and steps != 0:
                step += 1
                log.emit("train", step)
                log.flush()
                publish(run, step, groups=state(step), info={"step": step})
                say({"saved": step})
                prune(run, keep_last=2)
                steps = steps and steps - 1
    return step


class Victim:
    """A forked process and what it said."""

    def __init__(self, work):
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reader)
            self._live(work, writer)
        os.close(writer)
        self.said = []

    @staticmethod
    def _live(work, writer):
        def say(message):
            os.write(writer, json.dumps(message).encode() + b"\n")

        # A Ctrl-C outside of any block that handles it ends a victim, and never the server's copy in it.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        code = 70
        try:
            code = work(say) or 0
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            say({"error": traceback.format_exc()})
        finally:
            os._exit(code)

    def wait_ready(self):
        buffer = b""
        while not buffer.endswith(b"\n"):
            piece = os.read(self._reader, 1)
            if not piece:
                break
            buffer += piece
        self.said += [json.loads(buffer)] if buffer else []

    def end(self, number=None):
        """Send a signal, wait, and return how it ended; a negative number is a signal."""
        if number is not None:
            os.kill(self.pid, number)
        with open(self._reader, "rb") as pipe:  # read first: a full pipe would block the victim
            self.said += [json.loads(line) for line in pipe.read().splitlines()]
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def heard(self, kind):
        return [message[kind] for message in self.said if kind in message]


def typical_times(run):
    """Measure how long a process takes to start, and to do its first step: medians of seven."""
    starts, steps = [], []
    for _ in range(7):
        began = time.perf_counter()
        process = Victim(lambda say: victim(run, say, steps=1) and 0)
        process.wait_ready()
        ready = time.perf_counter()
        process.end()
        starts.append(ready - began)
        steps.append(time.perf_counter() - ready)
    return statistics.median(starts), statistics.median(steps)


def kill(folder, count, rng):
    """Kill -9 at random times: while a process starts and resumes, or within its next two saves."""
    run = folder / "run"
    start, save = typical_times(run)
    seen = {
        "kills": 0,
        "lost": [],
        "torn": [],
        "errors": [],
        "in_save": 0,
        "in_prune": 0,
        "saved": 0,
    }
    newest = step_of(latest(run).path)
    for number in range(count):
        process = Victim(lambda say: victim(run, say))
        if number % 3:
            process.wait_ready()
        time.sleep(rng.uniform(0, 2 * save if number % 3 else start))
        seen["kills"] += process.end(signal.SIGKILL) == -signal.SIGKILL
        seen["errors"] += process.heard("error")
        saved = process.heard("saved")
        newest = max([newest, *saved])
        seen["saved"] += len(saved)
        names = os.listdir(folder_of(run))
        seen["in_save"] += any(name.startswith(".tmp-step-") for name in names)
        seen["in_prune"] += any(name.startswith(".tmp-trash-") for name in names)
        seen["torn"] += [wrong for path in published(run) if (wrong := check_state(path))]
        found = latest(run).path
        if found is None or step_of(found) < newest:
            seen["lost"].append((newest, str(found)))
    last = Victim(lambda say: victim(run, say, steps=3) and 0)
    seen["last_exit"] = last.end()
    seen["errors"] += last.heard("error")
    seen["left_over"] = [n for n in os.listdir(folder_of(run)) if not n.startswith("step-")]
    steps = [event["step"] for event in read(run / "events.jsonl")]
    seen["log_is_whole"] = steps == list(range(1, step_of(latest(run).path) + 1))
    return seen


def stop(folder, count, rng):
    """SIGTERM, SIGINT or two SIGINTs at random times: saved, with the right exit code, in time."""
    run = folder / "run"

    def work(say):
        with GracefulStop() as asked:
            say({"step": victim(run, say, stop=asked)})
        return asked.exit_code

    seen = {"wrong": [], "slowest": 0.0, "errors": [], "ends": []}
    for i in range(count):
        kind = (signal.SIGTERM, signal.SIGINT, None)[i % 3]
        process = Victim(work)
        process.wait_ready()
        time.sleep(rng.uniform(0, 0.05))
        began = time.perf_counter()
        if kind is None:  # a second Ctrl-C may come at any time after the first
            os.kill(process.pid, signal.SIGINT)
            time.sleep(rng.uniform(0, 0.02))
        code = process.end(kind or signal.SIGINT)
        seen["slowest"] = max(seen["slowest"], time.perf_counter() - began)
        seen["errors"] += process.heard("error")
        seen["ends"].append(code)
        step = step_of(latest(run).path) if published(run) else 0
        stopped = process.heard("step")
        expected = 143 if kind == signal.SIGTERM else 130
        if code != expected or (kind and stopped != [step]):
            seen["wrong"].append((str(kind), code, stopped, step))
        seen["wrong"] += [wrong for path in published(run) if (wrong := check_state(path))]
    return seen


def race(folder, count, rng):
    """Four processes want one lock; whoever has it plants a flag that must not be there yet."""
    flag = folder / "flag"

    def work(say):
        own = random.Random(os.getpid())
        held = 0
        while held < count:
            try:
                with lock(folder):
                    os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
                    time.sleep(own.uniform(0, 0.001))
                    os.unlink(flag)
                    held += 1
            except ResourceError as error:
                say({"refused": error.message})
            time.sleep(own.uniform(0, 0.001))
        say({"held": held})

    processes = [Victim(work) for _ in range(4)]
    codes = [process.end() for process in processes]
    refused = [text for process in processes for text in process.heard("refused")]
    return {
        "codes": codes,
        "errors": [text for process in processes for text in process.heard("error")],
        "held": [held for process in processes for held in process.heard("held")],
        "refused": len(refused),
        "names_who": sum("process " in text for text in refused),
    }


def disk_full(folder, count, rng):
    """Save states of growing size on a small disk until it is full."""
    seen = {"saved": 0, "refused": None}
    for step in range(1, count + 1):
        weights = {"w": torch.full((step * 10_000,), float(step))}
        try:
            publish(folder, step, groups={"state": weights})
        except ResourceError as error:
            seen["refused"] = [error.exit_code, str(error)]
            break
        seen["saved"] = step
    found = latest(folder)
    verify(found.path)
    seen |= {"latest": step_of(found.path), "skipped": len(found.skipped)}
    seen["names"] = sorted(os.listdir(folder_of(folder)))
    prune(folder, keep_last=1)
    publish(folder, 1000, groups={"state": {"w": torch.zeros(3)}})
    seen["resumed"] = step_of(latest(folder).path)
    return seen


SCENARIOS = {"kill": kill, "stop": stop, "race": race, "disk_full": disk_full}


if __name__ == "__main__":
    scenario, place, number, seed = sys.argv[1:]
    torch.set_num_threads(1)
    gc.disable()  # victims that collect garbage would copy the server's memory page by page
    print(json.dumps(SCENARIOS[scenario](Path(place), int(number), random.Random(int(seed)))))
