"""Kill writers of a store again and again, and see that nothing is lost and nothing comes back.

Run as a program: ``visits_victim.py STORE KILLS SECONDS``; prints what was observed as JSON. Victims are
forks that keep and forget visits as fast as they can, and say what is done.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from torchemo.memory.lifelong.visits import Sight
from torchemo.runs.visits import files
from torchemo.runs.visits.index import KINDS, Index, Settings
from torchemo.runs.visits.store import New, reading, writing

EMPTY = Index("0" * 64, "a run", Settings())


def new(seed):
    values = {"w": torch.full((2, 3, 50), float(seed))}
    return New(
        Sight((1, 1), {"features": torch.full((2, 9), float(seed))}), values, (f"{seed}", "b")
    )


def live(path, start, say):
    with writing(path, otherwise=EMPTY) as store:
        for seed in range(start, start + 100_000):
            store.keep(new(seed), when=f"{seed:09d}")
            say(("kept", seed))
            if seed % 3 == 2:
                say(("forgetting", seed - 1))
                store.forget(classes=[f"{seed - 1}"])
                say(("forgotten", seed - 1))


def victim(path, start, seconds):
    """Fork a writer, kill it after some time, and return what it said."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            live(path, start, lambda said: os.write(writer, json.dumps(said).encode() + b"\n"))
        finally:
            os._exit(1)
    os.close(writer)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    with open(reader, "rb") as pipe:
        said = [json.loads(line) for line in pipe.read().split(b"\n")[:-1]]
    os.waitpid(pid, 0)
    return said


def look(path, must, may_be_gone):
    """Say what is wrong with a store, and how many files the killed writer left."""
    if not files.is_store(path):
        return ([] if not must else ["the store is gone"]), 0
    store = reading(path)
    there = {int(v.classes[0]) for v in store.index.visits}
    wrong = [*store.faults(), *(f"visit {one} is lost" for one in must - there - may_be_gone)]
    named = {Path(files.file_name(v.id, k)).name for v in store.index.visits for k in KINDS}
    return wrong, len(set(os.listdir(path / files.FOLDER)) - named)


def main():
    path, kills, longest = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    rng, seen = (
        random.Random(0),
        {"kills": 0, "kept": 0, "forgotten": 0, "left_over": 0, "wrong": []},
    )
    must, gone, start = set(), set(), 0
    for _ in range(kills):
        said = victim(path, start, rng.uniform(0.002, longest))
        must |= {seed for what, seed in said if what == "kept"}
        gone |= {seed for what, seed in said if what == "forgotten"}
        unsure = {seed for what, seed in said if what == "forgetting"}
        must -= gone
        wrong, left = look(path, must, unsure)
        if files.is_store(path):
            there = {int(v.classes[0]) for v in reading(path).index.visits}
            wrong += [f"visit {one} came back" for one in gone & there]
            must, start = set(there), max([start, *there, *gone]) + 1
            with writing(path) as store:  # keep the store small, and tidy it up
                store.forget(visits=[v.id for v in store.index.by_age[:-4]])
                must &= {int(v.classes[0]) for v in store.index.visits}
            if look(path, must, set())[1]:
                wrong.append("something was left over")
        seen["kills"] += 1
        seen["left_over"] += left > 0
        seen["kept"] += sum(what == "kept" for what, _ in said)
        seen["forgotten"] += sum(what == "forgotten" for what, _ in said)
        seen["wrong"] += wrong
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
