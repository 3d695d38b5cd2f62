"""Measure an outer step in one process, with two task workers, and in two ranks, interleaved.

    python benchmarks/ranks.py [--rounds 3] [--out benchmarks/results/ranks.json]

Every figure is a ratio within a round, so that a load which changes slowly falls out. Needs two cores. On a
machine with other work, seconds of the clock say little: the seconds of the processor that a rank needs
for a step say how fast it could be at most.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

SETTINGS = {"1 process": (1, 1), "2 task workers": (1, 2), "2 ranks": (2, 1)}
"""Ranks, and threads of each."""
PAGE = Path(__file__).parents[1] / "docs" / "devices.md"
BEGIN, END = "<!-- ranks -->", "<!-- end of ranks -->"
PRESET, STEPS, SKIPPED = "maml-emo-paper", 6, 2


def main() -> None:
    """Measure all settings in turn, or one of them inside a rank."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--out", type=Path, default=Path("benchmarks/results/ranks.json"))
    words.add_argument("--inside", type=int)
    given = words.parse_args()
    if given.inside is not None:
        _inside(given.inside)
        return
    rounds = []
    for _ in range(given.rounds):
        rounds.append({name: _run(*setting) for name, setting in SETTINGS.items()})
        print(json.dumps(rounds[-1]), flush=True)
        # What is measured so far is kept.
        record = _record(rounds)
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(record)}\n\n{END}{after}")


def _run(ranks: int, workers: int) -> dict[str, float]:
    """Return the median seconds of a step, of the clock and of the processor in the first process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", "29690", __file__, "--inside", str(workers)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(  # noqa: S603
        command, env=env, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _inside(workers: int) -> None:
    from torchemo.config.presets import preset
    from torchemo.runs.experiment import open_experiment
    from torchemo.training.device import HERE, joined, task_workers

    task_workers()
    config = preset(PRESET)
    config = replace(config, data=replace(config.data, image_size=84))
    with joined(HERE._replace(workers=workers)) as place:
        found = open_experiment(config, place=place)
        times, used = [], []
        for step in range(STEPS):
            tasks = config.train.tasks
            episode = found.source.sample("train", seed=0, start=step * tasks, count=tasks)
            began, cpu = time.perf_counter(), time.process_time()
            found.trainer.step(episode)
            times.append(time.perf_counter() - began)
            used.append(time.process_time() - cpu)
        if place.team.rank == 0:
            clock, cpu = (statistics.median(one[SKIPPED:]) for one in (times, used))
            print(json.dumps({"clock": clock, "processor": cpu}))


def table(record: dict) -> str:
    """Write the record as a table."""
    rows = ["| | processor, s | clock, s |", "|---|---:|---:|"]
    for name in SETTINGS:
        found = [
            statistics.median(one[name][kind] for one in record["seconds_per_step"])
            for kind in ("processor", "clock")
        ]
        rows.append(f"| {name} | {found[0]:.2f} | {found[1]:.2f} |")
    return "\n".join(rows)


def _record(rounds: list) -> dict:
    from torchemo.runs.environment import environment

    faster = {
        kind: {
            name: round(
                statistics.median(one["1 process"][kind] / one[name][kind] for one in rounds), 3
            )
            for name in SETTINGS
        }
        for kind in ("clock", "processor")
    }
    about = f"{PRESET}, Conv-4-32, 84 px, 5-way 1-shot, 4 tasks, median of {STEPS - SKIPPED} steps"
    return {
        "what": about,
        "seconds_per_step": rounds,
        "one_process_by_this": faster,
        "load": os.getloadavg(),
        "environment": environment(),
    }


if __name__ == "__main__":
    main()
