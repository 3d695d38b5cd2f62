"""``python -m tests.attack.kills``: kill the command itself with SIGKILL, again and again, and continue.

A chain is one run: ``python -m torchemo train`` as a process of its own, killed at a random time, then
``train --resume``, killed again, and so on until the run is finished. After every kill each published
checkpoint is verified, and the newest must be at least the newest save that was reported. A finished chain
must end with the bits and the log of a run that nobody stopped.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.apps.cli.conftest import MEMORY, POINTS
from tests.attack.kinds_runs import acknowledged

HERE = Path(__file__).parent
RECORD = HERE / "kills.json"
STEPS = 240
"""Steps of a run, with a save after each."""
PROGRAM = (sys.executable, "-W", "ignore", "-m", "torchemo", "train", "--json")


def command_of(root: Path, steps: int) -> list[str]:
    """Return the command that starts a run, or continues the one that is there."""
    if (root / "config.toml").exists():
        return [*PROGRAM, "--resume", str(root)]
    start = ["--out", str(root), "--preset", "maml-emo-paper", *POINTS, *MEMORY]
    return [*PROGRAM, *start, f"train.steps={steps}", "train.validate_every=1"]


def saved_state(root: Path) -> tuple:
    """Return all that a finished run holds, without the times of day and of the processor."""
    from torchemo.runs import events
    from torchemo.runs.storage import checkpoint

    found = checkpoint.load(checkpoint.published(root)[-1])
    tensors = {
        f"{group}/{name}": (str(tensor.dtype), tuple(tensor.shape), tensor.numpy().tobytes())
        for group, part in found.groups.items()
        for name, tensor in part.items()
    }
    timeless = ("time", "cpu_seconds")
    log = [
        {name: value for name, value in event.items() if name not in timeless}
        for event in events.read(root / "events.jsonl")
    ]
    return tensors, dict(found.info), log


def torn(root: Path) -> list[str]:
    """Return what is wrong with published checkpoints; they must be whole at any time."""
    from torchemo.core.errors import CheckpointError
    from torchemo.runs.storage import checkpoint

    wrong = []
    for path in checkpoint.published(root):
        try:
            checkpoint.verify(path)
        except CheckpointError as error:
            wrong.append(error.message)
    return wrong


class Chain:
    """One run that is killed until it is finished."""

    def __init__(self, place: Path, rng: random.Random, seen: dict, *, steps: int) -> None:
        self.root, self.shown, self.rng, self.seen = place / "run", place / "shown", rng, seen
        self.steps = steps
        self.newest = 0
        self.starting = 3.0

    def session(self) -> bool:
        """Start or continue the run and kill it; return whether it was finished instead."""
        with self.shown.open("wb") as out, self.shown.with_name("errors").open("wb") as errors:
            process = subprocess.Popen(
                command_of(self.root, self.steps), stdout=out, stderr=errors, process_group=0
            )
            self._wait(process)
            process.send_signal(signal.SIGKILL)
            code = process.wait()
        saved = acknowledged(self.shown)
        self.newest = max([self.newest, *saved])
        self.seen["saves"] += len(saved)
        if code == -signal.SIGKILL:
            self.seen["kills"] += 1
            self.look(before=not saved)
            return False
        if code:
            said = self.shown.with_name("errors").read_text(errors="replace")[-300:]
            self.seen["refused"].append(f"left with {code}: {said}")
        return True

    def _wait(self, process: subprocess.Popen) -> None:
        """Wait until a random time: while the program starts, or after its first save of the session."""
        began = time.monotonic()
        if self.newest and self.rng.random() < 0.3:
            end = began + self.rng.random() * self.starting * 1.2
        else:
            while process.poll() is None and not acknowledged(self.shown):
                time.sleep(0.005)
            self.starting = time.monotonic() - began
            end = time.monotonic() + self.rng.random() ** 2 * 0.8
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.002)

    def look(self, *, before: bool) -> None:
        """Check what the kill left behind."""
        from torchemo.runs.storage import checkpoint

        self.seen["before_the_first_save"] += before
        names = os.listdir(checkpoint.folder_of(self.root)) if self.newest else []
        self.seen["inside_a_save"] += any(name.startswith(".tmp-step-") for name in names)
        self.seen["inside_a_deletion"] += any(name.startswith(".tmp-trash-") for name in names)
        self.seen["torn"] += torn(self.root)
        steps = [checkpoint.step_of(path) for path in checkpoint.published(self.root)]
        if self.newest > max(steps, default=0):
            self.seen["lost"].append([self.newest, steps])


BAD = ("torn", "lost", "refused", "chains_that_differ")


def nothing_seen(steps: int) -> dict:
    """Return a record without any kill."""
    counted = ("kills", "saves", "before_the_first_save", "inside_a_save", "inside_a_deletion")
    seen: dict = {**dict.fromkeys(counted, 0), **{name: [] for name in BAD}, "seconds": 0}
    return {**seen, "steps_of_a_run": steps, "chains_begun": 0, "chains_finished": 0}


def kill(place: Path, count: int, *, seen: dict, tell) -> dict:
    """Kill until there were so many, over as many chains as that takes; tell and return what was seen."""
    steps, before = seen["steps_of_a_run"], seen["seconds"]
    began = time.monotonic()
    undisturbed = place / "undisturbed"
    subprocess.run(command_of(undisturbed, steps), check=True, stdout=subprocess.DEVNULL)
    right = saved_state(undisturbed)
    while seen["kills"] < count and not seen["refused"]:
        number = seen["chains_begun"]
        seen["chains_begun"] += 1
        folder = place / f"chain-{number}"
        folder.mkdir()
        chain = Chain(folder, random.Random(f"kills/{number}"), seen, steps=steps)
        while not chain.session():
            seen["seconds"] = before + round(time.monotonic() - began)
            tell(seen)
        if not seen["refused"]:
            seen["chains_finished"] += 1
            if saved_state(chain.root) != right:
                seen["chains_that_differ"].append(number)
    tell(seen)
    return seen


def main() -> int:
    """Run the command; 1 if something was lost, torn, refused or different."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack.kills", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run")
    parser.add_argument("--out", type=Path, default=RECORD, help="one that is there goes on")
    asked = parser.parse_args()

    def keep(found: dict) -> None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        seen = (
            json.loads(asked.out.read_text()) if asked.out.exists() else nothing_seen(asked.steps)
        )
        found = kill(Path(folder), asked.count, seen=seen, tell=keep)
    print(json.dumps(found))
    return int(any(found[name] for name in BAD))


if __name__ == "__main__":
    sys.exit(main())
