"""Measure what each normalisation costs when every query is answered by itself.

python benchmarks/alone.py --data ../shared/data     (15 minutes on one core)

Trains small networks with every ``model.bn`` on birds, Omniglot and icons, and scores validation and test
tasks with both kinds of statistics. The default of the presets is chosen on validation tasks; test tasks are
for the table, which goes into docs/standing-alone.md. Runs that are recorded already are not trained again.
"""

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import torch

import torchemo
from torchemo.runs.environment import environment
from torchemo.runs.load import load_best
from torchemo.runs.score import Protocol, score_tasks

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "benchmarks/results/alone.json", ROOT / "docs/standing-alone.md"
SETS = {"birds": "birds84.zip", "omniglot": "omniglot28.npz", "icons": "icons32.npz"}
NORMS = ("transductive", "support", "per_query_with_support", "running", "group", "layer")
LEARNERS = ("maml", "protonet")
SEEDS = (0,)
TASKS = {"val": 200, "test": 200}
OPTIONS = {
    "model.filters": 8,
    "data.n_query": 5,
    "train.validate_every": 300,
    "train.validation_tasks": 50,
}
STEPS = 300
BEGIN, END = "<!-- table: norms -->", "<!-- end -->"


def measured(data, name, learner, bn, seed):
    """Train one run and score it; accuracies in percent."""
    torch.set_num_threads(1)
    options = {**OPTIONS, "model.bn": bn, "data.channels": 1 if name == "omniglot" else 3}
    with tempfile.TemporaryDirectory() as folder:
        out, began = f"{folder}/run", time.process_time()
        given = {"options": options, "steps": STEPS, "seed": seed, "size": 28}
        torchemo.train(learner, data=data / SETS[name], out=out, **given)
        seconds, opened = time.process_time() - began, load_best(Path(out))
        scores = {
            f"{split} {statistics}": score_tasks(
                opened,
                Protocol(tasks=tasks, split=split, statistics=statistics),
                every_step=False,
            )["summary"]["last"]
            for (split, tasks), statistics in product(TASKS.items(), ("inductive", "transductive"))
        }
    found = {kind: round(100 * score["value"], 2) for kind, score in scores.items()}
    about = {"set": name, "learner": learner, "bn": bn, "seed": seed}
    return {**about, **found, "cpu_seconds": round(seconds, 1)}


def table(rows):
    """Write the means over seeds as a table of Markdown."""
    kinds = ("val inductive", "test inductive", "test transductive")
    lines = [
        "| set | learner | `model.bn` | " + " | ".join(kinds) + " | CPU s to train |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for name, learner, bn in product(SETS, LEARNERS, NORMS):
        own = [r for r in rows if (r["set"], r["learner"], r["bn"]) == (name, learner, bn)]
        if own:
            scores = [f"{mean(r[kind] for r in own):.1f}" for kind in kinds]
            seconds = f"{mean(r['cpu_seconds'] for r in own):.0f}"
            lines.append("| " + " | ".join([name, learner, f"`{bn}`", *scores, seconds]) + " |")
    return "\n".join(lines)


def saved(rows):
    """Write the record and the table of the page."""
    rows.sort(key=lambda r: (r["set"], r["learner"], r["bn"], r["seed"]))
    settings = {"steps": STEPS, "options": OPTIONS, "tasks": TASKS, "environment": environment()}
    RECORD.write_text(json.dumps({**settings, "runs": rows}, indent=1) + "\n")
    if PAGE.exists():
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")


def main():
    """Train and score what is not recorded yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    rows = json.loads(RECORD.read_text())["runs"] if RECORD.exists() else []
    known = {(r["set"], r["learner"], r["bn"], r["seed"]) for r in rows}
    wanted = [
        (name, learner, bn, seed)
        for seed, learner, name, bn in product(SEEDS, LEARNERS, SETS, NORMS)
        if (name, learner, bn, seed) not in known
    ]
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as crew:
        jobs = [crew.submit(measured, given.data.resolve(), *one) for one in wanted]
        for job in as_completed(jobs):
            rows.append(job.result())
            print(json.dumps(rows[-1]), flush=True)
            saved(rows)
    saved(rows)


if __name__ == "__main__":
    main()
