"""The standing adversary: random hostile cases, each with a seed that repeats it.

A case is a function of a seed. It runs in a worker process with a limit on its memory. It must end in
success, in an error of torchemo with its exit code, or in a saved run, within its time. Anything else is a
failure: another exception, a hang, a death, too much memory, a byte on the terminal that commands it, a file
outside the folder of the case, an answer that changed without a word.
"""

import json
import multiprocessing
import os
import random
import resource
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

SECONDS, WAITING = 60, 600
"""A case that takes more seconds of the processor is too slow, and one that lasts longer hangs.

Other work may slow the machine down, so that the second bound is wide.
"""
MEMORY = 1 << 30
"""Bytes that a case may add to the peak of its worker."""
SPACE = 8 << 30
"""Address space of a worker."""
CODES = {0, 2, 3, 4, 5, 6, 7, 130, 143}
"""Exit codes that mean something; 1 is an internal error."""


QUICK = "/dev/shm"
"""A disk in memory, where there is one: what a kill leaves behind is the same, and no sync takes time."""


def quick_disk() -> str | None:
    """Return where the folders of cases go; None for the usual place."""
    return QUICK if os.path.isdir(QUICK) and os.access(QUICK, os.W_OK) else None


class Failed(AssertionError):
    """What a case found wrong."""


class Case(NamedTuple):
    """What a kind gets: random numbers of its own, an empty folder, and the sound runs."""

    rng: random.Random
    place: Path
    world: Path


class Result(NamedTuple):
    """How a case ended: ``ok``, ``refused`` or what went wrong; and its seconds and bytes."""

    kind: str
    seed: int
    verdict: str
    seconds: float
    grown: int


Kind = Callable[[Case], str]
KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    """Register a generator of cases under its name."""
    KINDS[function.__name__] = function
    return function


def command(*words: object, codes: set[int] = CODES) -> tuple[int, str]:
    """Run a command in this process; return its exit code and all it printed."""
    from torchemo.apps.cli import main

    out = StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(out):
            main([str(word) for word in words])
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 2
    shown = out.getvalue()
    # tyro draws frames round its own errors; they are made of what the user typed.
    bad = [c for c in shown if not c.isprintable() and c != "\n"]
    check(not bad or code == 2, f"{words[:2]} put {bad[:5]!r} on the terminal")
    check("Traceback" not in shown, f"{words[:2]} showed a traceback: {shown[-300:]}")
    check(code in codes, f"{words[:2]} left with {code}: {shown[-300:]}")
    return code, shown


def check(fine: bool, otherwise: str) -> None:
    """Fail the case unless something holds."""
    if not fine:
        raise Failed(otherwise)


def verdict_of(name: str, seed: int, world: Path) -> Result:
    """Run one case in this process."""
    place = Path(tempfile.mkdtemp(prefix="attack-", dir=quick_disk()))
    began, before = time.monotonic(), _peak()
    try:
        verdict = KINDS[name](Case(random.Random(f"{name}/{seed}"), place, world))
    except Failed as error:
        verdict = f"FAILED {error}"
    except BaseException as error:  # a case may raise anything: that is what is looked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        verdict = (
            f"FAILED {type(error).__name__}: {error!s:.200} ({Path(where.filename).name}"
            f":{where.lineno})"
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    grown = _peak() - before
    if not verdict.startswith("FAILED") and grown > MEMORY:
        verdict = f"FAILED took {grown >> 20} MB"
    return Result(name, seed, verdict, time.monotonic() - began, grown)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _spent(process: int) -> float:
    """Return the seconds of the processor that a process has used."""
    try:
        used = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


def _work(line, world: Path) -> None:
    import warnings

    import torch

    from tests.attack import kinds_data, kinds_files, kinds_runs  # noqa: F401 -- they register themselves

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE))
    verdict_of("events", 0, world)  # what commands need is imported before any time is taken
    line.send(None)
    while (asked := line.recv()) is not None:
        line.send(verdict_of(*asked, world))


class Worker:
    """A process that runs cases one by one; one that hangs or dies is replaced."""

    def __init__(self, world: Path) -> None:
        self.world = world
        self.line = self.process = None

    def run(self, name: str, seed: int) -> Result:
        """Run a case there."""
        self._open()
        began, start = time.monotonic(), _spent(self.process.pid)
        try:
            self.line.send((name, seed))
            while not self.line.poll(1):
                if time.monotonic() - began > WAITING or _spent(self.process.pid) > SECONDS + start:
                    break
            else:
                return self.line.recv()
            verdict = f"FAILED no end within {round(time.monotonic() - began)} seconds"
        except (EOFError, OSError):
            self.process.join()
            verdict = f"FAILED the process died ({self.process.exitcode})"
        self.close()
        return Result(name, seed, verdict, time.monotonic() - began, 0)

    def _open(self) -> None:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.line, there = context.Pipe()
            self.process = context.Process(target=_work, args=(there, self.world), daemon=False)
            self.process.start()
            there.close()
            self.line.recv()

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.line.close()
            self.process.kill()
            self.process.join()
        self.line = self.process = None


def say_at_once(text: str) -> None:
    """Print a failure where nobody waits for the end."""
    print(text, flush=True)


def attack(
    names: list[str],
    *,
    seconds: float,
    seed: int,
    tell=say_at_once,
    most: int | None = None,
) -> dict:
    """Run cases of these kinds in turn until the time is over; return what was found, ready for JSON."""
    from tests.attack.world import make_world

    with tempfile.TemporaryDirectory(prefix="attack-world-", dir=quick_disk()) as folder:
        world = make_world(Path(folder))
        end, results, worker = time.monotonic() + seconds, [], Worker(world)
        try:
            # Every kind gets the same time, so that quick kinds have many cases.
            spent, done = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
            while time.monotonic() < end and (most is None or min(done.values()) < most):
                name = min(spent, key=spent.__getitem__)
                result = worker.run(name, seed + done[name])
                results.append(result)
                done[name] += 1
                spent[name] += result.seconds if most is None else 1
                if result.verdict.startswith("FAILED"):
                    tell(f"{result.kind} {result.seed}: {result.verdict}")
                    tell(
                        f"repeat with: python -m tests.attack --kind {result.kind}"
                        f" --seed {result.seed} --cases 1"
                    )
        except KeyboardInterrupt:  # what was found until then counts
            seconds += time.monotonic() - end
        finally:
            worker.close()
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        **summary(results, seconds=round(seconds), seed=seed),
        "processor_seconds": round(spent.ru_utime + spent.ru_stime),
    }


def summary(results: list[Result], *, seconds: float, seed: int) -> dict:
    """Count cases by kind and verdict."""
    kinds = {}
    for name in sorted({result.kind for result in results}):
        own = [result for result in results if result.kind == name]
        ends = Counter("failed" if r.verdict.startswith("FAILED") else r.verdict for r in own)
        kinds[name] = {
            "cases": len(own),
            "ends": dict(sorted(ends.items())),
            "slowest_seconds": round(max(result.seconds for result in own), 2),
            "most_megabytes": max(result.grown for result in own) >> 20,
        }
    failures = [r._asdict() for r in results if r.verdict.startswith("FAILED")]
    return {
        "seconds": seconds,
        "seed": seed,
        "cases": len(results),
        "kinds": kinds,
        "failures": failures,
    }


def save(found: dict, out: Path) -> None:
    """Write what was found."""
    out.write_text(json.dumps(found, indent=1) + "\n")
