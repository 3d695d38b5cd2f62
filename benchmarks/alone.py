"""Measure what each normalisation costs when every query is answered by itself.

python benchmarks/alone.py --data ../shared/data     (half an hour on one core)

Trains small networks with every ``model.bn`` on birds, Omniglot and icons, and scores validation and test
tasks, each query by itself; where the answers depend on the batch, test tasks also with all queries at once.
The default of the presets is chosen on validation tasks; test tasks are for the table. Both tables go into
docs/standing-alone.md. Runs that are recorded already are not trained again.
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

import numpy as np
import torch

import torchemo
from torchemo.core.stats import mean_interval, paired_difference
from torchemo.lab.study.datasets import prepare
from torchemo.runs.environment import environment
from torchemo.runs.load import load_best
from torchemo.runs.score import Protocol, score_tasks

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "benchmarks/results/alone.json", ROOT / "docs/standing-alone.md"
SETS = {"birds": "birds84", "omniglot": "omniglot28", "icons": "icons32"}
BATCH = ("transductive", "support")
NORMS = (*BATCH, "per_query_with_support", "running", "group", "layer")
USUAL = {"maml": "transductive", "protonet": "running"}
"""Learners, and the ``model.bn`` of their presets."""
SEEDS = (0,)
TASKS, SIZE, STEPS = 200, 28, 300
OPTIONS = {
    "model.filters": 16,
    "data.n_query": 5,
    "train.validate_every": STEPS,
    "train.validation_tasks": 4,
}
OWN = {"omniglot": {"data.channels": 1}, "icons": {"data.drop_duplicates": True}}
"""Options of single sets; some icons are in two splits."""
KINDS = ("val inductive", "test inductive", "test transductive")


def measured(source, name, learner, bn, seed):
    """Train one run and score it; shares of right answers, for each task."""
    torch.set_num_threads(1)
    options = {**OPTIONS, "model.bn": bn, "data.channels": 3, **OWN.get(name, {})}
    with tempfile.TemporaryDirectory() as folder:
        out, began = f"{folder}/run", time.process_time()
        given = {"options": options, "steps": STEPS, "seed": seed, "size": SIZE}
        torchemo.train(learner, data=source, out=out, **given)
        seconds, opened = time.process_time() - began, load_best(Path(out))
        # Answers of the other networks do not depend on what else is asked.
        kinds = KINDS if bn in BATCH else KINDS[:2]
        scores = {kind: scored(opened, *kind.split()) for kind in kinds}
    about = {"set": name, "learner": learner, "bn": bn, "seed": seed}
    return {**about, "cpu_seconds": round(seconds, 1), "accuracy": scores}


def scored(opened, split, statistics):
    """Return the share of right answers of every task."""
    how = Protocol(tasks=TASKS, split=split, statistics=statistics)
    found = score_tasks(opened, how, every_step=False)["per_task"]
    return [round(task[-1], 4) for task in found]


def tasks_of(rows, name, learner, bn, kind):
    """Return the accuracy of every task, mean over seeds; None where nothing was measured."""
    about = (name, learner, bn)
    own = [r["accuracy"].get(kind) for r in rows if (r["set"], r["learner"], r["bn"]) == about]
    return np.mean(own, axis=0) if own and None not in own else None


def table(rows):
    """Write the accuracies as a table of Markdown."""
    lines = [
        "| set | learner | `model.bn` | " + " | ".join(KINDS) + " | CPU s to train |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for name, learner, bn in product(SETS, USUAL, NORMS):
        own = [r for r in rows if (r["set"], r["learner"], r["bn"]) == (name, learner, bn)]
        if own:
            found = [tasks_of(rows, name, learner, bn, kind) for kind in KINDS]
            scores = [percent(found[1] if tasks is None else tasks) for tasks in found]
            seconds = f"{mean(r['cpu_seconds'] for r in own):.0f}"
            lines.append("| " + " | ".join([name, learner, f"`{bn}`", *scores, seconds]) + " |")
    return "\n".join(lines)


def choice(rows):
    """Write what each option costs against the preset's, on the same validation tasks."""
    lines = [
        "| learner | `model.bn` | " + " | ".join(SETS) + " | all |",
        "|---|---|" + "---:|" * (len(SETS) + 1),
    ]
    for learner, bn in product(USUAL, NORMS):
        pairs = [
            [tasks_of(rows, name, learner, norm, KINDS[0]) for norm in (bn, USUAL[learner])]
            for name in SETS
        ]
        if bn == USUAL[learner]:
            cells = ["preset's"] * (len(pairs) + 1)
        else:
            known = [pair for pair in pairs if all(side is not None for side in pair)]
            whole = [np.concatenate(side) for side in zip(*known, strict=True)]
            pairs.append(whole if len(known) == len(SETS) else [None, None])
            cells = [change(*pair) for pair in pairs]
        lines.append("| " + " | ".join([learner, f"`{bn}`", *cells]) + " |")
    return "\n".join(lines)


def percent(tasks):
    """Write a mean accuracy with its 95 % interval over tasks."""
    found = mean_interval(tasks)
    return f"{100 * found.value:.1f} ± {100 * found.half_width:.1f}"


def change(own, usual):
    """Write a paired difference in points with its 95 % interval over tasks."""
    if own is None or usual is None:
        return "not measured"
    found = paired_difference(own, usual).difference
    return f"{100 * found.value:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


TABLES = {"norms": table, "choice": choice}


def saved(rows):
    """Write the record, and the tables of the page."""
    rows.sort(key=lambda r: (r["set"], r["learner"], r["bn"], r["seed"]))
    settings = {"steps": STEPS, "size": SIZE, "options": OPTIONS, "own": OWN, "tasks": TASKS}
    settings["environment"] = environment()
    runs = ",\n".join(json.dumps(row) for row in rows)
    RECORD.write_text(f'{json.dumps(settings, indent=1)[:-2]},\n "runs": [\n{runs}\n]}}\n')
    if PAGE.exists():
        page(rows)


def page(rows):
    """Write the tables into the page."""
    text = PAGE.read_text()
    for name, made in TABLES.items():
        begin, end = f"<!-- table: {name} -->", f"<!-- end: {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{made(rows)}\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text)


def main():
    """Train and score what is not recorded yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    rows = json.loads(RECORD.read_text())["runs"] if RECORD.exists() else []
    known = {(r["set"], r["learner"], r["bn"], r["seed"]) for r in rows}
    wanted = [
        (name, learner, bn, seed)
        for seed, name, learner, bn in product(SEEDS, SETS, USUAL, NORMS)
        if (name, learner, bn, seed) not in known
    ]
    with tempfile.TemporaryDirectory() as folder:
        # Decoded once for all runs.
        places = prepare(
            SETS.values(), data=given.data.resolve(), out=Path(folder), image_size=SIZE
        )
        with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as crew:
            jobs = [crew.submit(measured, places[SETS[one[0]]], *one) for one in wanted]
            for job in as_completed(jobs):
                rows.append(job.result())
                print({n: v for n, v in rows[-1].items() if n != "accuracy"}, flush=True)
                saved(rows)
    saved(rows)


if __name__ == "__main__":
    main()
