"""Measure one 5-way run on tasks of other numbers of classes, and on classes with unequal shots.

python benchmarks/any_way.py --data ../shared/data     (half an hour on one core)

Trains ANIL, MAML and ProtoNet once on 5-way 1-shot tasks of birds (a head and an adapter on a pretrained
network) and of Omniglot (Conv-4), and scores them on tasks of 2 to 20 classes. Validation tasks decide how a
head is extended: which rows it starts from, what an example weighs, and what a class with more shots weighs.
Test tasks are for the table, which goes into docs/any-way.md. Runs that are recorded are not trained again.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

import torchemo
from torchemo.core.stats import mean_interval, paired_difference
from torchemo.core.tree import with_rows
from torchemo.core.types import Batch
from torchemo.runs.environment import environment
from torchemo.runs.load import load_best
from torchemo.training.classes import for_classes, for_shots
from torchemo.training.evaluate import batches

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "benchmarks/results/any_way.json", ROOT / "docs/any-way.md"
LEARNERS = ("anil", "maml", "protonet")
SETS = {
    "birds": ("birds84.zip", {"model.name": "efficientnet-lite0"}),
    "omniglot": (
        "omniglot28.npz",
        {"data.channels": 1, "data.image_size": 28, "data.n_query": 5, "model.filters": 16},
    ),
}
TRAINED, STEPS, TASKS = 5, 600, 200
WAYS = {"val": (2, 3, 4, 10, 16), "test": (2, 4, 5, 7, 10, 20)}
SHOTS = ((1, 1, 1, 1, 5), (1, 2, 3, 4, 5), (1, 5, 5, 5, 5))
HOW = tuple(product(("mean", "kept"), ("alike", "shared")))


def extended(system, n_way, *, rows, weight):
    """Extend a system to ``n_way`` classes.

    rows: all at their ``mean``, or the trained ones ``kept``. weight: an example weighs as in training
    (``alike``: n / 5 times the mean loss), or all of them share what the support loss weighs (``shared``).
    """
    own, found = set(system.learner.per_class(system.params)), for_classes(system, n_way)
    params = {
        name: with_rows(p, n_way, keep=rows == "kept") if name in own else p
        for name, p in system.params.items()
    }
    loop = replace(
        found.learner.loop,
        loss_scale=system.learner.loop.loss_scale * (n_way / TRAINED if weight == "alike" else 1),
    )
    return replace(found, params=params, learner=replace(found.learner, loop=loop))


def accuracies(system, source, split):
    """Score fixed tasks; accuracy of each after the last inner step."""
    tasks = batches(
        lambda start, count: source.sample(split, seed=0, start=start, count=count), tasks=TASKS
    )
    return system.evaluate(tasks, every_step=False).accuracy[:, -1].double().numpy()


def ways(system, source, split):
    """Score every number of classes; on validation tasks every way to extend a head."""
    rows = []
    for n_way in WAYS[split]:
        tasks = replace(source, spec=replace(source.spec, n_way=n_way))
        learned = hasattr(system.learner, "loop") and n_way != TRAINED
        if split == "val" and learned:
            each = {
                f"{r}, {w}": accuracies(extended(system, n_way, rows=r, weight=w), tasks, split)
                for r, w in HOW
            }
        else:
            now = system if n_way == TRAINED else for_classes(system, n_way)
            each = {"as it is": accuracies(now, tasks, split)}
        first = next(iter(each.values()))
        rows += [
            {
                "split": split,
                "way": n_way,
                "how": how,
                "accuracy": mean_interval(found).to_dict(),
                "against the first": paired_difference(found, first).to_dict()["difference"],
            }
            for how, found in each.items()
        ]
    return rows


def unequal(system, source, shots):
    """Score validation tasks whose classes have these shots, with classes or examples weighing alike."""
    whole = replace(source, spec=replace(source.spec, n_shot=max(shots)))

    def sample(start, count):
        episode = whole.sample("val", seed=0, start=start, count=count)
        return replace(episode, support=thinned(episode.support, shots))

    each = {
        how: system_scores(replace(system, learner=learner), sample)
        for how, learner in (
            ("examples", system.learner),
            ("classes", for_shots(system.learner, shots)),
        )
    }
    return {
        "shots": shots,
        **{how: mean_interval(found).to_dict() for how, found in each.items()},
        "difference": paired_difference(each["classes"], each["examples"]).to_dict()["difference"],
    }


def system_scores(system, sample):
    """Score the tasks that ``sample`` draws."""
    found = system.evaluate(batches(sample, tasks=TASKS), every_step=False)
    return found.accuracy[:, -1].double().numpy()


def thinned(support, shots):
    """Keep the first examples of each class, as many as its shots."""
    places = [
        torch.cat([(y == c).nonzero().flatten()[:n] for c, n in enumerate(shots)])
        for y in support.y
    ]
    return Batch(
        *(torch.stack([t[p] for t, p in zip(part, places, strict=True)]) for part in support)
    )


def measured(data, name, learner, *, steps):
    """Train one run and score it."""
    file, options = SETS[name]
    with tempfile.TemporaryDirectory() as folder:
        out, began = f"{folder}/run", time.process_time()
        given = {"options": options, "steps": steps, "shot": 1, "way": TRAINED}
        torchemo.train(learner, data=data / file, out=out, **given)
        seconds, opened = time.process_time() - began, load_best(Path(out))
        system, source = opened.system, opened.source
        scores = [row for split in WAYS for row in ways(system, source, split)]
        learned = hasattr(system.learner, "loop")
        shots = [unequal(system, source, s) for s in SHOTS] if learned else []
    about = {"set": name, "learner": learner, "cpu_seconds": round(seconds, 1)}
    return {**about, "ways": scores, "unequal": shots}


def percent(score):
    """Write an accuracy with its 95 % interval, in percent."""
    half = 50 * (score["high"] - score["low"])
    return f"{100 * score['value']:.1f} ± {half:.1f}"


def tests_table(runs):
    """Write the accuracies on test tasks as a table of Markdown."""
    head = "| set | learner | " + " | ".join(f"{n}-way" for n in WAYS["test"]) + " |"
    lines = [head, "|---|---|" + "---:|" * len(WAYS["test"])]
    for run in runs:
        own = {r["way"]: percent(r["accuracy"]) for r in run["ways"] if r["split"] == "test"}
        cells = [own.get(n_way, "not measured") for n_way in WAYS["test"]]
        lines.append(f"| {run['set']} | {run['learner']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def choice_table(runs):
    """Write the accuracies on validation tasks of every way to extend a head."""
    names = [f"{rows}, {weight}" for rows, weight in HOW]
    lines = [
        f"| set | learner | way | {' | '.join(names)} |",
        "|---|---|---:|" + "---:|" * len(names),
    ]
    for run in runs:
        for n_way in WAYS["val"]:
            found = {r["how"]: r for r in run["ways"] if (r["split"], r["way"]) == ("val", n_way)}
            if names[0] in found:
                cells = [percent(found[name]["accuracy"]) for name in names]
                lines.append(f"| {run['set']} | {run['learner']} | {n_way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shots_table(runs):
    """Write what weighing classes alike changes where shots are unequal."""
    lines = ["| set | learner | shots | examples alike | classes alike | difference |"]
    lines.append("|---|---|---|---:|---:|---:|")
    for run in runs:
        for row in run["unequal"]:
            change = row["difference"]
            ends = f"[{100 * change['low']:+.1f}, {100 * change['high']:+.1f}]"
            cells = [percent(row["examples"]), percent(row["classes"])]
            cells.append(f"{100 * change['value']:+.1f} {ends}")
            shots = ", ".join(map(str, row["shots"]))
            lines.append(f"| {run['set']} | {run['learner']} | {shots} | {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES = {"tests": tests_table, "choice": choice_table, "shots": shots_table}


def page(runs):
    """Write the tables into the page."""
    text = PAGE.read_text()
    for name, table in TABLES.items():
        begin, end = f"<!-- table: {name} -->", f"<!-- end: {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table(runs)}\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text)


def main():
    """Train and score what is not recorded yet, then write record and page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=RECORD)
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs = json.loads(given.out.read_text())["runs"] if given.out.exists() else []
    known = {(run["set"], run["learner"]) for run in runs}
    for name, learner in product(SETS, LEARNERS):
        if (name, learner) not in known:
            runs.append(measured(given.data.resolve(), name, learner, steps=given.steps))
            about = {"steps": given.steps, "tasks": TASKS, "environment": environment()}
            given.out.write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n")
            print(name, learner, runs[-1]["cpu_seconds"], flush=True)
    if given.out == RECORD and PAGE.exists():
        page(runs)


if __name__ == "__main__":
    main()
