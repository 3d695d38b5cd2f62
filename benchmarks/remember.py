"""Measure what a store of visits gains, and what clipping, noise and exact forgetting cost.

python benchmarks/remember.py --data ../shared/data     (ten minutes on one core)
python benchmarks/remember.py                           (write the table of the page again)

Trains ANIL on features of a frozen EfficientNet-Lite0 in the ordinary way. Tasks of test classes then come
back five times, with one new image per class each time. Accuracy by visit, averaged over seeds: without a
store, with a store as `adapt --remember` keeps it (gradients of the base learner's own path), with gradients
of the path that past visits had a part in, and with clipping and noise.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

import torchemo
from torchemo.core.stats import mean_interval
from torchemo.core.types import Batch
from torchemo.memory.lifelong.memory import LifelongMemory
from torchemo.memory.lifelong.recognise import ByName
from torchemo.runs.environment import environment
from torchemo.runs.experiment import open_tasks
from torchemo.runs.visits.index import Settings
from torchemo.runs.visits.protect import protected
from torchemo.training.lifelong import revisit

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "benchmarks/results/remember.json", ROOT / "docs/remember.md"
BEGIN, END = "<!-- table: visits -->", "<!-- end -->"
SETS = {"birds": "birds84.zip", "flowers": "flowers84.zip", "aircraft": "aircraft84_47classes.zip"}
SEEDS, TASKS, VISITS, WAY, QUERIES, STEPS = (0, 1, 2), 200, 5, 5, 15, 600
CLIPS = (None, 20.0, 10.0, 5.0, 2.0)
NOISES = (0.001, 0.003, 0.01, 0.03, 0.1)
CLIP_OF_NOISE = 10.0
STORES = {
    **{f"clip {clip:g}" if clip else "store": Settings(clip=clip) for clip in CLIPS},
    **{
        f"clip {CLIP_OF_NOISE:g}, noise {noise:g}": Settings(clip=CLIP_OF_NOISE, noise=noise)
        for noise in NOISES
    },
}


def tasks_of(run):
    """Draw test tasks with as many shots as there are visits, ordered by visit."""
    data = replace(run.config.data, n_shot=VISITS, n_query=QUERIES)
    source = open_tasks(replace(run.config, data=data), needed=("test",))
    episode = source.sample("test", seed=7, start=0, count=TASKS)
    order = torch.stack([
        torch.cat([(y == c).nonzero()[v] for v in range(VISITS) for c in range(WAY)])
        for y in episode.support.y
    ])  # fmt: skip
    rows = torch.arange(TASKS)[:, None]
    return episode, Batch(episode.support.x[rows, order], episode.support.y[rows, order])


def accuracy(found, query):
    """Return the accuracy of each task in percent."""
    right = found.outputs(query.x).argmax(2) == query.y
    return 100 * right.double().mean(1)


def by_visit(run, seed):
    """Return accuracies ``{method: [visit, task]}`` and facts about the stored gradients."""
    system = run.trained.system
    learner, params = system.learner, system.params
    episode, support = tasks_of(run)
    names = [tuple(f"task {b} class {c}" for c in range(WAY)) for b in range(TASKS)]
    memories = {name: LifelongMemory(ByName(), head=learner.model.head) for name in STORES}
    joined = LifelongMemory(ByName(), head=learner.model.head)
    noise = torch.Generator().manual_seed(seed)
    found = {name: [] for name in ("no store", "joined path", *STORES)}
    norms, size = [], 0
    for v in range(VISITS):
        part = slice(v * WAY, (v + 1) * WAY)
        now = Batch(support.x[:, part], support.y[:, part])

        def again(memory, now=now):
            return revisit(learner, params, now, memory, names=names)

        alone = LifelongMemory(ByName(), head=learner.model.head)
        base, after = again(alone), again(joined)
        found["no store"].append(accuracy(base, episode.query))
        found["joined path"].append(accuracy(after, episode.query))
        for name, memory in memories.items():
            found[name].append(accuracy(again(memory), episode.query))
        after.remember()
        for kept in base.remember():
            squares = [g.flatten(1).square().sum(1) for g in kept.values.values()]
            norms.append(torch.stack(squares).sum(0).sqrt())
            size = sum(4 * g.numel() for g in kept.values.values())
            for name, settings in STORES.items():
                values, means = protected(kept.values, kept.sight.means, settings, generator=noise)
                sight = kept.sight._replace(means=means)
                memories[name].add(kept._replace(values=values, sight=sight))
    first = torch.stack(norms)[:, 0]
    facts = {
        "bytes of gradients per visit": size,
        "norm of the first gradient": float(first.median()),
    }
    return {name: torch.stack(rows) for name, rows in found.items()}, facts


def measured(data, name, seed, folder):
    """Train a run and measure its visits."""
    began = time.process_time()
    given = {"model": "efficientnet-lite0", "drop_duplicates": True, "steps": STEPS, "seed": seed}
    options = {"train.validate_every": STEPS}
    run = torchemo.train("anil", data=data / SETS[name], out=folder, options=options, **given)
    trained = time.process_time() - began
    found, facts = by_visit(run, seed)
    return found, {
        **facts,
        "cpu seconds": {"training": trained, "all": time.process_time() - began},
    }


def estimate(values):
    """Write a mean with its interval."""
    found = mean_interval(values)
    return {key: round(getattr(found, key), 3) for key in ("value", "low", "high")}


def summary(found):
    """Return accuracy by visit, and the gain of the last visit over no store, paired by task."""
    none = found["no store"][-1]
    return {
        name: {
            "accuracy": [round(float(row.mean()), 2) for row in rows],
            "gain": estimate((rows[-1] - none).tolist()),
        }
        for name, rows in found.items()
    }


def table(record):
    """Return accuracy at the first and the last visit, and the gain over no store, for every method."""
    sets = record["sets"]
    lines = [f"| kept | {' | '.join(sets)} |", f"|---|{'---|' * len(sets)}"]
    for method in next(iter(sets.values()))["methods"]:
        cells = []
        for found in sets.values():
            rows, gain = found["methods"][method]["accuracy"], found["methods"][method]["gain"]
            ends = (
                ""
                if method == "no store"
                else f" ({gain['value']:+.1f} [{gain['low']:+.1f}, {gain['high']:+.1f}])"
            )
            cells.append(f"{rows[0]:.1f} → {rows[-1]:.1f}{ends}")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_table():
    """Put the table of the record into the page."""
    text, record = PAGE.read_text(), json.loads(RECORD.read_text())
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table(record)}\n{END}{after}")


def main():
    """Measure, or write the table again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, help="folder of image sets; without it nothing is measured"
    )
    data = parser.parse_args().data
    if data is not None:
        measure(data.resolve())
    write_table()


def measure(data):
    """Measure and write the record."""
    torch.set_num_threads(1)
    sets = {}
    with tempfile.TemporaryDirectory(prefix="torchemo-") as scratch:
        for name in SETS:
            runs = [measured(data, name, seed, f"{scratch}/{name}-{seed}") for seed in SEEDS]
            # The same test tasks for every seed: a task counts once, with the mean over seeds.
            together = {m: torch.stack([f[m] for f, _ in runs]).mean(0) for m in runs[0][0]}
            sets[name] = {"methods": summary(together), "runs": [facts for _, facts in runs]}
            print(name, json.dumps(sets[name]["methods"]), flush=True)
    what = "accuracy by visit of tasks that come back, in percent; gain at the last visit, paired by task"
    protocol = {"seeds": len(SEEDS), "tasks": TASKS, "way": WAY, "shots": 1, "queries": QUERIES,
                "training steps": STEPS, "learner": "anil", "network": "efficientnet-lite0"}  # fmt: skip
    record = {"what": what, "protocol": protocol, "environment": environment(), "sets": sets}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
