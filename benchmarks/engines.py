"""Run one study on every engine: are the scores the same, and what does each engine cost?

    python benchmarks/engines.py [--scales smoke cpu] [--engines ...] [--out benchmarks/results/engines.json]

Each study is the command that a user types, in a new folder. What is measured anew replaces its part of the
record; the rest stays. Seconds of the processor hold for a loaded machine, too; seconds of the clock do not.
"""

import argparse
import contextlib
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

OUT = Path(__file__).parent / "results" / "engines.json"
PAGE = Path(__file__).parents[1] / "docs" / "clusters.md"
BEGIN, END = "<!-- engines -->", "<!-- end of engines -->"
WORDS = ["T1", "--tasks", "regression", "--seeds", "0", "--no-controls"]
SHORT = ["train.steps=20", "train.validate_every=10", "train.validation_tasks=40"]
SCALES = {
    "smoke": ["--scale", "smoke", "--cells", "maml", "maml-emo"],
    "cpu": ["--scale", "cpu", "--cells", "maml-emo", "--options", *SHORT],
}
"""T1 on curves, one seed: two cells; and at scale cpu one with its grid of nine rates, trained briefly."""
ENGINES = {
    "in the command": ["--most", "1"],
    "local": ["--on", "local", "--most", "2"],
    "submitit-local": ["--on", "submitit-local", "--most", "2"],
    "dask": ["--most", "2"],
}


def main() -> None:
    """Measure what was asked for, and write the record and its table."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--scales", nargs="*", default=list(SCALES), choices=SCALES)
    words.add_argument("--engines", nargs="*", default=list(ENGINES), choices=ENGINES)
    words.add_argument("--out", type=Path, default=OUT)
    given = words.parse_args()
    record = json.loads(given.out.read_text()) if given.out.is_file() else {"studies": {}}
    for scale in given.scales:
        for engine in given.engines:
            found = _measured(scale, engine)
            record["studies"].setdefault(scale, {})[engine] = found
            print(scale, engine, json.dumps(found), flush=True)
    record |= _about()
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    if given.out == OUT:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table(record)}\n\n{END}{after}")


def _measured(scale: str, engine: str) -> dict:
    """Run the study once, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, _cluster(engine) as more:
        began, before = time.perf_counter(), _cpu()
        command = [sys.executable, "-m", "torchemo", "study", "run", *WORDS, *SCALES[scale]]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(  # noqa: S603
            [*command, *ENGINES[engine], *more, "--out", folder, "--json"],
            env=env, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        wall = time.perf_counter() - began
        found = _found(Path(folder))
    # Workers of dask have ended by now, so that their seconds are known, too.
    return {"wall_seconds": round(wall, 1), "cpu_seconds": round(_cpu() - before, 1), **found}


@contextlib.contextmanager
def _cluster(engine: str) -> Iterator[list[str]]:
    """Start workers of dask where they are needed; their start is not on the clock."""
    if engine != "dask":
        yield []
        return
    from distributed import LocalCluster

    with LocalCluster(2, threads_per_worker=1, dashboard_address=":0") as cluster:
        yield ["--on", cluster.scheduler_address.replace("tcp://", "dask://")]


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _found(out: Path) -> dict:
    """Return a digest of all scores, and what the runs themselves took."""
    (scores,) = out.glob("T1-*/scores.npz")
    ends = [json.loads(path.read_text()) for path in out.glob("runs/*/done.json")]
    return {
        "runs": len(ends),
        "training_cpu_seconds": round(sum(end["cpu_seconds"] for end in ends), 1),
        "scores": hashlib.sha256(scores.read_bytes()).hexdigest(),
    }


def table(record: dict) -> str:
    """Write the record as a table."""
    rows = ["| scale | engine | runs | processor, s | of that training, s | clock, s |"]
    rows.append("|---|---|---:|---:|---:|---:|")
    for scale, engines in record["studies"].items():
        for name, one in engines.items():
            seconds = f"{one['cpu_seconds']:.0f} | {one['training_cpu_seconds']:.0f}"
            rows.append(
                f"| {scale} | {name} | {one['runs']} | {seconds} | {one['wall_seconds']:.0f} |"
            )
    return "\n".join(rows)


def _about() -> dict:
    from torchemo.runs.environment import environment

    commands = {scale: " ".join(["torchemo study run", *WORDS, *SCALES[scale]]) for scale in SCALES}
    return {"commands": commands, "load": os.getloadavg(), "environment": environment()}


if __name__ == "__main__":
    main()
